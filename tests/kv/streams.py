"""Sessions on tiny models, each with a twin that decodes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from kv import LoadedModel, Session
from kv.session.session import NewBlock
from kv.session.together import run_together, step_together

WORDS = 100
# As many as there are sinks, so that every other block can be evicted.
SYSTEM = 4


def loaded(model: Any, context: int = 4096) -> LoadedModel:
    """A model without its tokenizer, which decoding does not need."""
    ropes = [layer.self_attn.rope for layer in model.layers]
    none = cast(Any, None)
    return LoadedModel("tiny", model, none, none, none, frozenset(), context, ropes)


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(1 + seed).integers(0, WORDS, count).tolist()


class Stream:
    """A session in the batch, and its twin, which is told the same and decodes alone."""

    def __init__(self, model: LoadedModel, seed: int, blocks: Sequence[int], **options: Any) -> None:
        self.options = {"budget": 512, "prefill_step": 64, **options}
        self.batched = Session(model, **self.options)
        self.alone = Session(model, **self.options)
        self.seed = seed
        self.answers = 0
        self.fed = 0
        self.drafted = False
        system = NewBlock("system", words(seed - 1, SYSTEM), pinned=True)
        self.read([system, *(NewBlock(f"b{i}", words(seed + i, count)) for i, count in enumerate(blocks))])

    def read(self, blocks: Sequence[NewBlock]) -> None:
        """Read blocks, and open an answer."""
        self.answers += 1
        self.answer = NewBlock(f"answer{self.answers}", words(self.seed + 100 + self.answers, 3))
        self.token, self.fed = self.answer.tokens[-1], -1
        for session in (self.batched, self.alone):
            for _ in session.prefill(blocks, answer=self.answer):
                pass

    def take(self, logits: mx.array) -> None:
        """Compare the logits of the batch with those alone; go on with the likeliest token."""
        want = np.array(self.alone.step(self.token))
        np.testing.assert_allclose(np.array(logits), want, atol=1e-4, rtol=1e-4)
        assert int(np.array(logits).argmax()) == int(want.argmax())
        self.token = int(want.argmax())
        self.fed += 1

    def close(self, kept: int, rest: Sequence[int]) -> None:
        """Close the answer as its first `kept` generated tokens and `rest`."""
        for session in (self.batched, self.alone):
            session.close_answer(len(self.answer.tokens) + kept, rest)
            session.pin(self.answer.id, False)

    def evict(self, block: str) -> None:
        got, want = self.batched.evict(block), self.alone.evict(block)
        assert (got.block, got.start, got.tokens) == (want.block, want.start, want.tokens)
        assert got.score == pytest.approx(want.score, rel=1e-3, abs=1e-5)

    def check(self) -> None:
        """What is held is the same: books, rows, scores, keys and values."""
        got, want = self.batched, self.alone
        assert (got.tokens_seen, got.tokens_kept, got.position) == (want.tokens_seen, want.tokens_kept, want.position)
        for mine, theirs in zip(got.blocks(), want.blocks(), strict=True):
            assert dataclasses.replace(mine, score=0.0) == dataclasses.replace(theirs, score=0.0)
            assert mine.score == pytest.approx(theirs.score, rel=1e-3, abs=1e-5)
        for cache, other in zip(got._caches, want._caches, strict=True):
            assert (cache.offset, cache.tokens_seen, cache.tokens_kept) == (
                other.offset,
                other.tokens_seen,
                other.tokens_kept,
            )
            for mine_, theirs_ in zip(cache.arrays, other.arrays, strict=True):
                np.testing.assert_allclose(np.array(mine_), np.array(theirs_), atol=1e-4, rtol=1e-4)
        assert got._group.positions() == want._group.positions()
        # A draft may have made the buffers grow sooner.
        assert self.drafted or got.nbytes == want.nbytes


def step(streams: Sequence[Stream], times: int = 1) -> None:
    for _ in range(times):
        rows = step_together([stream.batched for stream in streams], [stream.token for stream in streams])
        for stream, logits in zip(streams, rows, strict=True):
            stream.take(logits)


def draft(streams: Sequence[Stream], right: Sequence[int], wrong: Sequence[int]) -> None:
    """Feed each stream its token and a draft whose first `right` tokens are what it will say, and `wrong` ones more."""
    runs = []
    for stream, count, more in zip(streams, right, wrong, strict=True):
        ahead = stream.alone.fork({block: block for block in stream.alone.block_ids})
        run = [stream.token]
        for _ in range(count):
            run.append(likeliest(ahead.step(run[-1])))
        miss = (likeliest(ahead.step(run[-1])) + 1) % WORDS
        runs.append(run + [miss] * more)
        stream.drafted = True
    rows = run_together([stream.batched for stream in streams], runs)
    for stream, run, logits, count in zip(streams, runs, rows, right, strict=True):
        assert len(logits) == len(run)
        for place in range(count + 1):
            assert stream.token == run[place]
            stream.take(logits[place])
        stream.batched.reject(len(run) - count - 1)


def likeliest(logits: mx.array) -> int:
    """The token that a greedy answer goes on with."""
    return int(mx.argmax(logits).item())
