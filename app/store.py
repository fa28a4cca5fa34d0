"""The audit store: sessions, turns, blocks, evictions and compression, in plain SQLite that others can query."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
import sqlite_utils
from sqlite_utils.migrations import Migrations

from app.events import Eviction
from ingest.database import Database, Page, decode_cursor, encode_cursor
from ingest.errors import InvalidInput, NotFound
from ingest.jobs import now

migrations = Migrations("audit")

MAX_LIMIT = 1000
KINDS = ("system", "question", "answer", "prose", "code", "table", "list")
STATES = ("resident", "dropped")
REASONS = ("room_for_turn", "room_for_answer", "document_deleted")

_TABLES = """
CREATE TABLE sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, system_prompt TEXT NOT NULL,
    budget_tokens INTEGER NOT NULL, method TEXT NOT NULL, score TEXT NOT NULL, model TEXT NOT NULL,
    created_at TEXT NOT NULL, updated_at TEXT NOT NULL
);
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, number INTEGER NOT NULL,
    status TEXT NOT NULL, finish_reason TEXT, question TEXT NOT NULL, answer TEXT, sources TEXT,
    usage TEXT, timings TEXT, cache TEXT, problem TEXT, created_at TEXT NOT NULL, finished_at TEXT
);
CREATE INDEX turns_of_session ON turns (session_id, seq);
CREATE TABLE blocks (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, turn_id TEXT,
    turn INTEGER NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, tokens INTEGER NOT NULL,
    document_id TEXT, passage_id TEXT, name TEXT, heading TEXT, score REAL NOT NULL,
    token_ids BLOB NOT NULL, created_at TEXT NOT NULL, evicted_at TEXT
);
CREATE INDEX blocks_of_session ON blocks (session_id, seq);
CREATE TABLE evictions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, turn_id TEXT NOT NULL,
    step INTEGER NOT NULL, block_id TEXT NOT NULL, kind TEXT NOT NULL, document_id TEXT, passage_id TEXT,
    tokens INTEGER NOT NULL, score REAL NOT NULL, rank INTEGER NOT NULL, reason TEXT NOT NULL,
    resident_before INTEGER NOT NULL, resident_after INTEGER NOT NULL, bytes_freed INTEGER NOT NULL,
    outcome TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE INDEX evictions_of_session ON evictions (session_id, seq);
CREATE TABLE compression (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL, turn_id TEXT NOT NULL, step INTEGER NOT NULL,
    phase TEXT NOT NULL, seen_tokens INTEGER NOT NULL, resident_tokens INTEGER NOT NULL,
    compression_ratio REAL NOT NULL, budget_tokens INTEGER NOT NULL, kv_bytes INTEGER NOT NULL,
    blocks INTEGER NOT NULL, created_at TEXT NOT NULL
);
CREATE INDEX compression_of_session ON compression (session_id, seq);
"""


@migrations()
def create_tables(db: sqlite_utils.Database) -> None:
    # One by one: executescript would commit the migration's transaction first.
    for statement in _TABLES.split(";"):
        db.execute(statement)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session. turns: committed ones. resident_tokens, seen_tokens: of its cache, by its block table."""

    id: str
    title: str
    system_prompt: str
    budget_tokens: int
    method: str
    score: str
    model: str
    created_at: str
    updated_at: str
    turns: int = 0
    resident_tokens: int = 0
    seen_tokens: int = 0


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a session's history; `sources` are those of the turn, on the answer."""

    turn_id: str
    role: Literal["user", "assistant"]
    content: str
    created_at: str
    finish_reason: str | None = None
    sources: list[dict[str, Any]] | None = None


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a session. score: attention earned, as of its last turn.

    state: "resident" (the session holds it: its K/V is in memory, or is read again at the next message) or "dropped".
    kind: "system", "question", "answer", or the kind of a passage. turn: number of its turn, 0 for the system prompt.
    """

    id: str
    turn_id: str | None
    turn: int
    kind: str
    state: str
    tokens: int
    document_id: str | None
    passage_id: str | None
    name: str | None
    heading: str | None
    score: float
    created_at: str
    evicted_at: str | None


class StoredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block with its tokens: what a session is rebuilt from."""

    record: BlockRecord
    token_ids: list[int]


class CompressionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The cache at one moment. compression_ratio: seen / resident.

    phase: "prefill" (passages came), "eviction", "turn_end", or "rolled_back" (the process had stopped in a turn).
    """

    turn_id: str
    step: int
    phase: str
    seen_tokens: int
    resident_tokens: int
    compression_ratio: float
    budget_tokens: int
    kv_bytes: int
    blocks: int
    created_at: str


class EvictionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions on evictions; all that are given must hold. since, until: ISO 8601, inclusive."""

    session_id: str | None = None
    turn_id: str | None = None
    kind: str | None = None
    reason: str | None = None
    document_id: str | None = None
    passage_id: str | None = None
    since: str | None = None
    until: str | None = None


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are stored: unsigned 32-bit, little-endian."""
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def unpack(blob: bytes) -> list[int]:
    """The inverse of `pack`."""
    return [int.from_bytes(blob[i : i + 4], "little") for i in range(0, len(blob), 4)]


_SESSION = """
    SELECT s.seq, s.id, s.title, s.system_prompt, s.budget_tokens, s.method, s.score, s.model, s.created_at,
        s.updated_at,
        (SELECT count(*) FROM turns t WHERE t.session_id = s.id AND t.status = 'done') AS turns,
        (SELECT coalesce(sum(tokens), 0) FROM blocks b WHERE b.session_id = s.id AND b.state = 'resident')
            AS resident_tokens,
        (SELECT coalesce(sum(tokens), 0) FROM blocks b WHERE b.session_id = s.id) AS seen_tokens
    FROM sessions s
"""

# Writing: each is run inside one transaction of the writer thread.


def recover(db: sqlite_utils.Database) -> int:
    """Mark turns that an earlier process left running as failed. Returns how many there were."""
    problem = json.dumps({"detail": "The process stopped during this turn."})
    lost = list(db.query("SELECT id, session_id FROM turns WHERE status = 'running'"))
    for turn in lost:
        db.execute(
            "UPDATE turns SET status = 'failed', problem = ?, finished_at = ? WHERE id = ?",
            [problem, now(), turn["id"]],
        )
        (session,) = db.query(f"{_SESSION} WHERE s.id = ?", [turn["session_id"]])
        resident, seen = session["resident_tokens"], session["seen_tokens"]
        (blocks,) = _one(
            db, "SELECT count(*) FROM blocks WHERE session_id = ? AND state = 'resident'", [turn["session_id"]]
        )
        point = CompressionPoint(
            turn_id=turn["id"],
            step=0,
            phase="rolled_back",
            seen_tokens=seen,
            resident_tokens=resident,
            compression_ratio=seen / resident if resident else 1.0,
            budget_tokens=session["budget_tokens"],
            kv_bytes=0,
            blocks=blocks,
            created_at=now(),
        )
        insert_point(db, turn["session_id"], point)
    return len(lost)


def insert_session(db: sqlite_utils.Database, session: SessionRecord, system: StoredBlock) -> None:
    """Record a session and its system block."""
    row = msgspec.to_builtins(session)
    for derived in ("turns", "resident_tokens", "seen_tokens"):
        del row[derived]
    db.table("sessions").insert(row)
    insert_blocks(db, session.id, [system])


def delete_session(db: sqlite_utils.Database, session_id: str) -> None:
    """Delete a session's texts and blocks. Its evictions and compression stay: they hold numbers and ids only."""
    for table, column in (("sessions", "id"), ("turns", "session_id"), ("blocks", "session_id")):
        db.execute(f"DELETE FROM {table} WHERE {column} = ?", [session_id])


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
    for block_id, score in scores.items():
        db.execute("UPDATE blocks SET score = ? WHERE id = ?", [score, block_id])
    db.execute("UPDATE sessions SET updated_at = ? WHERE id = ?", [time, session_id])
    insert_point(db, session_id, point)


