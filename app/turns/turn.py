"""One turn on the MLX thread: plan, make room, read, answer, commit.

A generator, so that turns take their steps in rotation and a cancelled one stops at its next step. A turn either
commits whole or leaves no question and no answer behind, in the cache or in the history. Blocks that it evicted stay
evicted, and passages that it brought in whole stay resident: both are true of the cache, and logged.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Literal

import mlx.core as mx

from app.audit import writing
from app.audit.records import StoredBlock
from app.memory.bank import Bank
from app.memory.live import LiveSession
from app.turns.answer import AnswerText, Written
from app.turns.events import (
    Alternative,
    CacheFigures,
    Done,
    FinishReason,
    Retrieval,
    Source,
    Timings,
    Token,
    TokenLogprob,
    Usage,
)
from app.turns.plan import Held, Plan, Referred, Wanted, plan_turn
from app.turns.request import TurnRequest
from app.turns.residency import Emit, Residency
from ingest.database import Database
from kv.model.sampling import Chosen, Sampler
from kv.model.text import TextCodec

# A stop string may end inside a token; what is left of that token is encoded again, in at most so many tokens.
_STOP_SLACK = 16

# What a turn yields and is sent; see `Turn.run`.
Steps = Generator[list[int] | None, mx.array | None, None]


class Turn:
    """A turn's state. emit: takes each event, and the future of the write that must be committed before it is sent.

    draft_tokens: most tokens of the answer that are drafted at once.
    """

    def __init__(
        self,
        request: TurnRequest,
        live: LiveSession,
        bank: Bank,
        database: Database,
        emit: Emit,
        *,
        draft_tokens: int = 0,
    ) -> None:
        self.request = request
        self.live = live
        self.residency = Residency(request, live, bank, database, emit)
        self._database = database
        self._emit = emit
        self._draft_tokens = draft_tokens
        self._cached = 0
        self._prompt_tokens = 0
        self._drafted = self._accepted = 0
        self._started_at = self._read_at = 0.0
        self._first_token: float | None = None
        self._sources: list[Source] = []
        self._logprobs: list[TokenLogprob] = []
        self._scores: dict[str, float] = {}

    def run(self) -> Steps:
        """Run the turn: each step is one forward pass at most.

        Yields None after a pass of its own. Yields a token and a draft of what follows it when they are to be fed to
        the session next, as many of the draft as suits; is to be sent the logits behind each token that was, [n, V],
        or None if the turn was cancelled: so turns that answer share their passes.

        Raises DoesNotFit, before anything has changed, if the turn cannot fit the budget.
        """
        self._started_at = self._read_at = time.monotonic()
        live = self.live
        if self.residency.cancelled:
            # It had to wait, and its client did not.
            self._cached = live.resident_tokens
            self._commit(None)
            return
        if not live.stale:
            self._scores = {block.id: block.score for block in live.cache.blocks()}
        plan = self._plan()
        self.residency.candidates = len(plan.evict) + len(plan.reserve)
        self.residency.fetch(plan)
        self._sources = self._describe(plan)
        self._emit(Retrieval(turn_id=self.request.turn_id, sources=self._sources), None)
        self.residency.evict_deleted()
        for leaving in plan.evict:
            self.residency.evict(leaving, leaving.reason)
        yield None
        self._cached = live.cache.tokens_kept
        yield from self.residency.read(plan, live.cache.model.template.assistant.before)
        self._read_at = time.monotonic()
        answer = None if self.residency.cancelled else (yield from self._answer(plan))
        self._commit(answer)

    def roll_back(self) -> None:
        """Take the question and the answer out of the cache again."""
        cache = self.live.cache
        cache.drop_unfinished()
        if self.request.question_id in cache.block_ids:
            cache.rewind(self.request.question_id)

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
                stored=self.residency.kept(live.bank_keys.get(block.id)),
            )
            for block in live.blocks.values()
            if block.document_id not in request.deleted_documents
        ]
        wanted = [
            Wanted(
                passage_id=wish.candidate.passage.id,
                tokens=len(wish.candidate.token_ids),
                block=wish.block_id,
                stored=wish.stored,
            )
            for wish in self.residency.wishes
        ]
        referred = [
            Referred(
                turn=turn,
                blocks=tuple(block.record.id for block in exchange.blocks),
                tokens=exchange.tokens,
                resident=all(block.record.id in live.blocks for block in exchange.blocks),
            )
            for turn, exchange in self.residency.referred.items()
        ]
        overhead = live.cache.model.template.assistant.tokens
        return plan_turn(
            held,
            wanted,
            budget=live.record.budget_tokens,
            question_tokens=len(request.question_ids),
            answer_overhead=overhead + (_STOP_SLACK if request.asked.stop else 0),
            max_tokens=request.asked.max_tokens,
            at_most=request.asked.at_most,
            default_max_tokens=request.default_max_tokens,
            referred=referred,
            stands_alone=request.stands_alone,
        )

    def _describe(self, plan: Plan) -> list[Source]:
        def state(passage_id: str) -> Literal["resident", "recalled", "streamed", "skipped"]:
            if passage_id in plan.resident:
                return "resident"
            if passage_id in plan.recall:
                return "recalled"
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
                ranks=c.passage.ranks,
                tokens=len(c.token_ids),
                state=state(c.passage.id),
            )
            for c in (wish.candidate for wish in self.residency.wishes)
        ]

    # Answering

    def _answer(self, plan: Plan) -> Generator[list[int], mx.array | None, Written | None]:
        cache, template = self.live.cache, self.live.cache.model.template.assistant
        codec, asked = cache.model.codec, self.request.asked
        answer = AnswerText(codec, asked.stop, plan.max_tokens, asked.allow_repetition)
        sampler = Sampler(self.request.sampling)
        lookup = cache.lookup(self._draft_tokens)
        self._prompt_tokens = cache.tokens_kept
        logits, cache.next_logits = cache.next_logits, None
        rows = None if logits is None else logits[None]
        # What was fed last, and how many of the answer's tokens are in the cache.
        run: list[int] = []
        fed = 0
        reason: FinishReason | None = None
        while reason is None:
            if rows is None:
                reason = "cancelled"
                break
            count, right = len(rows), 1
            for place in range(count):
                chosen = sampler.choose(rows[place])
                token = chosen.token
                if token in cache.model.stop_ids:
                    reason = "stop"
                    break
                self.residency.step += 1
                self._note_logprob(codec, chosen)
                lookup.push(token)
                self._show(answer.push(token))
                if (reason := answer.reason) is not None or place + 1 == count or run[place + 1] != token:
                    break
                right += 1
            if run:
                # Those of a draft that were not chosen have never been.
                cache.reject(count - right)
                lookup.note(count - 1, right - 1)
                fed += right
                self.residency.note_peak()
            if reason is None:
                # For this token, the one it leads to, and the template's end.
                self.residency.make_room(plan, 2 + len(template.after))
                run = [token, *lookup.draft(min(cache.room_for_draft, plan.max_tokens - len(answer.token_ids) - 1))]
                rows = yield run
        self._drafted, self._accepted = lookup.drafted, lookup.accepted
        self._show(answer.flush())
        written = answer.finish(reason)
        if reason == "cancelled" and not written.text:
            return None
        fed = min(fed, written.whole)
        ending = [*written.token_ids[fed:], *template.after]
        self.residency.make_room(plan, len(ending))
        cache.close_answer(len(template.before) + fed, ending)
        self.residency.note_peak()
        return written

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._first_token is None:
            self._first_token = time.monotonic() - self.request.accepted_at
        logprobs, self._logprobs = self._logprobs or None, []
        self._emit(Token(text=text, logprobs=logprobs), None)

    def _note_logprob(self, codec: TextCodec, chosen: Chosen) -> None:
        """Keep what is to be reported with the text that the token becomes, or becomes part of."""
        if chosen.logprob is not None:
            top = [Alternative(token=codec.decode([token]), logprob=logprob) for token, logprob in chosen.top]
            token = codec.decode([chosen.token])
            self._logprobs.append(TokenLogprob(token=token, logprob=chosen.logprob, top=top))

    # Committing

    def _commit(self, answer: Written | None) -> None:
        request, live = self.request, self.live
        template = live.cache.model.template.assistant
        blocks: list[StoredBlock] = []
        if answer is None:
            self.roll_back()
        else:
            blocks = [
                self.residency.block(self.request.question_id, "question", request.question_ids),
                self.residency.block(
                    self.request.answer_id, "answer", [*template.before, *answer.token_ids, *template.after]
                ),
            ]
            for block in blocks:
                live.cache.pin(block.record.id, False)
                live.blocks[block.record.id] = block.record
                live.seen_tokens += block.record.tokens
        scores = {block.id: block.score for block in live.cache.blocks()}
        ended = time.monotonic()
        # Of a turn that was cancelled before its answer began: what was there, and what had been read.
        prompt = self._prompt_tokens or self._cached + self.residency.prefilled
        usage = Usage(
            prompt_tokens=prompt,
            cached_tokens=prompt - self.residency.prefilled,
            prefilled_tokens=self.residency.prefilled,
            completion_tokens=len(answer.token_ids) if answer else 0,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )
        timings = Timings(
            retrieval=request.retrieval_seconds,
            queued=self._started_at - request.accepted_at - request.retrieval_seconds,
            prefill=self._read_at - self._started_at,
            first_token=self._first_token,
            decode=ended - self._read_at,
            total=ended - request.accepted_at,
        )
        point = self.residency.point("turn_end")
        cache = CacheFigures(
            budget_tokens=live.record.budget_tokens,
            resident_tokens=point.resident_tokens,
            peak_tokens=self.residency.peak,
            seen_tokens=point.seen_tokens,
            compression_ratio=point.compression_ratio,
            kv_bytes=point.kv_bytes,
            blocks=point.blocks,
            evicted=self.residency.evicted,
        )
        reason: FinishReason = answer.reason if answer else "cancelled"
        written = self._database.write(
            lambda db: writing.end_turn(
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
        self._emit(done, written)
