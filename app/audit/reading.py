"""Queries on the audit database, page by page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from app.audit.records import (
    KINDS,
    REASONS,
    STATES,
    BlockRecord,
    CompressionPoint,
    Episode,
    Eviction,
    Move,
    Recall,
    SessionRecord,
    StoredBlock,
    TurnRecord,
    unpack,
)
from app.audit.writing import SESSION
from ingest.database import Database, Page, decode_cursor, encode_cursor
from ingest.errors import InvalidInput, NotFound

MAX_LIMIT = 1000


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a session's history; `sources` are those of the turn, on the answer."""

    turn_id: str
    role: Literal["user", "assistant"]
    content: str
    created_at: str
    finish_reason: str | None = None
    sources: list[dict[str, Any]] | None = None


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


class Store:
    """Queries on the audit database. Each runs on the calling thread's own read connection."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def session(self, session_id: str) -> SessionRecord:
        """One session. Raises NotFound."""
        rows = self._rows(f"{SESSION} WHERE s.id = ?", [session_id])
        if not rows:
            raise NotFound("session", session_id)
        session: SessionRecord = _struct(rows[0], SessionRecord)
        return session

    def sessions(self, cursor: str | None, limit: int, query: str | None = None) -> Page[SessionRecord]:
        """Sessions, newest first. query: words of which each is in the title, or all in one question and its answer."""
        where, bound = "1", list[Any]()
        if words := re.findall(r"\w+", query or ""):
            inside = " AND ".join(f'"{word}"*' for word in words)
            where = f"""(s.id IN (SELECT session FROM exchanges WHERE exchanges MATCH ?)
                OR ({" AND ".join("s.title LIKE ?" for _ in words)}))"""
            bound = [f"{{question answer}} : ({inside})", *(f"%{word}%" for word in words)]
        sql = f"{SESSION} WHERE {where} AND s.seq < ? ORDER BY s.seq DESC"
        return self._page(sql, bound, cursor, limit, SessionRecord, down=True)

    def session_ids(self) -> set[str]:
        """Every session's id."""
        return {row["id"] for row in self._rows("SELECT id FROM sessions", [])}

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

    def turn(self, session_id: str, turn_id: str) -> TurnRecord:
        """One turn of a session. Raises NotFound."""
        rows = self._rows("SELECT * FROM turns WHERE session_id = ? AND id = ?", [session_id, turn_id])
        if not rows:
            self.session(session_id)
            raise NotFound("turn", turn_id)
        return _turn(rows[0])

    def last_turn(self, session_id: str) -> TurnRecord | None:
        """The turn of a session that began last. Raises NotFound if there is no such session."""
        self.session(session_id)
        rows = self._rows("SELECT * FROM turns WHERE session_id = ? ORDER BY seq DESC LIMIT 1", [session_id])
        return _turn(rows[0]) if rows else None

    def last_done(self, session_id: str) -> str | None:
        """The id of a session's last turn in its history."""
        rows = self._rows(
            "SELECT id FROM turns WHERE session_id = ? AND status = 'done' ORDER BY number DESC LIMIT 1", [session_id]
        )
        return rows[0]["id"] if rows else None

    def turns(self, session_id: str, cursor: str | None, limit: int) -> Page[TurnRecord]:
        """A session's turns, oldest first, those that failed or were cancelled among them."""
        self.session(session_id)
        rows, following = self._slice(
            "SELECT * FROM turns WHERE session_id = ? AND seq > ? ORDER BY seq", [session_id], cursor, limit
        )
        return Page(items=[_turn(row) for row in rows], next_cursor=following)

    def changes_of(self, turn_id: str) -> list[Eviction | Recall]:
        """What entered and left during a turn, in order, as far as it was not read."""
        evictions = self._rows("SELECT * FROM evictions WHERE turn_id = ? ORDER BY seq", [turn_id])
        recalls = self._rows("SELECT * FROM recalls WHERE turn_id = ? ORDER BY seq", [turn_id])
        rows = [_struct(row, Eviction) for row in evictions] + [_struct(row, Recall) for row in recalls]
        return sorted(rows, key=lambda row: str(row.created_at))

    def moment(self, session_id: str, turn_id: str) -> Page[BlockRecord]:
        """The blocks that were resident when a turn ended, in the order the model saw them, their scores as of today.

        None of a turn that has not ended, or that is older than the record of it. Raises NotFound.
        """
        self.turn(session_id, turn_id)
        rows = self._rows(
            """SELECT blocks.* FROM turns, json_each(turns.resident) AS held JOIN blocks ON blocks.id = held.value
               WHERE turns.id = ? ORDER BY held.key""",
            [turn_id],
        )
        then = [{**row, "state": "resident", "evicted_at": None} for row in rows]
        return Page(items=[_struct(row, BlockRecord) for row in then], next_cursor=None)

    def block(self, session_id: str, block_id: str) -> StoredBlock:
        """One block of a session. Raises NotFound."""
        rows = self._rows("SELECT * FROM blocks WHERE session_id = ? AND id = ?", [session_id, block_id])
        if not rows:
            self.session(session_id)
            raise NotFound("block", block_id)
        return stored_block(rows[0])

    def episodes(self, block: BlockRecord) -> list[Episode]:
        """All that happened to a block, oldest first."""
        bound = [block.id]
        evictions = self._rows("SELECT * FROM evictions WHERE block_id = ? ORDER BY seq", bound)
        recalls = self._rows("SELECT * FROM recalls WHERE block_id = ? ORDER BY seq", bound)
        numbers = {
            row["id"]: row["number"]
            for row in self._rows(
                "SELECT id, number FROM turns WHERE session_id = (SELECT session_id FROM blocks WHERE id = ?)", bound
            )
        }

        def episode(what: str, row: dict[str, Any], **audit: Any) -> Episode:
            turn_id = row["turn_id"] or None
            number = numbers.get(turn_id)
            return Episode(what=what, created_at=row["created_at"], turn_id=turn_id, turn=number, **audit)

        told = [episode("evicted", row, eviction=_struct(row, Eviction)) for row in evictions]
        told += [episode("recalled", row, recall=_struct(row, Recall)) for row in recalls]
        told.sort(key=lambda one: one.created_at)
        if not told or told[0].what == "evicted":
            # What comes from the bank at first is recalled without ever having been read in this session.
            told.insert(0, episode("read", msgspec.to_builtins(block)))
        return told

    def find_history(self, names: Sequence[str], model: str, budget_tokens: int) -> list[tuple[str, TurnRecord, bool]]:
        """The turns that end one of these histories (`app.audit.chains`) in sessions of that model and budget, the
        latest first: the name, the turn, and whether it is its session's last.
        """
        rows = self._rows(
            """SELECT turns.*, NOT EXISTS (SELECT 1 FROM turns AS later WHERE later.session_id = turns.session_id
                   AND later.status = 'done' AND later.number > turns.number) AS is_last
               FROM turns WHERE chain IN (SELECT value FROM json_each(?)) AND status = 'done'
                   AND session_id IN (SELECT id FROM sessions WHERE model = ? AND budget_tokens = ?)
               ORDER BY seq DESC""",
            [json.dumps(list(names)), model, budget_tokens],
        )
        return [(row["chain"], _turn(row), bool(row["is_last"])) for row in rows]

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
        return [stored_block(row) for row in rows]

    def offloaded(self, session_id: str) -> list[StoredBlock]:
        """The blocks of a session that can be recalled."""
        rows = self._rows(
            "SELECT * FROM blocks WHERE session_id = ? AND state = 'offloaded' ORDER BY seq", [session_id]
        )
        return [stored_block(row) for row in rows]

    def resident_documents(self, session_id: str) -> list[str]:
        """Ids of the documents that resident blocks come from."""
        rows = self._rows(
            """SELECT DISTINCT document_id FROM blocks
               WHERE session_id = ? AND state = 'resident' AND document_id IS NOT NULL""",
            [session_id],
        )
        return [row["document_id"] for row in rows]

    def documents(self) -> set[str]:
        """Ids of the documents that blocks of any session come from, in its cache or to be recalled."""
        rows = self._rows(
            "SELECT DISTINCT document_id FROM blocks WHERE state != 'dropped' AND document_id IS NOT NULL", []
        )
        return {row["document_id"] for row in rows}

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

    def recalls(self, session_id: str, cursor: str | None, limit: int) -> Page[Recall]:
        """A session's recalls in the order they happened."""
        self.session(session_id)
        return self._page(
            "SELECT * FROM recalls WHERE session_id = ? AND seq > ? ORDER BY seq", [session_id], cursor, limit, Recall
        )

    def moves(self, document_id: str | None, cursor: str | None, limit: int) -> Page[Move]:
        """What went down a tier in the bank, in the order it happened."""
        where, bound = _where({"document_id": document_id})
        return self._page(f"SELECT * FROM moves WHERE {where} AND seq > ? ORDER BY seq", bound, cursor, limit, Move)

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


def stored_block(row: dict[str, Any]) -> StoredBlock:
    """A row of the table of blocks."""
    record: BlockRecord = _struct(row, BlockRecord)
    return StoredBlock(record=record, token_ids=unpack(row["token_ids"]), bank_key=row["bank_key"])


def _turn(row: dict[str, Any]) -> TurnRecord:
    values = {name: row[name] for name in TurnRecord.__struct_fields__}
    for name in ("sources", "usage", "timings", "cache", "problem"):
        values[name] = None if values[name] is None else json.loads(values[name])
    return TurnRecord(**values)


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
