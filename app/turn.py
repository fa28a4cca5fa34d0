"""One turn on the MLX thread: plan, make room, read, answer, commit.

A generator, so that turns take their steps in rotation and a cancelled one stops at its next step. A turn either
commits whole or leaves no question and no answer behind, in the cache or in the history. Blocks that it evicted stay
evicted, and passages that it read whole stay resident: both are true of the cache, and logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import sqlite_utils

from app import audit
from app.answer import AnswerText, Written
from app.audit import CompressionPoint, SessionRecord, StoredBlock
from app.events import (
    CacheFigures,
    Done,
    Event,
    Eviction,
    FinishReason,
    Prefill,
    Retrieval,
    Source,
    Timings,
    Token,
    Usage,
)
from app.live import LiveSession, new_block
from app.plan import Held, Leaving, Plan, Wanted, plan_turn
from ingest.database import Database
from ingest.jobs import new_id, now
from ingest.records import StoredPassage
from kv.session import NewBlock, sampler

Emit = Callable[[Event, "Future[Any] | None"], None]

# A stop string may end inside a token; what is left of that token is encoded again, in at most so many tokens.
_STOP_SLACK = 16


@dataclass(frozen=True)
class Candidate:
    """A retrieved passage and its tokens as a message."""

    passage: StoredPassage
    token_ids: list[int]


@dataclass(frozen=True)
class TurnRequest:
    """What a turn needs to know. accepted_at: `time.monotonic()` when the request came.

    deleted_documents: documents with resident blocks that are no longer in the library. number: from 1.
    """

    session: SessionRecord
    turn_id: str
    number: int
    question_ids: list[int]
    candidates: list[Candidate]
    deleted_documents: frozenset[str]
    max_tokens: int | None
    default_max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    accepted_at: float
    retrieval_seconds: float


@dataclass
class Turn:
    """A turn's state. emit: takes each event, and the future of the write that must be committed before it is sent."""

    request: TurnRequest
    live: LiveSession
    database: Database
    emit: Emit
    cancelled: bool = False
    _prefilled: int = 0
    _evicted: int = 0
    _peak: int = 0
    _step: int = 0
    _cached: int = 0
    _prompt_tokens: int = 0
    _started_at: float = 0.0
    _read_at: float = 0.0
    _first_token: float | None = None
    _sources: list[Source] = field(default_factory=list)
    _scores: dict[str, float] = field(default_factory=dict)

    def run(self) -> Iterator[None]:
        """Run the turn; each `next` is one forward pass at most.

        Raises DoesNotFit, before anything has changed, if the turn cannot fit the budget.
        """
        self._started_at = self._read_at = time.monotonic()
        live = self.live
        if not live.stale:
            self._scores = {block.id: block.score for block in live.cache.blocks()}
        plan = self._plan()
        self._sources = self._describe(plan)
        self.emit(Retrieval(turn_id=self.request.turn_id, sources=self._sources), None)
        self._evict_deleted()
        for leaving in plan.evict:
            self._evict(leaving, "room_for_turn")
        yield
        yield from self._read(plan)
        answer = None if self.cancelled else (yield from self._answer(plan))
        self._commit(answer)

    def roll_back(self) -> None:
        """Take the question and the answer out of the cache again."""
        cache = self.live.cache
        cache.drop_unfinished()
        if self._question_id in cache.block_ids:
            cache.rewind(self._question_id)

    # The plan

    def _plan(self) -> Plan:
        request, live = self.request, self.live
        held = [
            Held(
                id=block.id,
                kind=block.kind,
                tokens=block.tokens,
                turn=block.turn,
                passage_id=block.passage_id,
                score=self._scores.get(block.id, block.score),
            )
            for block in live.blocks.values()
            if block.document_id not in request.deleted_documents
        ]
        wanted = [
            Wanted(passage_id=c.passage.id, tokens=len(c.token_ids), block=self._block_id(i))
            for i, c in enumerate(request.candidates)
        ]
        overhead = live.cache.model.template.assistant.tokens
        return plan_turn(
            held,
            wanted,
            budget=live.record.budget_tokens,
            question_tokens=len(request.question_ids),
            answer_overhead=overhead + (_STOP_SLACK if request.stop else 0),
            max_tokens=request.max_tokens,
            default_max_tokens=request.default_max_tokens,
        )

    def _describe(self, plan: Plan) -> list[Source]:
        def state(passage_id: str) -> Literal["resident", "streamed", "skipped"]:
            if passage_id in plan.resident:
                return "resident"
            return "streamed" if passage_id in plan.stream else "skipped"

        return [
            Source(
                passage_id=c.passage.id,
                document_id=c.passage.document_id,
                name=c.passage.name,
                heading=c.passage.heading,
                kind=c.passage.kind,
                text=c.passage.text,
                score=c.passage.score or 0.0,
                tokens=len(c.token_ids),
                state=state(c.passage.id),
            )
            for c in self.request.candidates
        ]

    def _block_id(self, index: int) -> str:
        return f"{self.request.turn_id}.passage{index}"

    @property
    def _question_id(self) -> str:
        return f"{self.request.turn_id}.question"

    @property
    def _answer_id(self) -> str:
        return f"{self.request.turn_id}.answer"

    # Evicting

    def _evict_deleted(self) -> None:
        gone = [b for b in self.live.blocks.values() if b.document_id in self.request.deleted_documents]
        for rank, block in enumerate(gone, start=1):
            self._evict(Leaving((block.id,), block.tokens, rank), "document_deleted")

    def _evict(self, leaving: Leaving, reason: str) -> None:
        live = self.live
        for block_id in leaving.blocks:
            block = live.blocks.pop(block_id)
            before, bytes_before = live.resident_tokens, live.cache.nbytes
            score = block.score
            if live.stale.pop(block_id, None) is None:
                score = live.cache.evict(block_id).score
            self._evicted += 1
            row = Eviction(
                id=new_id("evi"),
                session_id=live.record.id,
                turn_id=self.request.turn_id,
                step=self._step,
                block_id=block_id,
                kind=block.kind,
                document_id=block.document_id,
                passage_id=block.passage_id,
                tokens=block.tokens,
                score=score,
                rank=leaving.rank,
                reason=reason,
                resident_before=before,
                resident_after=before - block.tokens,
                bytes_freed=max(0, bytes_before - live.cache.nbytes),
                outcome="dropped",
                created_at=now(),
            )
            point = self._point("eviction")
            self.emit(row, self.database.write(partial(audit.insert_eviction, eviction=row, point=point)))

    def _make_room(self, plan: Plan, tokens: int) -> None:
        while self.live.cache.room < tokens and plan.reserve:
            self._evict(plan.reserve.pop(0), "room_for_answer")

    # Reading

    def _read(self, plan: Plan) -> Iterator[None]:
        """Stream what must be restored, the new passages, the question, and the answer's prompt but its last token."""
        if self.cancelled:
            return
        request, live = self.request, self.live
        prompt = live.cache.model.template.assistant.before
        # Best last: the nearer a passage is to the question, the better a small model uses it.
        passages = [
            self._stored(self._block_id(i), c.passage.kind, c.token_ids, c.passage)
            for i, c in reversed(list(enumerate(request.candidates)))
            if c.passage.id in plan.stream
        ]
        restore = live.to_restore()
        blocks = [*restore, *(NewBlock(block.record.id, block.token_ids) for block in passages)]
        blocks.append(NewBlock(self._question_id, request.question_ids, pinned=True))
        total = sum(len(block.tokens) for block in blocks) + len(prompt) - 1
        self._cached = live.cache.tokens_kept
        restored = sum(len(block.tokens) for block in restore) if request.number > 1 else 0
        for done in live.cache.prefill(blocks, answer=NewBlock(self._answer_id, prompt)):
            self._prefilled = done
            self._note_peak()
            self.emit(Prefill(done=done, total=total, restored=restored), None)
            yield
            if self.cancelled:
                live.cache.drop_unfinished()
                break
        live.note_restored()
        self._keep(passages)
        self._read_at = time.monotonic()

    def _keep(self, passages: list[StoredBlock]) -> None:
        """Passages that are in the cache whole stay, whatever becomes of the turn."""
        live = self.live
        held = live.cache.block_ids
        whole = [block for block in passages if block.record.id in held]
        for block in whole:
            live.blocks[block.record.id] = block.record
            live.seen_tokens += block.record.tokens
        if whole:
            point = self._point("prefill")
            self.database.write(partial(_insert_read, session_id=live.record.id, blocks=whole, point=point))

    # Answering

    def _answer(self, plan: Plan) -> Generator[None, None, Written | None]:
        cache, template = self.live.cache, self.live.cache.model.template.assistant
        answer = AnswerText(cache.model.codec, self.request.stop, plan.max_tokens)
        pick = sampler(self.request.temperature)
        token, fed = template.before[-1], -1
        while True:
            # For this token, the one it leads to, and the template's end.
            self._make_room(plan, 2 + len(template.after))
            logits = cache.step(token)
            fed += 1
            self._note_peak()
            if fed == 0:
                self._prefilled += 1
                self._prompt_tokens = cache.tokens_kept
            token = pick(logits)
            if token in cache.model.stop_ids:
                reason: FinishReason = "stop"
                break
            self._step += 1
            self._show(answer.push(token))
            if answer.reason is not None:
                reason = answer.reason
                break
            yield
            if self.cancelled:
                reason = "cancelled"
                break
        self._show(answer.flush())
        written = answer.finish(reason)
        if reason == "cancelled" and not written.text:
            return None
        fed = min(fed, written.whole)
        ending = [*written.token_ids[fed:], *template.after]
        self._make_room(plan, len(ending))
        cache.close_answer(len(template.before) + fed, ending)
        self._note_peak()
        return written

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._first_token is None:
            self._first_token = time.monotonic() - self.request.accepted_at
        self.emit(Token(text=text), None)

    # Committing

    def _commit(self, answer: Written | None) -> None:
        request, live = self.request, self.live
        template = live.cache.model.template.assistant
        blocks: list[StoredBlock] = []
        if answer is None:
            self.roll_back()
        else:
            blocks = [
                self._stored(self._question_id, "question", request.question_ids),
                self._stored(self._answer_id, "answer", [*template.before, *answer.token_ids, *template.after]),
            ]
            for block in blocks:
                live.cache.pin(block.record.id, False)
                live.blocks[block.record.id] = block.record
                live.seen_tokens += block.record.tokens
        scores = {block.id: block.score for block in live.cache.blocks()}
        ended = time.monotonic()
        # Of a turn that was cancelled before its answer began: what was there, and what had been read.
        prompt = self._prompt_tokens or self._cached + self._prefilled
        usage = Usage(
            prompt_tokens=prompt,
            cached_tokens=prompt - self._prefilled,
            prefilled_tokens=self._prefilled,
            completion_tokens=len(answer.token_ids) if answer else 0,
        )
        timings = Timings(
            retrieval=request.retrieval_seconds,
            queued=self._started_at - request.accepted_at - request.retrieval_seconds,
            prefill=self._read_at - self._started_at,
            first_token=self._first_token,
            decode=ended - self._read_at,
            total=ended - request.accepted_at,
        )
        point = self._point("turn_end")
        cache = CacheFigures(
            budget_tokens=live.record.budget_tokens,
            resident_tokens=point.resident_tokens,
            peak_tokens=self._peak,
            seen_tokens=point.seen_tokens,
            compression_ratio=point.compression_ratio,
            kv_bytes=point.kv_bytes,
            blocks=point.blocks,
            evicted=self._evicted,
        )
        reason: FinishReason = answer.reason if answer else "cancelled"
        written = self.database.write(
            lambda db: audit.end_turn(
                db,
                live.record.id,
                request.turn_id,
                blocks,
                scores,
                point,
                status="done" if answer else "cancelled",
                finish_reason=reason,
                answer=answer.text if answer else None,
                sources=self._sources,
                usage=usage,
                timings=timings,
                cache=cache,
            )
        )
        done = Done(
            turn_id=request.turn_id,
            finish_reason=reason,
            content=answer.text if answer else "",
            committed=answer is not None,
            usage=usage,
            timings=timings,
            cache=cache,
        )
        self.emit(done, written)

    # Values

    def _stored(
        self, block_id: str, kind: str, token_ids: list[int], passage: StoredPassage | None = None
    ) -> StoredBlock:
        request = self.request
        return new_block(block_id, kind, token_ids, turn_id=request.turn_id, turn=request.number, passage=passage)

    def _point(self, phase: str) -> CompressionPoint:
        live = self.live
        resident = live.resident_tokens
        # What is being read or answered is seen and resident, though not yet a committed block.
        growing = resident - sum(block.tokens for block in live.blocks.values())
        seen = live.seen_tokens + growing
        return CompressionPoint(
            turn_id=self.request.turn_id,
            step=self._step,
            phase=phase,
            seen_tokens=seen,
            resident_tokens=resident,
            compression_ratio=seen / resident if resident else 1.0,
            budget_tokens=live.record.budget_tokens,
            kv_bytes=live.cache.nbytes,
            blocks=len(live.blocks),
            created_at=now(),
        )

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self.live.cache.tokens_kept)


def _insert_read(
    db: sqlite_utils.Database, *, session_id: str, blocks: list[StoredBlock], point: CompressionPoint
) -> None:
    audit.insert_blocks(db, session_id, blocks)
    audit.insert_point(db, session_id, point)
