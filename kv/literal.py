"""The chunkkv source document taken at its word, for comparison: `chunkkv_literal=True` and `h2o_literal=True`.

Every head decides alone, token by token: `scores += softmax(K_stored . k / sqrt(D))`, append with score 0 (the first
token 1.0, or the key's norm), and while over budget drop the chunk of the *compacted* rows with the lowest mean, the
older one on a tie; then all heads are trimmed to the shortest (sinks and the newest rows stay). Its chunks so drift
over the rows, cut what they once held, and the oldest tokens win by age: see `kv.methods.chunkkv` for what is better.

Each token's decision needs the one before it, so this runs on the host, all heads of a layer at once. Only what a pass
attends to is not literal: all of its own rows, as mlx-lm's mask supposes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kv.group import CacheGroup
from kv.policy import Policy, Score

Floats = NDArray[np.float32]


class LiteralHeads:
    """The state of some heads.

    lanes: how many heads (times batch rows). The other parameters are the source document's.
    """

    def __init__(self, lanes: int, width: int, *, budget: int, chunk_size: int, n_sink: int, score: Score) -> None:
        self.budget = budget
        self.chunk_size = chunk_size
        self.n_sink = n_sink
        self.score = score
        self.lengths = np.zeros(lanes, dtype=np.int64)
        self._keys: Floats = np.zeros((lanes, budget + 1, width), dtype=np.float32)
        self._scores: Floats = np.zeros((lanes, budget + 1), dtype=np.float32)
        self._ids = np.zeros((lanes, budget + 1), dtype=np.int64)

    def push(self, keys: Floats, ids: NDArray[np.int64]) -> None:
        """Take tokens in, one by one. keys: [lanes, n, D]. ids: [n], the caller's names for them."""
        lanes = np.arange(len(self.lengths))
        for i, name in enumerate(ids):
            fresh = self._fresh_scores(keys[:, i])
            self._keys[lanes, self.lengths] = keys[:, i]
            self._scores[lanes, self.lengths] = fresh
            self._ids[lanes, self.lengths] = name
            self.lengths += 1
            for lane in np.flatnonzero(self.lengths > self.budget):
                while self.lengths[lane] > self.budget:
                    self._evict(int(lane))

    def trim(self) -> NDArray[np.int64]:
        """Cut every head to the shortest, sinks and the newest rows staying. Returns the ids kept, [lanes, n]."""
        shortest = int(self.lengths.min())
        sinks = min(self.n_sink, shortest)
        for lane, length in enumerate(self.lengths):
            self._drop(lane, sinks, int(length) - (shortest - sinks))
        return self._ids[:, :shortest].copy()

    def rename(self) -> None:
        """Name the rows kept 0, 1, 2, …"""
        self._ids[:] = np.arange(self._ids.shape[1])

    def _fresh_scores(self, key: Floats) -> Floats:
        """Scores of the tokens that come, [lanes]; they give to those stored what they attend to them."""
        if self.score == "key_norm":
            norms: Floats = np.linalg.norm(key, axis=-1)
            return norms
        longest = int(self.lengths.max())
        if not longest:
            return np.ones(len(key), dtype=np.float32)
        logits = (self._keys[:, :longest] @ key[:, :, None])[..., 0] * np.float32(key.shape[-1] ** -0.5)
        if self.lengths.min() < longest:
            logits[np.arange(longest) >= self.lengths[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        self._scores[:, :longest] += weights / weights.sum(axis=-1, keepdims=True)
        return np.zeros(len(key), dtype=np.float32)

    def _evict(self, lane: int) -> None:
        length, size = int(self.lengths[lane]), self.chunk_size
        scores = self._scores[lane, self.n_sink : length]
        whole = len(scores) // size * size
        means = scores[:whole].reshape(-1, size).mean(axis=-1)
        if whole < len(scores):
            means = np.append(means, scores[whole:].mean())
        start = self.n_sink + int(means.argmin()) * size
        self._drop(lane, start, min(start + size, length))

    def _drop(self, lane: int, start: int, stop: int) -> None:
        length = int(self.lengths[lane])
        for rows in (self._keys, self._scores, self._ids):
            rows[lane, start : length - (stop - start)] = rows[lane, stop:length]
        self.lengths[lane] = length - (stop - start)


class LiteralGroup(CacheGroup):
    """One layer whose heads decide as `LiteralHeads`."""

    def __init__(self, policy: Policy, score: Score) -> None:
        super().__init__(policy)
        self._kind = score
        self._heads: LiteralHeads | None = None

    def settle(self, count: int) -> None:
        """Account for the pass of `count` tokens that the layer has just stored, then evict."""
        (layer,) = self.layers
        policy, total = self.policy, self._rows + count
        keys = np.array(layer.rows_at(None, total)[..., self._rows :, :].astype(mx.float32))
        keys = keys.reshape(-1, count, keys.shape[-1])
        if self._heads is None:
            self._heads = LiteralHeads(
                len(keys),
                keys.shape[-1],
                budget=policy.budget,
                chunk_size=policy.chunk_size,
                n_sink=policy.n_sink,
                score=self._kind,
            )
        self._heads.push(keys, np.arange(self._rows, total))
        index = self._heads.trim()
        self._heads.rename()
        self._rows = index.shape[-1]
        self._position += count
        if self._rows < total:
            layer.keep(mx.array(index))

    def positions(self) -> list[list[int]]:
        """Refused: rows are not followed back to positions here."""
        raise ValueError("the literal preset does not keep positions")

    def books(self) -> dict[str, Any]:
        """None: a state that was saved cannot be loaded."""
        return {}
