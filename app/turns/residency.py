"""All that a turn does to its session's cache, each change with the audit rows that say so. On the MLX thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from app.audit import writing
from app.audit.records import BlockRecord, CompressionPoint, Eviction, Recall, StoredBlock
from app.memory.bank import Bank
from app.memory.live import LiveSession, new_block
from app.memory.tiers import Tier
from app.turns.events import Event, Prefill
from app.turns.exchanges import Exchange
from app.turns.plan import Leaving, Plan
from app.turns.request import TurnRequest, Wish
from ingest.database import Database
from ingest.jobs import new_id, now
from ingest.records import StoredPassage
from kv.caches.blockkv import BlockKV
from kv.session.session import NewBlock

Emit = Callable[[Event, "Future[Any] | None"], None]


@dataclass
class _Arrival:
    """A passage on its way to the end of the stream. tier: where its K/V waited. moves: whether it is resident."""

    block: StoredBlock
    kv: BlockKV | None = None
    tier: Tier | None = None
    moves: bool = False


@dataclass
class Residency:
    """What one turn changes.

    emit: takes each event, and the future of the write that must be committed before it is sent.
    step: answer tokens made so far. candidates: of how many units the plan says in which order they may leave.
    prefilled, evicted, peak: tokens read, blocks that left, most tokens kept.
    """

    request: TurnRequest
    live: LiveSession
    bank: Bank
    database: Database
    emit: Emit
    cancelled: bool = False
    step: int = 0
    candidates: int = 0
    prefilled: int = 0
    evicted: int = 0
    peak: int = 0
    _total: int = 0
    _restored: int = 0
    _fetched: dict[str, tuple[BlockKV, Tier]] = field(default_factory=dict)

    # Evicting

    def evict_deleted(self) -> None:
        """Evict the blocks of documents that are gone."""
        gone = [b for b in self.live.blocks.values() if b.document_id in self.request.deleted_documents]
        for rank, block in enumerate(gone, start=1):
            self.evict(Leaving((block.id,), block.tokens, rank), "document_deleted", len(gone))

    def evict(self, leaving: Leaving, reason: str, candidates: int | None = None) -> None:
        """Evict blocks that leave as one. candidates: of how many they are, if not of those of the plan."""
        live = self.live
        for block_id in leaving.blocks:
            block = live.blocks.pop(block_id)
            before, bytes_before = live.resident_tokens, live.cache.nbytes
            key = self._offload(block)
            score = block.score
            if live.stale.pop(block_id, None) is None:
                score = live.cache.evict(block_id).score
            self.evicted += 1
            row = Eviction(
                id=new_id("evi"),
                session_id=live.record.id,
                turn_id=self.request.turn_id,
                step=self.step,
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
                outcome="dropped" if key is None else "offloaded",
                created_at=now(),
                candidates=candidates or self.candidates,
            )
            point = self.point("eviction")
            write = partial(writing.insert_eviction, eviction=row, point=point, bank_key=key)
            self.emit(row, self.database.write(write))

    def _offload(self, block: BlockRecord) -> str | None:
        """Under what the K/V of a block that is to leave waits in the bank, to be recalled; None if it does not.

        An exchange is lifted out: what it read when it was written cannot be read again.
        """
        live = self.live
        key = live.bank_keys.pop(block.id, None)
        stored = self.kept(key)
        if block.passage_id is not None:
            if stored:
                live.offloaded[block.passage_id] = block
        elif not stored and self.bank.enabled and block.id not in live.stale:
            key = self.bank.keep_block(block.id, live.record.id, live.cache.lift(block.id))
            stored = self.kept(key)
        return key if stored else None

    def make_room(self, plan: Plan, tokens: int) -> None:
        """Evict from the plan's reserve until so many tokens fit, if they can."""
        while self.live.cache.room < tokens and plan.reserve:
            leaving = plan.reserve.pop(0)
            # What was to come back may have stayed out.
            if self.live.blocks.keys() >= set(leaving.blocks):
                self.evict(leaving, "room_for_answer")

    # Reading

    @cached_property
    def wishes(self) -> list[Wish]:
        """The candidates, best first. Once and for all: the plan goes by it, whatever the bank drops meanwhile."""
        live, found = self.live, []
        for number, candidate in enumerate(self.request.candidates):
            if candidate.passage.document_id in self.bank.deleted:
                # Since it was found: the turn has waited.
                continue
            key = self.bank.key(candidate.token_ids)
            stored = self.kept(key)
            offloaded = live.offloaded.get(candidate.passage.id) if stored else None
            block_id = offloaded.id if offloaded else f"{self.request.turn_id}.passage{number}"
            found.append(Wish(candidate, block_id, key, stored))
        return found

    def fetch(self, plan: Plan) -> None:
        """Get hold of the K/V of what is to be recalled, so that it is not dropped meanwhile. What is gone is read."""
        for wish in self.wishes:
            passage_id = wish.candidate.passage.id
            if passage_id in plan.recall:
                tier, kv = self.bank.where(wish.bank_key), self.bank.fetch(wish.bank_key)
                if tier is None or kv is None:
                    plan.recall.remove(passage_id)
                    plan.stream.append(passage_id)
                else:
                    self._fetched[wish.block_id] = (kv, tier)

    @cached_property
    def referred(self) -> dict[int, Exchange]:
        """The old exchanges that the question refers back to, by turn, as far as they can be had."""

        def there(block: StoredBlock) -> bool:
            return block.record.id in self.live.blocks or self.kept(block.bank_key)

        return {e.turn: e for e in self.request.referred if all(there(block) for block in e.blocks)}

    def kept(self, key: str | None) -> bool:
        """Whether the bank has it."""
        return key is not None and self.bank.where(key) is not None

    def read(self, plan: Plan, prompt: Sequence[int]) -> Iterator[None]:
        """Bring in what must be restored, the passages, the question, and the answer's prompt."""
        if self.cancelled:
            return
        request, live = self.request, self.live
        restore = live.to_restore()
        if self.bank.enabled:
            # A system prompt is read once too, by the first session that has it.
            live.bank_keys.update({block.id: self.bank.system_key(block.tokens) for block in restore if block.pinned})
        # Best last: the nearer a passage is to the question, the better a small model uses it.
        wanted = [w for w in reversed(self.wishes) if w.candidate.passage.id not in plan.skipped]
        coming = [w for w in wanted if w.candidate.passage.id not in plan.resident]
        unread = [block for block in restore if not self._banked(block.id)]
        self._restored = sum(len(block.tokens) for block in unread) if request.number > 1 else 0
        self._total = sum(len(block.tokens) for block in unread) + len(request.question_ids) + len(prompt)
        self._total += sum(len(w.candidate.token_ids) for w in coming if w.candidate.passage.id in plan.stream)
        yield from self._restore(restore)
        yield from self._recall_exchanges(plan)
        streamed: list[StoredBlock] = []
        if not self.bank.enabled:
            streamed = [self._passage(wish) for wish in coming]
            wanted = [wish for wish in wanted if wish.candidate.passage.id in plan.resident]
        if wanted and not self.cancelled:
            yield from self._bring(wanted)
        if self.cancelled:
            return
        question = NewBlock(request.question_id, request.question_ids, pinned=True)
        blocks = [*(NewBlock(block.record.id, block.token_ids) for block in streamed), question]
        yield from self._prefill(blocks, NewBlock(request.answer_id, prompt))
        self._keep([block for block in streamed if block.record.id in live.cache.block_ids])

    def _restore(self, blocks: list[NewBlock]) -> Iterator[None]:
        """Bring stale blocks in again, in their order: from the bank what is there, the rest by reading it."""
        while blocks and not self.cancelled:
            first = blocks[0]
            kv = self.bank.fetch(self.live.bank_keys[first.id]) if self._banked(first.id) else None
            if kv is not None:
                self.live.cache.insert([(first, kv)], recompute=0 if first.pinned else self.bank.recompute)
                del blocks[0]
            else:
                banked = (i for i, block in enumerate(blocks) if i and self._banked(block.id))
                count = next(banked, len(blocks))
                yield from self._prefill(blocks[:count])
                if first.pinned and self.bank.enabled and first.id in self.live.cache.block_ids:
                    self.bank.keep_system(first.tokens, self.live.cache.lift(first.id))
                del blocks[:count]
            self.live.note_restored()

    def _banked(self, block_id: str) -> bool:
        return self.kept(self.live.bank_keys.get(block_id))

    def _recall_exchanges(self, plan: Plan) -> Iterator[None]:
        """Put old exchanges in again, oldest first; one whose file turns out to be damaged stays out."""
        for turn in sorted(plan.exchanges):
            if self.cancelled:
                return
            blocks = self.referred[turn].blocks
            started = time.monotonic()
            tiers = [self.bank.where(block.bank_key or "") for block in blocks]
            found = [self.bank.fetch(block.bank_key or "") for block in blocks]
            pairs = [
                (NewBlock(block.record.id, block.token_ids), kv)
                for block, kv in zip(blocks, found, strict=True)
                if kv is not None
            ]
            if len(pairs) < len(blocks):
                continue
            before = self.live.resident_tokens
            self.live.cache.insert(pairs)
            seconds = (time.monotonic() - started) / len(blocks)
            for block, tier in zip(blocks, tiers, strict=True):
                self._note_arrival(block, tier, before, seconds, returning=True, recomputed=0)
                before += block.record.tokens
            yield

    def _prefill(self, blocks: list[NewBlock], answer: NewBlock | None = None) -> Iterator[None]:
        before = self.prefilled
        last = sum(len(block.tokens) for block in (*blocks, answer)) if answer else None
        for done in self.live.cache.prefill(blocks, answer=answer, logits=answer is not None):
            self._note_read(before + done)
            if done == last:
                # The answer's first token is there for the taking.
                break
            yield
            if self.cancelled:
                self.live.cache.drop_unfinished()
                break

    def _note_read(self, done: int) -> None:
        self.prefilled = done
        self.note_peak()
        self.emit(Prefill(done=done, total=max(done, self._total), restored=self._restored), None)

    def _bring(self, wanted: Sequence[Wish]) -> Iterator[None]:
        """Put passages at the end of the stream: those that are resident from where they are, the others from the bank,
        where those are computed first that are not there."""
        live, bank = self.live, self.bank
        started = time.monotonic()
        places = {block.passage_id: block for block in live.blocks.values() if block.passage_id}
        arrivals: list[_Arrival] = []
        for wish in wanted:
            token_ids = wish.candidate.token_ids
            if (record := places.get(wish.candidate.passage.id)) is not None:
                arrivals.append(_Arrival(StoredBlock(record=record, token_ids=token_ids), moves=True))
            elif wish.block_id in self._fetched:
                arrivals.append(_Arrival(self._passage(wish), *self._fetched.pop(wish.block_id)))
            else:
                kv = yield from self._compute(wish)
                started = time.monotonic()
                if kv is None:
                    return
                arrivals.append(_Arrival(self._passage(wish), kv))
        before = live.resident_tokens
        moving = [arrival for arrival in arrivals if arrival.moves]
        for arrival, kv in zip(moving, live.cache.take_out([a.block.record.id for a in moving]), strict=True):
            arrival.kv = kv
        blocks = [(NewBlock(a.block.record.id, a.block.token_ids), a.kv) for a in arrivals]
        live.cache.insert([(block, kv) for block, kv in blocks if kv is not None], recompute=bank.recompute)
        self.note_peak()
        seconds = (time.monotonic() - started) / len(arrivals)
        for arrival in arrivals:
            record = arrival.block.record
            if arrival.moves:
                live.blocks[record.id] = live.blocks.pop(record.id)
                self.database.write(partial(writing.move_to_end, block_id=record.id))
                continue
            left = live.offloaded.pop(record.passage_id or "", None)
            # If what left has another name, it had been dropped from the bank, that was logged, and this is read anew.
            returning = left is not None and left.id == record.id
            recomputed = min(bank.recompute, record.tokens)
            self._note_arrival(arrival.block, arrival.tier, before, seconds, returning=returning, recomputed=recomputed)
            before += record.tokens
        yield

    def _note_arrival(
        self, block: StoredBlock, tier: Tier | None, before: int, seconds: float, *, returning: bool, recomputed: int
    ) -> None:
        """Account for a block that has been put in.

        tier: where its K/V waited; None if it was computed now. returning: whether the session has held it before.
        recomputed: its first tokens, which were read anew.
        """
        live, record = self.live, block.record
        live.blocks[record.id] = record
        if not returning:
            live.seen_tokens += record.tokens
        if block.bank_key is not None:
            live.bank_keys[record.id] = block.bank_key
        session_id = live.record.id
        if tier is None:
            point = self.point("prefill")
            self.database.write(partial(writing.insert_arrivals, session_id=session_id, blocks=[block], point=point))
            return
        row = Recall(
            id=new_id("rec"),
            session_id=session_id,
            turn_id=self.request.turn_id,
            block_id=record.id,
            kind=record.kind,
            document_id=record.document_id,
            passage_id=record.passage_id,
            tokens=record.tokens,
            origin=tier,
            recomputed=recomputed,
            seconds=seconds,
            resident_before=before,
            resident_after=before + record.tokens,
            created_at=now(),
        )
        point = self.point("recall")
        self.emit(row, self.database.write(partial(writing.insert_recall, recall=row, block=block, point=point)))

    def _compute(self, wish: Wish) -> Generator[None, None, BlockKV | None]:
        """A passage's K/V, computed step by step; None if the turn was cancelled meanwhile."""
        before, candidate = self.prefilled, wish.candidate
        steps = self.bank.compute(wish.bank_key, candidate.token_ids, candidate.passage.document_id)
        try:
            while True:
                self._note_read(before + next(steps))
                yield
                if self.cancelled:
                    return None
        except StopIteration as end:
            kv: BlockKV = end.value
            return kv
        finally:
            steps.close()

    def _keep(self, passages: list[StoredBlock]) -> None:
        """Passages that are in the cache whole stay, whatever becomes of the turn."""
        live = self.live
        for block in passages:
            live.blocks[block.record.id] = block.record
            live.seen_tokens += block.record.tokens
        if passages:
            point = self.point("prefill")
            write = partial(writing.insert_arrivals, session_id=live.record.id, blocks=passages, point=point)
            self.database.write(write)

    # Values

    def _passage(self, wish: Wish) -> StoredBlock:
        passage, token_ids = wish.candidate.passage, wish.candidate.token_ids
        key = wish.bank_key if self.bank.enabled else None
        return self.block(wish.block_id, passage.kind, token_ids, passage=passage, bank_key=key)

    def block(
        self,
        block_id: str,
        kind: str,
        token_ids: list[int],
        *,
        passage: StoredPassage | None = None,
        bank_key: str | None = None,
    ) -> StoredBlock:
        """A block of this turn as it is recorded. passage: where it is from, if it is one."""
        turn_id, turn = self.request.turn_id, self.request.number
        return new_block(block_id, kind, token_ids, turn_id=turn_id, turn=turn, passage=passage, bank_key=bank_key)

    def point(self, phase: str) -> CompressionPoint:
        """The cache as it is now."""
        live = self.live
        resident = live.resident_tokens
        # What is being read or answered is seen and resident, though not yet a committed block.
        growing = resident - sum(block.tokens for block in live.blocks.values())
        seen = live.seen_tokens + growing
        return CompressionPoint(
            turn_id=self.request.turn_id,
            step=self.step,
            phase=phase,
            seen_tokens=seen,
            resident_tokens=resident,
            compression_ratio=seen / resident if resident else 1.0,
            budget_tokens=live.record.budget_tokens,
            kv_bytes=live.cache.nbytes,
            blocks=len(live.blocks),
            created_at=now(),
        )

    def note_peak(self) -> None:
        """Keep the most tokens ever kept."""
        self.peak = max(self.peak, self.live.cache.tokens_kept)
