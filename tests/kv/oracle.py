"""ChunkKV token by token in NumPy, written from the method's description alone: the tests' independent oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class OracleLayer:
    """One decision unit: `heads` keys are pooled (scope layer/model) or there is one (scope head)."""

    budget: int
    chunk: int
    sinks: int
    recent: int
    stride: int
    decay: float
    score: str
    pool: str
    blocks: dict[int, tuple[int, str, bool]] = field(default_factory=dict)
    keys: list[np.ndarray] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seen: int = 0

    def span(self, position: int) -> tuple[int, int, str | None, bool]:
        for start, (end, name, pinned) in self.blocks.items():
            if start <= position < end:
                return start, end, name, pinned
        if position < self.sinks:
            low, high = 0, self.sinks
        else:
            low = self.sinks + (position - self.sinks) // self.chunk * self.chunk
            high = low + self.chunk
        for start, (end, _, _) in self.blocks.items():
            if end <= position:
                low = max(low, end)
            if start > position:
                high = min(high, start)
        return low, high, None, False

    def push(self, key: np.ndarray) -> list[int]:
        """key: [layers * heads, D]. Returns the starts of the units evicted, before the key came."""
        gone = []
        border = self.seen % self.stride == 0
        if len(self.positions) + (self.stride if border else 1) > self.budget:
            room = self.stride - self.seen % self.stride
            while len(self.positions) + room > self.budget and (start := self._drop()) is not None:
                gone.append(start)
        self._take_in(key)
        return gone

    def _take_in(self, key: np.ndarray) -> None:
        lanes = key.shape[0]
        if self.score in ("key_norm", "low_norm"):
            fresh = np.linalg.norm(key, axis=-1) * (1 if self.score == "key_norm" else -1)
        else:
            if self.score == "current":
                self.scores = [np.zeros(lanes) for _ in self.scores]
            self.scores = [s * self.decay for s in self.scores]
            if self.keys:
                stack = np.stack(self.keys)
                logits = np.einsum("nld,ld->ln", stack, key) / np.sqrt(key.shape[-1])
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                self.scores = [s + weights[:, i] for i, s in enumerate(self.scores)]
            fresh = np.zeros(lanes) if self.keys else np.ones(lanes)
        self.keys.append(key)
        self.scores.append(fresh)
        self.positions.append(self.seen)
        self.seen += 1

    def _drop(self) -> int | None:
        units: dict[int, list[int]] = {}
        for row, position in enumerate(self.positions):
            units.setdefault(self.span(position)[0], []).append(row)
        for spared in (self.recent, 0):
            ranked = []
            for start, rows in units.items():
                low, high, _, pinned = self.span(start)
                if pinned or low < self.sinks or high > self.seen - spared:
                    continue
                pooled = [self.scores[r].mean() for r in rows]
                ranked.append((np.mean(pooled) if self.pool == "mean" else np.max(pooled), start))
            if ranked:
                break
        if not ranked:
            return None
        start = min(ranked)[1]
        for row in reversed(units[start]):
            del self.keys[row], self.scores[row], self.positions[row]
        return start
