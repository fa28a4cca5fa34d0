"""A model session: one stream of declared blocks through one model, under one token budget.

The caller says which blocks to stream and which to evict; nothing is evicted behind its back. Runs on the MLX thread.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kv.builder import KVCacheBuilder
from kv.caches.blockkv import BlockKV
from kv.caches.cache import EvictingCache
from kv.caches.checked import check, check_about, checksum
from kv.caches.policy import Pool, Score
from kv.caches.units import Evicted
from kv.config import KVCacheConfig
from kv.cpu.passes import wanting
from kv.model.loading import LoadedModel
from kv.session.lookup import PromptLookup

# Tokens of a pass whose logits are wanted: the model makes logits of each of them, though only the last are used.
_LAST_PASS = 64


@dataclass(frozen=True)
class NewBlock:
    """A block to stream: its name, its tokens, and whether it is pinned from the start."""

    id: str
    tokens: Sequence[int]
    pinned: bool = False


@dataclass(frozen=True)
class Resident:
    """A block in the cache: where it starts, its tokens, and the attention score it has earned."""

    id: str
    start: int
    tokens: int
    pinned: bool
    score: float


class Session:
    """One persistent stream.

    model: what runs it. budget: most tokens kept per layer. prefill_step: most tokens a forward pass takes.
    score, pool: how blocks are scored; see `kv.methods.chunkkv`.

    Raises ValueError if the budget is longer than the model's trained context.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        budget: int,
        prefill_step: int,
        score: Score = "attn_mass",
        pool: Pool = "mean",
    ) -> None:
        if budget > model.context_length:
            raise ValueError(f"budget: {budget} tokens, but {model.name} was trained on {model.context_length}")
        if prefill_step < 1:
            raise ValueError(f"prefill_step: {prefill_step} is not at least 1")
        self.model = model
        self.budget = budget
        self.prefill_step = prefill_step
        config = KVCacheConfig(
            method="chunkkv",
            chunkkv_budget=budget,
            chunkkv_scope="model",
            chunkkv_score=score,
            chunkkv_pool=pool,
            # The session makes room itself; nothing may leave before the budget is truly full. Observed attention,
            # which judges whole passes, evicts no sooner anyway and takes no stride.
            chunkkv_stride=None if score == "observed" else 1,
            # A turn brings thousands of tokens; what the earlier ones gave has faded anyway: 0.98 ** 128 is 0.08.
            chunkkv_window=128 if score == "attn_mass" else None,
        )
        self._caches: list[EvictingCache] = KVCacheBuilder.for_model(model.model, config)
        self._group = self._caches[0].group
        # After `prefill(logits=True)`: of the token that follows, [V].
        self.next_logits: mx.array | None = None
        # Of blocks, also of some that have left since.
        self._tokens: dict[str, list[int]] = {}

    # On disk

    def save(self, path: Path, name: str) -> str:
        """Write everything that is held to a safetensors file that says whose it is. Returns the file's checksum."""
        about = {"name": name, "model": self.model.fingerprint.hex(), "prefill_step": str(self.prefill_step)}
        about["tokens"] = json.dumps({block: self._tokens[block] for block in self.block_ids if block in self._tokens})
        save_prompt_cache(str(path), self._caches, about)
        return checksum(path)

    @classmethod
    def load(cls, model: LoadedModel, path: Path, name: str, expected: str) -> Session:
        """The session that `save` wrote, checked whole before anything of it is used: it goes on where it was.

        Raises OSError if there is no such file, ValueError if it is not the one that was saved, of another name, or of
        another model.
        """
        check(path, expected)
        caches, about = load_prompt_cache(str(path), return_metadata=True)
        check_about(path, about, name=name, model=model.fingerprint.hex())
        score: Score = "observed" if caches[0].observes else "attn_mass"
        session = cls(model, budget=caches[0].layer_budget, prefill_step=int(about["prefill_step"]), score=score)
        session._caches, session._group = caches, caches[0].group
        session._tokens = json.loads(about.get("tokens", "{}"))
        # Now, not when they are first used: the file may be gone by then.
        mx.eval([cache.arrays for cache in caches])
        return session

    def fork(self, names: Mapping[str, str]) -> Session:
        """A session that holds the same and goes its own way. K/V is shared until either of the two stores something.

        names: what each resident block is called in the fork. Raises KeyError if one is missing.
        """
        fork = copy.copy(self)
        fork._caches = [cache.copied() for cache in self._caches]
        fork._group = fork._caches[0].group
        fork._group.rename(names)
        fork._tokens = {names[block]: list(tokens) for block, tokens in self._tokens.items() if block in names}
        return fork

    # What is held

    @property
    def tokens_kept(self) -> int:
        """Tokens in the cache, per layer."""
        return self._group.rows

    @property
    def tokens_seen(self) -> int:
        """Tokens that ever went through the model in this session."""
        return self._caches[0].tokens_seen

    @property
    def position(self) -> int:
        """Position of the next token. Renumbering, when the stream nears the trained context, sets it back."""
        return self._group.position

    @property
    def room(self) -> int:
        """Tokens that fit without evicting."""
        return self.budget - self._group.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the K/V buffers and scores."""
        return self._group.nbytes

    @property
    def block_ids(self) -> list[str]:
        """Names of the resident blocks in stream order. Waits for nothing, where `blocks` works the scores out."""
        return [unit.block for unit in self._group.units() if unit.block is not None]

    @property
    def resident_tokens(self) -> list[int]:
        """The tokens in the cache, in stream order, but for those of blocks that an older version has saved."""
        return [token for unit in self._group.units() for token in self._tokens.get(unit.block or "", ())[: unit.seen]]

    def blocks(self) -> list[Resident]:
        """The resident blocks in stream order. Waits for the device."""
        return [
            Resident(unit.block or "", unit.start, unit.seen, unit.pinned, score)
            for unit, score in zip(self._group.units(), self._group.scores(), strict=True)
        ]

    # Streaming

    def prefill(
        self, blocks: Sequence[NewBlock], *, answer: NewBlock | None = None, logits: bool = False
    ) -> Iterator[int]:
        """Stream blocks; yields the tokens done so far after each pass of at most `prefill_step`.

        answer: the block that will hold the model's answer, with the tokens that prompt it. It stays open and
            pinned for `step` and `close_answer`. Its last token is left for the first `step`, unless
        logits: reads that too, and leaves in `next_logits` those of the token that follows it.

        Raises ValueError, before anything is streamed, if the tokens do not fit into `room`. When the caller stops
        early, `drop_unfinished` must follow.
        """
        tokens = [token for block in blocks for token in block.tokens]
        prompt = list(answer.tokens[: None if logits else -1]) if answer else []
        needed = len(tokens) + len(prompt)
        if needed > self.room:
            raise ValueError(f"{needed} tokens to stream, room for {self.room} in budget {self.budget}")
        self._stay_in_context(needed)
        position = self._group.position
        self._tokens = {block: self._tokens[block] for block in self.block_ids if block in self._tokens}
        for block in blocks:
            self._group.declare(position, position + len(block.tokens), block.id, pinned=block.pinned)
            position += len(block.tokens)
            self._tokens[block.id] = list(block.tokens)
        if answer:
            self._group.open_block(answer.id, at=position, pinned=True)
            self._tokens[answer.id] = list(prompt)
        tokens += prompt
        last = min(self.prefill_step, _LAST_PASS) if logits else 0
        done = 0
        while done < len(tokens):
            left = len(tokens) - done
            part = tokens[done : done + min(self.prefill_step, left if left <= last else left - last)]
            done += len(part)
            wanted = logits and done == len(tokens)
            following = self._forward(part, logits=wanted)
            # Taken out, not sliced: a slice would keep the logits of the whole pass.
            self.next_logits = following[0, mx.array(-1)] if wanted else None
            mx.eval(self.next_logits, [cache.arrays for cache in self._caches])
            mx.clear_cache()
            yield done

    def step(self, token: int) -> mx.array:
        """Feed one token of the open answer; returns the next token's logits, [V].

        Raises ValueError if there is no room. See `kv.session.together` for several sessions, or tokens, at once.
        """
        self.check_room(1)
        caches = self.begin_run([token])
        logits: mx.array = self._forward([token], logits=True)[0, -1]
        mx.eval(logits, [cache.arrays for cache in caches])
        return logits

    def check_room(self, count: int) -> None:
        """Raise ValueError if there is no room for so many more tokens."""
        if self.room < count:
            raise ValueError(f"no room for {count} more tokens in budget {self.budget}: {self.room} are left")

    def begin_run(self, tokens: Sequence[int]) -> list[EvictingCache]:
        """The caches, one a layer, ready to take these tokens of the open answer from a pass that the caller runs."""
        self._stay_in_context(len(tokens))
        self._tokens.setdefault(self._group.units()[-1].block or "", []).extend(tokens)
        return self._caches

    # Speculation

    @property
    def can_draft(self) -> bool:
        """Whether tokens can be fed that may be rejected: not where they are scored by what they pay as they come."""
        return not self._caches[0].observes

    @property
    def room_for_draft(self) -> int:
        """Tokens that can be fed beside the next one, so that nothing is evicted or renumbered for a draft."""
        return max(0, min(self.room, self.model.context_length - self._group.position) - 1)

    def lookup(self, most: int) -> PromptLookup:
        """What drafts the open answer from all that the session holds, at most so many tokens at once."""
        return PromptLookup(self.resident_tokens, most if self.can_draft else 0)

    def reject(self, count: int) -> None:
        """Forget the last `count` tokens of the open answer, as if they had not come; see `run_together`."""
        if count:
            self._group.reject(count)
            del self._tokens[self._group.units()[-1].block or ""][-count:]

    def close_answer(self, kept: int, rest: Sequence[int]) -> None:
        """End the open answer as the first `kept` of its tokens followed by `rest`.

        Afterwards the block holds exactly those tokens, whatever had been fed.
        """
        answer = self._group.units()[-1]
        self._group.truncate(answer.start + kept)
        self._tokens[answer.block or ""][kept:] = rest
        if rest:
            self._stay_in_context(len(rest))
            self._forward(list(rest))
            mx.eval([cache.arrays for cache in self._caches])
        self._group.close_block()

    # Without a pass

    def lift(self, block: str) -> BlockKV:
        """A copy of a resident block's K/V, to `insert` later. Raises KeyError if it is not resident whole."""
        kv = self._group.lift(block)
        mx.eval(kv.keys, kv.values)
        return kv

    def take_out(self, blocks: Sequence[str]) -> list[BlockKV]:
        """Lift resident blocks and evict them, in one go. Raises as `lift` and `evict` do, before anything has left."""
        lifted = [self._group.lift(block) for block in blocks]
        for block in blocks:
            self._group.check_evictable(block)
        for block in blocks:
            self._group.evict(block)
        mx.eval([(kv.keys, kv.values) for kv in lifted], [cache.arrays for cache in self._caches])
        return lifted

    def insert(self, blocks: Sequence[tuple[NewBlock, BlockKV]], *, recompute: int = 0) -> None:
        """Put blocks in again, at the end of the stream, without a pass over their tokens.

        blocks: each with what `lift` gave, from a session of the same model. recompute: first tokens of each that are
            read anew, so that they see what the stream holds before them (EPIC, arXiv:2410.15332).

        Raises ValueError, before anything has changed, if there is no room or K/V is not of such a block.
        """
        for block, kv in blocks:
            if kv.tokens != len(block.tokens):
                raise ValueError(f"block {block.id!r}: K/V of {kv.tokens} tokens for {len(block.tokens)}")
        needed = sum(kv.tokens for _, kv in blocks)
        if needed > self.room:
            raise ValueError(f"{needed} tokens to insert, room for {self.room} in budget {self.budget}")
        self._stay_in_context(needed)
        position = self._group.position
        for block, kv in blocks:
            self._group.declare(position, position + kv.tokens, block.id, pinned=block.pinned)
            position += kv.tokens
            self._tokens[block.id] = list(block.tokens)
        waiting: list[BlockKV] = []
        for block, kv in blocks:
            if recompute:
                self._put(waiting)
                waiting = []
                self._forward(list(block.tokens[:recompute]))
            if rest := kv.after(recompute):
                waiting.append(rest)
        self._put(waiting)
        mx.eval([cache.arrays for cache in self._caches])

    def _put(self, waiting: list[BlockKV]) -> None:
        if waiting:
            self._group.insert(waiting, self.model.ropes)

    def rewind(self, block: str) -> None:
        """Forget a block and everything streamed after it. Raises KeyError if it is not resident."""
        self._group.truncate(self._group.find(block).start)

    def drop_unfinished(self) -> None:
        """Forget the block whose streaming was stopped half-way, if there is one, and those that were to follow."""
        units = self._group.units()
        unfinished = units[-1].start if units and not units[-1].complete else self._group.position
        self._group.truncate(unfinished)

    # Blocks

    def evict(self, block: str) -> Evicted:
        """Take one whole block out. Raises KeyError if it is not resident, ValueError if it is pinned."""
        evicted = self._group.evict(block)
        # Now: until it is done, what was evicted is held as well.
        mx.eval([cache.arrays for cache in self._caches])
        return evicted

    def pin(self, block: str, pinned: bool) -> None:
        """Pin or unpin a resident block."""
        self._group.pin(block, pinned)

    def close(self) -> None:
        """Free the K/V at once; the session cannot be used afterwards.

        A group and its layers refer to each other: without this, Python would find out only some time later.
        """
        self.next_logits = None
        for cache in self._caches:
            cache.release()

    # Internals

    def _forward(self, tokens: list[int], *, logits: bool = False) -> Any:
        """A pass. logits: whether those of the last token are wanted."""
        with wanting("last" if logits else "none"):
            return self.model.model(mx.array(tokens)[None], cache=self._caches)

    def _stay_in_context(self, count: int) -> None:
        # Kept tokens never exceed the budget, which is no longer than the context: renumbering always suffices.
        if self._group.position + count > self.model.context_length:
            self._group.rebase(self.model.ropes)
