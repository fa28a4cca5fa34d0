"""Queries on the audit database, page by page."""

from __future__ import annotations

import json
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
    Eviction,
    Move,
    Recall,
    SessionRecord,
    StoredBlock,
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

    def sessions(self, cursor: str | None, limit: int) -> Page[SessionRecord]:
        """Sessions, newest first."""
        return self._page(f"{SESSION} WHERE s.seq < ? ORDER BY s.seq DESC", [], cursor, limit, SessionRecord, down=True)

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
