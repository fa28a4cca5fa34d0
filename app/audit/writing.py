"""The audit database: every way of writing to it. Its tables are in `schema`, its values in `records`.

Plain SQLite that others can query. Each writing function is run inside one transaction of the writer thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlite_utils

from app.audit import chains
from app.audit.records import DERIVED, CompressionPoint, Eviction, Move, Recall, SessionRecord, StoredBlock, pack
from ingest.jobs import new_id, now

SESSION = """
    SELECT s.seq, s.id, s.title, s.system_prompt, s.budget_tokens, s.method, s.score, s.model, s.created_at,
        s.updated_at, s.forked_from,
        (SELECT count(*) FROM turns t WHERE t.session_id = s.id AND t.status = 'done') AS turns,
        (SELECT coalesce(sum(tokens), 0) FROM blocks b WHERE b.session_id = s.id AND b.state = 'resident')
            AS resident_tokens,
        (SELECT coalesce(sum(tokens), 0) FROM blocks b WHERE b.session_id = s.id) AS seen_tokens,
        coalesce((SELECT substr(t.question, 1, 120) FROM turns t WHERE t.session_id = s.id ORDER BY t.seq LIMIT 1), '')
            AS preview
    FROM sessions s
"""

# Writing: each is run inside one transaction of the writer thread.


def recover(db: sqlite_utils.Database) -> int:
    """Mark turns that an earlier process left running as failed, and clear up after deletions that it did not finish.

    Returns how many turns there were.
    """
    for table in ("blocks", "turns"):
        db.execute(f"DELETE FROM {table} WHERE session_id NOT IN (SELECT id FROM sessions)")
    db.execute("DELETE FROM exchanges WHERE rowid NOT IN (SELECT seq FROM turns)")
    problem = json.dumps({"detail": "The process stopped during this turn."})
    lost = list(db.query("SELECT id, session_id FROM turns WHERE status = 'running'"))
    for turn in lost:
        db.execute(
            "UPDATE turns SET status = 'failed', problem = ?, finished_at = ? WHERE id = ?",
            [problem, now(), turn["id"]],
        )
        _insert_point_of_blocks(db, turn["session_id"], turn["id"], "rolled_back")
    return len(lost)


def insert_session(db: sqlite_utils.Database, session: SessionRecord, system: StoredBlock) -> None:
    """Record a session and its system block."""
    row = msgspec.to_builtins(session)
    for derived in DERIVED:
        del row[derived]
    db.table("sessions").insert(row)
    insert_blocks(db, session.id, [system])


def delete_session(db: sqlite_utils.Database, session_id: str) -> None:
    """Delete a session's texts and blocks. Its evictions and compression stay: they hold numbers and ids only."""
    db.execute("DELETE FROM exchanges WHERE rowid IN (SELECT seq FROM turns WHERE session_id = ?)", [session_id])
    for table, column in (("sessions", "id"), ("turns", "session_id"), ("blocks", "session_id")):
        db.execute(f"DELETE FROM {table} WHERE {column} = ?", [session_id])


def rename_session(db: sqlite_utils.Database, session_id: str, title: str) -> None:
    """Give a session another title."""
    db.execute("UPDATE sessions SET title = ?, updated_at = ? WHERE id = ?", [title, now(), session_id])