def insert_blocks(db: sqlite_utils.Database, session_id: str, blocks: Sequence[StoredBlock]) -> None:
    """Record blocks in stream order."""
    db.table("blocks").insert_all(
        {
            **msgspec.to_builtins(block.record),
            "session_id": session_id,
            "token_ids": pack(block.token_ids),
        }
        for block in blocks
    )


def insert_eviction(db: sqlite_utils.Database, eviction: Eviction, point: CompressionPoint) -> None:
    """Record that a block left, the state of that block, and the cache figures after it."""
    db.table("evictions").insert(msgspec.to_builtins(eviction))
    db.execute(
        "UPDATE blocks SET state = ?, score = ?, evicted_at = ? WHERE id = ?",
        [eviction.outcome, eviction.score, eviction.created_at, eviction.block_id],
    )
    insert_point(db, eviction.session_id, point)


def insert_point(db: sqlite_utils.Database, session_id: str, point: CompressionPoint) -> None:
    """Add to the compression series."""
    db.table("compression").insert({"session_id": session_id, **msgspec.to_builtins(point)})


# Reading.


class Store:
    """Queries on the audit database. Each runs on the calling thread's own read connection."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def session(self, session_id: str) -> SessionRecord:
        """One session. Raises NotFound."""
        rows = self._rows(f"{_SESSION} WHERE s.id = ?", [session_id])
        if not rows:
            raise NotFound("session", session_id)
        session: SessionRecord = _struct(rows[0], SessionRecord)
        return session

    def sessions(self, cursor: str | None, limit: int) -> Page[SessionRecord]:
        """Sessions, newest first."""
        return self._page(
            f"{_SESSION} WHERE s.seq < ? ORDER BY s.seq DESC", [], cursor, limit, SessionRecord, down=True
        )

    def messages(self, session_id: str, cursor: str | None, limit: int) -> Page[Message]:
        """A session's committed messages, oldest first; `limit` counts turns, which are two messages each."""
        self.session(session_id)
        rows, next_cursor = self._slice(
            """SELECT seq, id, question, answer, sources, finish_reason, created_at, finished_at FROM turns
               WHERE session_id = ? AND status = 'done' AND seq > ? ORDER BY seq""",
            [session_id],
            cursor,
            limit,
        )
        items: list[Message] = []
        for row in rows:
            items.append(Message(turn_id=row["id"], role="user", content=row["question"], created_at=row["created_at"]))
            items.append(
                Message(
                    turn_id=row["id"],
                    role="assistant",
                    content=row["answer"],
                    created_at=row["finished_at"],
                    finish_reason=row["finish_reason"],
                    sources=json.loads(row["sources"]),
                )
            )
        return Page(items=items, next_cursor=next_cursor)

    def blocks(
        self, session_id: str, cursor: str | None, limit: int, state: str | None = None, kind: str | None = None
    ) -> Page[BlockRecord]:
        """A session's blocks in stream order, resident and gone."""
        self.session(session_id)
        _one_of("state", state, STATES)
        _one_of("kind", kind, KINDS)
        where, bound = _where({"session_id": session_id, "state": state, "kind": kind})
        return self._page(
            f"SELECT * FROM blocks WHERE {where} AND seq > ? ORDER BY seq", bound, cursor, limit, BlockRecord
        )

    def resident(self, session_id: str) -> list[StoredBlock]:
        """The blocks a session is rebuilt from, in stream order."""
        rows = self._rows("SELECT * FROM blocks WHERE session_id = ? AND state = 'resident' ORDER BY seq", [session_id])
        return [StoredBlock(record=_struct(row, BlockRecord), token_ids=unpack(row["token_ids"])) for row in rows]

    def resident_documents(self, session_id: str) -> list[str]:
        """Ids of the documents that resident blocks come from."""
        rows = self._rows(
            """SELECT DISTINCT document_id FROM blocks
               WHERE session_id = ? AND state = 'resident' AND document_id IS NOT NULL""",
            [session_id],
        )
        return [row["document_id"] for row in rows]

    def evictions(self, filter: EvictionFilter, cursor: str | None, limit: int) -> Page[Eviction]:
        """Evictions in the order they happened."""
        _one_of("kind", filter.kind, KINDS)
        _one_of("reason", filter.reason, REASONS)
        conditions = msgspec.structs.asdict(filter)
        since, until = conditions.pop("since"), conditions.pop("until")
        where, bound = _where(conditions)
        for name, condition, time in (("since", "created_at >= ?", since), ("until", "created_at <= ?", until)):
            if time is not None:
                where, bound = f"{where} AND {condition}", [*bound, _time(name, time)]
        return self._page(
            f"SELECT * FROM evictions WHERE {where} AND seq > ? ORDER BY seq", bound, cursor, limit, Eviction
        )

    def compression(self, session_id: str, cursor: str | None, limit: int) -> Page[CompressionPoint]:
        """A session's compression series, oldest first."""
        self.session(session_id)
        return self._page(
            "SELECT * FROM compression WHERE session_id = ? AND seq > ? ORDER BY seq",
            [session_id],
            cursor,
            limit,
            CompressionPoint,
        )

    def _page(
        self, sql: str, bound: list[Any], cursor: str | None, limit: int, kind: type[Any], down: bool = False
    ) -> Page[Any]:
        rows, next_cursor = self._slice(sql, bound, cursor, limit, down)
        return Page(items=[_struct(row, kind) for row in rows], next_cursor=next_cursor)

    def _slice(
        self, sql: str, bound: list[Any], cursor: str | None, limit: int, down: bool = False
    ) -> tuple[list[dict[str, Any]], str | None]:
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidInput("limit", limit, f"it must be between 1 and {MAX_LIMIT}")
        start = decode_cursor(cursor) if cursor is not None else (2**63 - 1 if down else -1)
        rows = self._rows(f"{sql} LIMIT ?", [*bound, start, limit + 1])
        more = len(rows) > limit
        rows = rows[:limit]
        return rows, encode_cursor(rows[-1]["seq"]) if more else None

    def _rows(self, sql: str, bound: list[Any]) -> list[dict[str, Any]]:
        return self.database.read(lambda db: list(db.query(sql, bound)))


