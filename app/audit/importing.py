"""Exchanges that a client says were had, put into a session's history as if they had been had there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlite_utils
from msgspec.structs import replace

from app.audit import writing
from app.audit.records import CompressionPoint, StoredBlock
from ingest.jobs import now


@dataclass(frozen=True)
class Told:
    """A question and its answer. blocks: both, to be read by the session; none if they are only to be remembered."""

    turn_id: str
    question: str
    answer: str
    tokens: int
    blocks: Sequence[StoredBlock]


def import_exchanges(db: sqlite_utils.Database, session_id: str, exchanges: Sequence[Told]) -> None:
    """Record exchanges, oldest first, as turns that are done. Their blocks are resident, and are read before the next
    question is; those without never come into the cache.
    """
    for told in exchanges:
        number = writing.begin_turn(db, session_id, told.turn_id, told.question)
        blocks_read = [
            replace(block, record=replace(block.record, turn=number, turn_id=told.turn_id)) for block in told.blocks
        ]
        session = next(db.query(f"{writing.SESSION} WHERE s.id = ?", [session_id]))
        coming = sum(block.record.tokens for block in told.blocks)
        resident, seen = session["resident_tokens"] + coming, session["seen_tokens"] + coming
        ratio = seen / resident if resident else 1.0
        blocks = db.execute(
            "SELECT count(*) FROM blocks WHERE session_id = ? AND state = 'resident'", [session_id]
        ).fetchone()[0] + len(told.blocks)
        budget = session["budget_tokens"]
        point = CompressionPoint(
            turn_id=told.turn_id,
            step=0,
            phase="imported",
            seen_tokens=seen,
            resident_tokens=resident,
            compression_ratio=ratio,
            budget_tokens=budget,
            kv_bytes=0,
            blocks=blocks,
            created_at=now(),
        )
        writing.end_turn(
            db,
            session_id,
            told.turn_id,
            blocks_read,
            {},
            point,
            status="done",
            finish_reason="stop",
            answer=told.answer,
            sources=[],
            usage={"prompt_tokens": 0, "cached_tokens": 0, "prefilled_tokens": 0, "completion_tokens": told.tokens},
            timings={"retrieval": 0, "queued": 0, "prefill": 0, "first_token": None, "decode": 0, "total": 0},
            cache={
                "budget_tokens": budget,
                "resident_tokens": resident,
                "peak_tokens": resident,
                "seen_tokens": seen,
                "compression_ratio": ratio,
                "kv_bytes": 0,
                "blocks": blocks,
                "evicted": 0,
            },
        )