def fork_session(db: sqlite_utils.Database, session: SessionRecord, before: int | None = None) -> dict[str, str]:
    """Record `session` as a copy of the one it says it is forked from: history, blocks that can be had, scores.

    before: number of the first turn of which nothing is taken over; None takes all. Returns what each block that is
    taken over is called in the new one.
    """
    old = session.forked_from
    row = msgspec.to_builtins(session)
    for derived in DERIVED:
        del row[derived]
    db.table("sessions").insert(row)
    end = 2**62 if before is None else before
    turns: dict[str, str] = {}
    for turn in list(
        db.query("SELECT * FROM turns WHERE session_id = ? AND status = 'done' AND number < ? ORDER BY seq", [old, end])
    ):
        turns[turn["id"]] = new_id("trn")
        copy = {**turn, "id": turns[turn["id"]], "session_id": session.id}
        del copy["seq"]
        db.table("turns").insert(copy)
        _index_exchange(db, copy["id"])
    names: dict[str, str] = {}
    for block in list(db.query("SELECT * FROM blocks WHERE session_id = ? AND turn < ? ORDER BY seq", [old, end])):
        names[block["id"]] = new_id("blk")
        changed = {"id": names[block["id"]], "session_id": session.id, "turn_id": turns.get(block["turn_id"])}
        copy = {**block, **changed}
        del copy["seq"]
        db.table("blocks").insert(copy)
    for turn in list(db.query("SELECT id, resident FROM turns WHERE session_id = ?", [session.id])):
        seen = [names[block] for block in json.loads(turn["resident"] or "[]") if block in names]
        db.execute("UPDATE turns SET resident = ? WHERE id = ?", [json.dumps(seen), turn["id"]])
    _insert_point_of_blocks(db, session.id, "", "forked")
    return names


def begin_turn(db: sqlite_utils.Database, session_id: str, turn_id: str, question: str) -> int:
    """Record that a turn runs. Returns its number in the session, from 1."""
    (number,) = _one(db, "SELECT coalesce(max(number), 0) + 1 FROM turns WHERE session_id = ?", [session_id])
    db.table("turns").insert(
        {
            "id": turn_id,
            "session_id": session_id,
            "number": number,
            "status": "running",
            "question": question,
            "created_at": now(),
        }
    )
    return int(number)


def abandon_turn(db: sqlite_utils.Database, turn_id: str) -> None:
    """Forget a turn that was refused before it did anything."""
    db.execute("DELETE FROM turns WHERE id = ?", [turn_id])


def fail_turn(db: sqlite_utils.Database, turn_id: str, problem: dict[str, Any]) -> None:
    """Record that a turn failed and was rolled back."""
    db.execute(
        "UPDATE turns SET status = 'failed', problem = ?, finished_at = ? WHERE id = ?",
        [json.dumps(problem), now(), turn_id],
    )


def end_turn(
    db: sqlite_utils.Database,
    session_id: str,
    turn_id: str,
    blocks: Sequence[StoredBlock],
    scores: dict[str, float],
    point: CompressionPoint,
    **columns: Any,
) -> None:
    """Commit a turn: its row, its question and answer blocks, the scores of all resident ones, the cache figures."""
    values = {
        name: value if value is None or isinstance(value, str) else json.dumps(msgspec.to_builtins(value))
        for name, value in columns.items()
    }
    time = now()
    settings = ", ".join(f"{name} = ?" for name in [*values, "finished_at"])
    db.execute(f"UPDATE turns SET {settings} WHERE id = ?", [*values.values(), time, turn_id])
    insert_blocks(db, session_id, blocks)
    if blocks:
        _index_exchange(db, turn_id)
    if columns["status"] == "done":
        # Also of exchanges that were only told, and have no blocks: a history without its beginning is another one.
        _link(db, session_id, turn_id)
    for block_id, score in scores.items():
        db.execute("UPDATE blocks SET score = ? WHERE id = ?", [score, block_id])
    db.execute("UPDATE sessions SET updated_at = ? WHERE id = ?", [time, session_id])
    db.execute(
        """UPDATE turns SET resident = (SELECT json_group_array(id) FROM (SELECT id FROM blocks
           WHERE session_id = ? AND state = 'resident' ORDER BY seq)) WHERE id = ?""",
        [session_id, turn_id],
    )
    insert_point(db, session_id, point)


