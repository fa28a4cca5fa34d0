"""The chunkkv source document taken at its word, for comparison: `chunkkv_literal=True` and `h2o_literal=True`.

Every head decides alone, token by token: `scores += softmax(K_stored . k / sqrt(D))`, append with score 0 (the first
token 1.0, or the key's norm), and while over budget drop the chunk of the *compacted* rows with the lowest mean, the
older one on a tie; then all heads are trimmed to the shortest (sinks and the newest rows stay). Its chunks so drift
over the rows, cut what they once held, and the oldest tokens win by age: see `kv.methods.chunkkv` for what is better.

Each token's decision needs the one before it, so this runs on the host. Only what a pass attends to is not literal: all
of its own rows, as mlx-lm's mask supposes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kv.caches.group import CacheGroup
from kv.caches.ledger import Ledger
from kv.caches.policy import Policy, Score

Floats = NDArray[np.float32]


class LiteralHead:
    """What one head holds. The parameters are the source document's."""

    def __init__(self, width: int, *, budget: int, chunk_size: int, n_sink: int, score: Score) -> None:
        self.budget = budget
        self.chunk_size = chunk_size
        self.n_sink = n_sink
        self.score = score
        self.length = 0
        self._keys: Floats = np.zeros((budget + 1, width), dtype=np.float32)
        self.scores: Floats = np.zeros(budget + 1, dtype=np.float32)
        self._ids = np.zeros(budget + 1, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held, spare rows included."""
        return self._keys.nbytes + self.scores.nbytes + self._ids.nbytes

    def push(self, keys: Floats, ids: NDArray[np.int64]) -> None:
        """Take tokens in, one by one. keys: [n, D]. ids: [n], the caller's names for them.

        Those that come before the next eviction give and earn their scores in one step.
        """
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + max(1, self.budget - self.length))
            self._store(keys[start:stop], ids[start:stop])
            start = stop
            while self.length > self.budget:
                self._evict()

    def restore(self, keys: Floats, scores: Floats) -> None:
        """Hold these rows. keys: [n, D]. scores: [n]."""
        self.length = len(keys)
        self._keys[: self.length] = keys
        self.scores[: self.length] = scores
        self._ids[: self.length] = np.arange(self.length)

    def cut(self, length: int) -> NDArray[np.int64]:
        """Cut to a length, sinks and the newest rows staying. Returns the ids kept; rows are named anew, 0, 1, …"""
        sinks = min(self.n_sink, length)
        self._drop(sinks, self.length - (length - sinks))
        kept = self._ids[:length].copy()
        self._ids[:length] = np.arange(length)
        return kept

    def _store(self, keys: Floats, ids: NDArray[np.int64]) -> None:
        """Append tokens, which give the rows before each of them what it attends to them. keys: [n, D]."""
        start, stop = self.length, self.length + len(ids)
        self._keys[start:stop] = keys
        self._ids[start:stop] = ids
        self.length = stop
        if self.score == "key_norm":
            self.scores[start:stop] = np.linalg.norm(keys, axis=-1)
            return
        self.scores[start:stop] = 0
        if not start:
            self.scores[0] = 1
            keys, start = keys[1:], 1
        if start == stop:
            return
        logits = keys @ self._keys[:stop].T
        logits *= np.float32(keys.shape[-1] ** -0.5)
        if stop - start > 1:
            logits[np.arange(start, stop)[:, None] <= np.arange(stop)] = -np.inf
        else:
            logits = logits[:, :start]
        logits -= logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits, out=logits)
        weights /= weights.sum(axis=-1, keepdims=True)
        self.scores[: weights.shape[1]] += weights.sum(axis=0)

    def _evict(self) -> None:
        """Drop the chunk of the compacted rows with the lowest mean; the last chunk may be a short one."""
        size = self.chunk_size
        scores = self.scores[self.n_sink : self.length]
        whole = len(scores) // size * size
        means = scores[:whole].reshape(-1, size).mean(axis=-1)
        if whole < len(scores):
            means = np.append(means, scores[whole:].mean())
        start = self.n_sink + int(means.argmin()) * size
        self._drop(start, min(start + size, self.length))

    def _drop(self, start: int, stop: int) -> None:
        left = self.length - (stop - start)
        for rows in (self._keys, self.scores, self._ids):
            rows[start:left] = rows[stop : self.length]
        self.length = left


class LiteralGroup(CacheGroup):
    """One layer whose heads decide as `LiteralHead`s."""

    def __init__(self, policy: Policy, score: Score, held: Ledger | None = None) -> None:
        super().__init__(policy, held=held)
        self._kind = score
        self._heads: list[LiteralHead] = []

    def settle(self, count: int) -> None:
        """Account for the pass of `count` tokens that the layer has just stored, then evict."""
        (layer,) = self.layers
        stored, total = self.rows, self.rows + count
        keys = np.array(layer.rows_at(None, total).astype(mx.float32))
        shape = keys.shape[:2]
        keys = keys.reshape(-1, *keys.shape[2:])
        if not self._heads:
            scores = np.array(layer.scores).reshape(len(keys), stored)
            self._heads = [self._head(*held) for held in zip(keys[:, :stored], scores, strict=True)]
        ids = np.arange(stored, total)
        for head, fresh in zip(self._heads, keys[:, stored:], strict=True):
            head.push(fresh, ids)
        # Heads are trimmed to the shortest.
        length = min(head.length for head in self._heads)
        index = np.stack([head.cut(length) for head in self._heads])
        layer.scores = mx.array(np.stack([head.scores[:length] for head in self._heads])).reshape(*shape, length)
        self._held.rows = length
        self._held.position += count
        if length < total:
            layer.keep(mx.array(index))

    def _head(self, keys: Floats, scores: Floats) -> LiteralHead:
        policy = self.policy
        head = LiteralHead(
            keys.shape[-1], budget=policy.budget, chunk_size=policy.chunk_size, n_sink=policy.n_sink, score=self._kind
        )
        head.restore(keys, scores)
        return head

    def positions(self) -> list[list[int]]:
        """Refused: rows are not followed back to positions here."""
        raise ValueError("the literal preset does not keep positions")

    def books(self) -> dict[str, Any]:
        """What there is to know beside tensors, as JSON-ready values."""
        return {**super().books(), "literal": self._kind}

    @property
    def host_nbytes(self) -> int:
        """Bytes of the heads' own copies."""
        return sum(head.nbytes for head in self._heads)
