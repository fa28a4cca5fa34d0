"""What stands in the audit database, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

KINDS = ("system", "question", "answer", "prose", "code", "table", "list")
# What a session record has that is worked out from other tables.
DERIVED = ("turns", "resident_tokens", "seen_tokens", "preview")
STATES = ("resident", "offloaded", "dropped")
REASONS = ("not_relevant", "room_for_turn", "room_for_answer", "document_deleted")


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session. turns: committed ones. resident_tokens, seen_tokens: of its cache, by its block table.

    forked_from: the session that it began as a copy of. preview: the beginning of its first question.
    """

    id: str
    title: str
    system_prompt: str
    budget_tokens: int
    method: str
    score: str
    model: str
    created_at: str
    updated_at: str
    forked_from: str | None = None
    preview: str = ""
    turns: int = 0
    resident_tokens: int = 0
    seen_tokens: int = 0


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a session. score: attention earned, as of its last turn.

    state: "resident" (the session holds it: its K/V is in memory, or is read again at the next message), "offloaded"
        (its K/V waits outside the cache and can be recalled) or "dropped".
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
    """A block with its tokens: what a session is rebuilt from. bank_key: under what the bank has its K/V."""

    record: BlockRecord
    token_ids: list[int]
    bank_key: str | None = None


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as it stands in SQLite: what `done` said of it, or the `problem` it failed with.

    status: "running", "done", "cancelled" (nothing of it is in the history) or "failed". number: in its session, from
    1.
    """

    id: str
    session_id: str
    number: int
    status: str
    finish_reason: str | None
    question: str
    answer: str | None
    sources: list[dict[str, Any]] | None
    usage: dict[str, Any] | None
    timings: dict[str, Any] | None
    cache: dict[str, Any] | None
    problem: dict[str, Any] | None
    created_at: str
    finished_at: str | None


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """The audit row of one block that left the cache, as it stands in SQLite.

    turn_id: the turn it happened in, or the last before it; "" if there was none. step: answer tokens made before it
    left. score: attention it had earned. rank: its place, from 1, among the `candidates`: all that could leave when the
    turn was planned (null in rows that are older than the column). resident_before, resident_after: tokens in the
    cache. bytes_freed: of K/V. reason: one of `REASONS`. outcome: "offloaded" (its K/V waits outside the cache and can
    be recalled) or "dropped".
    """

    event: ClassVar[str] = "eviction"
    id: str
    session_id: str
    turn_id: str
    step: int
    block_id: str
    kind: str
    document_id: str | None
    passage_id: str | None
    tokens: int
    score: float
    rank: int
    reason: str
    resident_before: int
    resident_after: int
    bytes_freed: int
    outcome: str
    created_at: str
    candidates: int | None = None


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    """The audit row of one block that came into the cache without being read, as it stands in SQLite.

    origin: the tier its K/V waited in, "memory" or "disk". recomputed: its first tokens, which were read anew all the
    same. seconds: to fetch its K/V and put it in. resident_before, resident_after: tokens in the cache.
    """

    event: ClassVar[str] = "recall"
    id: str
    session_id: str
    turn_id: str
    block_id: str
    kind: str
    document_id: str | None
    passage_id: str | None
    tokens: int
    origin: str
    recomputed: int
    seconds: float
    resident_before: int
    resident_after: int
    created_at: str


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to a block. what: "read", "recalled" or "evicted". turn: number of its turn, if it is of
    one.

    recall, eviction: the audit row, of what those two say.
    """

    what: str
    created_at: str
    turn_id: str | None
    turn: int | None
    recall: Recall | None = None
    eviction: Eviction | None = None


class BlockStory(msgspec.Struct, frozen=True, kw_only=True):
    """A block, its text, and all that happened to it, oldest first."""

    block: BlockRecord
    text: str
    history: list[Episode]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """K/V outside caches that went down a tier. document_id, session_id: whose it is; neither for a system prompt's.

    source: "memory" or "disk". target: "disk" or "dropped". bytes: what it took.
    reason: "memory_cap", "disk_cap", "stopping" (the process ended), "document_deleted", "session_deleted", "damaged"
        (its file was not what had been written) or "unwritable" (the disk refused it).
    blocks_dropped: blocks of sessions that could have been recalled until then.
    """

    id: str
    bank_key: str
    document_id: str | None
    session_id: str | None
    tokens: int
    bytes: int
    source: str
    target: str
    reason: str
    blocks_dropped: int
    created_at: str


class CompressionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The cache at one moment. compression_ratio: seen / resident. kv_bytes: 0 if no turn was at work.

    phase: "prefill" (passages were read), "recall", "eviction", "turn_end", "rolled_back" (the process had stopped in a
        turn), "forked" (the session began as a copy), or
        "imported" (an exchange that a client says was had).
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


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are stored: unsigned 32-bit, little-endian."""
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def unpack(blob: bytes) -> list[int]:
    """The inverse of `pack`."""
    return [int.from_bytes(blob[i : i + 4], "little") for i in range(0, len(blob), 4)]