def _link(db: sqlite_utils.Database, session_id: str, turn_id: str) -> None:
    """Name the history that ends with a turn; see `app.audit.chains`."""
    question, answer = _one(db, "SELECT question, answer FROM turns WHERE id = ?", [turn_id])
    (prompt,) = _one(db, "SELECT system_prompt FROM sessions WHERE id = ?", [session_id])
    (before,) = _one(
        db,
        """SELECT (SELECT chain FROM turns WHERE session_id = ? AND status = 'done' AND id != ?
           ORDER BY number DESC LIMIT 1)""",
        [session_id, turn_id],
    )
    chain = chains.following(before or chains.first(prompt), question, answer or "")
    db.execute("UPDATE turns SET chain = ? WHERE id = ?", [chain, turn_id])


def _index_exchange(db: sqlite_utils.Database, turn_id: str) -> None:
    """Let a turn be found when a later one refers back to it."""
    db.execute(
        """INSERT INTO exchanges (rowid, session, question, answer)
           SELECT seq, session_id, question, answer FROM turns WHERE id = ?""",
        [turn_id],
    )


def insert_blocks(db: sqlite_utils.Database, session_id: str, blocks: Sequence[StoredBlock]) -> None:
    """Record blocks in stream order."""
    db.table("blocks").insert_all(
        {
            **msgspec.to_builtins(block.record),
            "session_id": session_id,
            "token_ids": pack(block.token_ids),
            "bank_key": block.bank_key,
        }
        for block in blocks
    )


def insert_eviction(
    db: sqlite_utils.Database, eviction: Eviction, point: CompressionPoint, bank_key: str | None = None
) -> None:
    """Record that a block left, the state of that block, and the cache figures after it.

    bank_key: under what its K/V waits, if it does.
    """
    db.table("evictions").insert(msgspec.to_builtins(eviction))
    db.execute(
        "UPDATE blocks SET state = ?, score = ?, evicted_at = ?, bank_key = coalesce(?, bank_key) WHERE id = ?",
        [eviction.outcome, eviction.score, eviction.created_at, bank_key, eviction.block_id],
    )
    insert_point(db, eviction.session_id, point)


def evict_document(
    db: sqlite_utils.Database, document_id: str, sessions: Sequence[str] | None, busy: Sequence[str]
) -> list[str]:
    """Record that a deleted document's blocks left sessions that no turn is at work in. Returns those sessions.

    sessions: which; None for all but the `busy` ones. The rows are of each session's last turn.
    """
    where = "document_id = ? AND state = 'resident' AND session_id NOT IN (SELECT value FROM json_each(?))"
    bound: list[Any] = [document_id, json.dumps(list(busy))]
    if sessions is not None:
        where, bound = f"{where} AND session_id IN (SELECT value FROM json_each(?))", [*bound, json.dumps(sessions)]
    left: dict[str, None] = {}
    gone = list(db.query(f"SELECT * FROM blocks WHERE {where} ORDER BY seq", bound))
    for rank, block in enumerate(gone, start=1):
        session_id = block["session_id"]
        left[session_id] = None
        (resident,) = _one(
            db, "SELECT sum(tokens) FROM blocks WHERE session_id = ? AND state = 'resident'", [session_id]
        )
        # A fork of a session whose only turn was cancelled has passages and no turn.
        (turn_id,) = _one(
            db,
            "SELECT coalesce((SELECT id FROM turns WHERE session_id = ? ORDER BY seq DESC LIMIT 1), '')",
            [session_id],
        )
        row = Eviction(
            id=new_id("evi"),
            session_id=session_id,
            turn_id=turn_id,
            step=0,
            block_id=block["id"],
            kind=block["kind"],
            document_id=document_id,
            passage_id=block["passage_id"],
            tokens=block["tokens"],
            score=block["score"],
            rank=rank,
            reason="document_deleted",
            resident_before=resident,
            resident_after=resident - block["tokens"],
            bytes_freed=0,
            outcome="dropped",
            created_at=now(),
            candidates=len(gone),
        )
        db.table("evictions").insert(msgspec.to_builtins(row))
        db.execute("UPDATE blocks SET state = 'dropped', evicted_at = ? WHERE id = ?", [row.created_at, block["id"]])
        _insert_point_of_blocks(db, session_id, turn_id, "eviction")
    return list(left)