def _struct(row: dict[str, Any], kind: type[Any]) -> Any:
    return kind(**{name: row[name] for name in kind.__struct_fields__})


def _where(conditions: dict[str, str | None]) -> tuple[str, list[Any]]:
    given = {name: value for name, value in conditions.items() if value is not None}
    return " AND ".join(["1", *(f"{name} = ?" for name in given)]), list(given.values())


def _one_of(name: str, value: str | None, allowed: Sequence[str]) -> None:
    """A misspelt condition would look like an answer: nothing was evicted."""
    if value is not None and value not in allowed:
        raise InvalidInput(name, value, f"it must be one of {', '.join(allowed)}")


def _time(name: str, text: str) -> str:
    """Any ISO 8601 time as the stored form, so that texts compare as times."""
    try:
        time = datetime.fromisoformat(text)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        if name == "since":
            # Rows are stamped in milliseconds: the first that is not earlier.
            time += timedelta(microseconds=999)
    except (ValueError, OverflowError):
        raise InvalidInput(name, text, "it must be ISO 8601, such as 2026-01-31T12:00:00Z") from None
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one(db: sqlite_utils.Database, sql: str, bound: list[Any]) -> tuple[Any, ...]:
    row: tuple[Any, ...] = db.execute(sql, bound).fetchone()
    return row