def insert_arrivals(
    db: sqlite_utils.Database, session_id: str, blocks: Sequence[StoredBlock], point: CompressionPoint
) -> None:
    """Record that blocks came, at the end of the stream, new ones and returning ones, and the cache figures then."""
    for block in blocks:
        returned = db.execute(
            """UPDATE blocks SET state = 'resident', evicted_at = NULL, seq = (SELECT max(seq) + 1 FROM blocks)
               WHERE id = ?""",
            [block.record.id],
        )
        if not returned.rowcount:
            insert_blocks(db, session_id, [block])
    insert_point(db, session_id, point)


def move_to_end(db: sqlite_utils.Database, block_id: str) -> None:
    """Record that a resident block was moved to the end of its session's stream."""
    db.execute("UPDATE blocks SET seq = (SELECT max(seq) + 1 FROM blocks) WHERE id = ?", [block_id])


def insert_recall(db: sqlite_utils.Database, recall: Recall, block: StoredBlock, point: CompressionPoint) -> None:
    """Record that a block came without being read, at the end of the stream, and the cache figures after it."""
    db.table("recalls").insert(msgspec.to_builtins(recall))
    insert_arrivals(db, recall.session_id, [block], point)


def insert_move(db: sqlite_utils.Database, move: Move) -> None:
    """Record that K/V went down a tier, and what that means for blocks that could have been recalled."""
    dropped = 0
    if move.target == "dropped":
        where = "bank_key = ? AND state = 'offloaded'"
        (dropped,) = _one(db, f"SELECT count(*) FROM blocks WHERE {where}", [move.bank_key])
        db.execute(f"UPDATE blocks SET state = 'dropped' WHERE {where}", [move.bank_key])
    db.table("moves").insert({**msgspec.to_builtins(move), "blocks_dropped": dropped})


def drop_offloaded(db: sqlite_utils.Database, kept: Sequence[str]) -> int:
    """Mark blocks as dropped whose K/V did not outlive the last process. kept: keys that did. Returns how many."""
    keys = json.dumps(list(kept))
    where = "state = 'offloaded' AND bank_key NOT IN (SELECT value FROM json_each(?))"
    (dropped,) = _one(db, f"SELECT count(*) FROM blocks WHERE {where}", [keys])
    db.execute(f"UPDATE blocks SET state = 'dropped' WHERE {where}", [keys])
    return int(dropped)


def insert_point(db: sqlite_utils.Database, session_id: str, point: CompressionPoint) -> None:
    """Add to the compression series."""
    db.table("compression").insert({"session_id": session_id, **msgspec.to_builtins(point)})


def _insert_point_of_blocks(db: sqlite_utils.Database, session_id: str, turn_id: str, phase: str) -> None:
    """Add what the block table says of a session to its compression series; its K/V may not be in memory."""
    (session,) = db.query(f"{SESSION} WHERE s.id = ?", [session_id])
    (blocks,) = _one(db, "SELECT count(*) FROM blocks WHERE session_id = ? AND state = 'resident'", [session_id])
    resident, seen = session["resident_tokens"], session["seen_tokens"]
    point = CompressionPoint(
        turn_id=turn_id,
        step=0,
        phase=phase,
        seen_tokens=seen,
        resident_tokens=resident,
        compression_ratio=seen / resident if resident else 1.0,
        budget_tokens=session["budget_tokens"],
        kv_bytes=0,
        blocks=blocks,
        created_at=now(),
    )
    insert_point(db, session_id, point)


def _one(db: sqlite_utils.Database, sql: str, bound: list[Any]) -> tuple[Any, ...]:
    row: tuple[Any, ...] = db.execute(sql, bound).fetchone()
    return row
