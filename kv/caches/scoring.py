"""Token scores from what a cache can see: keys used as queries, key norms, age. Small functions on tensors.

A `Scorer` is one of a method's four axes (`kv.caches.policy`): the larger a token's score, the longer it stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from kv.cpu import attention as cpu_attention

# Queries scored at once; bounds the [B, H_kv, queries, rows] weights a long pass would otherwise hold.
_QUERY_SLICE = 256


class Scorer(Protocol):
    """How tokens earn their scores. `signal` says it in words, for the table of methods."""

    @property
    def signal(self) -> str:
        """The signal, in the field's words."""
        ...

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """The scores of all rows, [B, H_kv, R] float32, once the last `new` of them have come.

        scores: those of the R - new rows before, [B, H_kv, R - new]. keys: [B, H_kv, R, D], in stream order.
        """
        ...


@dataclass(frozen=True)
class AttentionMass:
    """Attention received from later keys used as queries, summed, old mass decaying by `decay` per token.

    window: of all that came since the last time, only so many of the newest are queries; None for all. What the others
        gave would have decayed to `decay ** window` of it.

    Source: H2O (arXiv:2306.14048), with keys as queries as the chunkkv source document uses it; the rest is ours.
    """

    decay: float = 1.0
    window: int | None = None
    signal: str = "cumulative attention mass"

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """See `Scorer`. Token by token: `scores = scores * decay + softmax(K_before . k / sqrt(D))`, new ones at 0."""
        first = scores.shape[-1]
        fresh = mx.zeros((*keys.shape[:2], new))
        skipped = 0 if self.window is None else max(0, new - self.window)
        known = mx.concatenate([scores * self.decay**skipped, fresh], axis=-1)
        earned = add_attention_mass(known, keys, first + skipped, new - skipped, self.decay)
        if not first:
            # No row can score the very first token; the source document starts it at 1.
            earned[..., 0] += self.decay ** (new - 1)
        return earned


@dataclass(frozen=True)
class CurrentAttention:
    """Attention received from the newest key alone, used as the query: memoryless.

    Source: TOVA (arXiv:2401.06104), with the key in place of the query.
    """

    signal: str = "current attention weight"

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """See `Scorer`."""
        rows = keys.shape[2]
        blank = mx.zeros((*keys.shape[:2], rows))
        return add_attention_mass(blank, keys, rows - 1, 1, 1.0)


@dataclass(frozen=True)
class WindowAttention:
    """Attention received from the last `window` keys of what was read, used as queries, smoothed over neighbours.

    Source: SnapKV (arXiv:2404.14469), with keys in place of queries.
    kernel: tokens over which the mass is averaged, so that a token's neighbours stay with it.
    """

    window: int
    kernel: int
    signal: str = "attention from the last keys read"

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """See `Scorer`."""
        rows = keys.shape[2]
        window = min(self.window, rows)
        blank = mx.zeros((*keys.shape[:2], rows))
        mass = add_attention_mass(blank, keys, rows - window, window, 1.0)
        half = self.kernel // 2
        padded = mx.pad(mass, [(0, 0), (0, 0), (half, half)])
        return mx.stack([padded[..., i : i + rows] for i in range(2 * half + 1)]).mean(axis=0)


@dataclass(frozen=True)
class ObservedAttention:
    """Attention that the last `window` real queries of each pass paid, summed, old mass decaying by `decay` per token.

    Needs `kv.attention.observed`, which shows caches the queries; scores then come with each pass, not when they are
    asked for.
    """

    window: int
    decay: float
    signal: str = "observed attention"

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """See `Scorer`. Nothing is earned by keys alone."""
        raise RuntimeError("observed attention is scored by the queries; see kv.attention.observed")

    def observe(self, scores: mx.array, keys: mx.array, queries: mx.array, scale: float) -> mx.array:
        """The scores of all rows once a pass has attended, [B, H_kv, R].

        scores: [B, H_kv, R - N]. keys: [B, H_kv, R, D]. queries: [B, H_q, N, D], rotated. scale: attention's.
        """
        batch, heads, rows, width = keys.shape
        count = queries.shape[2]
        last = min(self.window, count)
        recent = queries[:, :, count - last :].astype(mx.float32).reshape(batch, heads, -1, last, width)
        logits = (recent * scale) @ keys.astype(mx.float32).swapaxes(-1, -2)[:, :, None]
        mask = mx.arange(rows - last, rows)[:, None] >= mx.arange(rows)
        weights = mx.softmax(mx.where(mask, logits, mx.finfo(mx.float32).min), axis=-1)
        mass = (_fading(last, self.decay) @ weights)[..., 0, :].mean(axis=2)
        return self.add(scores, mass, count)

    def add(self, scores: mx.array, mass: mx.array, count: int) -> mx.array:
        """The scores of all rows once a pass of `count` tokens has paid `mass`, [B, H_kv, R]."""
        return mx.pad(scores * self.decay**count, [(0, 0), (0, 0), (0, count)]) + mass


@dataclass(frozen=True)
class KeyNorm:
    """Each key's L2 norm, times `sign`: fixed when the token comes.

    sign +1: large keys matter (the chunkkv source document). -1: small ones do (arXiv:2406.11430).
    """

    sign: float = 1.0

    @property
    def signal(self) -> str:
        """The signal, in the field's words."""
        return "key norm" if self.sign > 0 else "low key norm"

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """See `Scorer`."""
        return mx.concatenate([scores, self.sign * key_norms(keys[..., scores.shape[-1] :, :])], axis=-1)


@dataclass(frozen=True)
class Age:
    """No score: among equals the older leaves first, so that the newest tokens stay."""

    signal: str = "position"

    def score(self, scores: mx.array, keys: mx.array, new: int) -> mx.array:
        """See `Scorer`."""
        return mx.zeros((*keys.shape[:2], keys.shape[2]))


SCORERS: dict[str, Any] = {
    scorer.__name__: scorer
    for scorer in (AttentionMass, CurrentAttention, WindowAttention, ObservedAttention, KeyNorm, Age)
}


def key_norms(keys: mx.array) -> mx.array:
    """L2 norm of each key, in float32. keys: [B, H_kv, n, D] -> [B, H_kv, n]."""
    return mx.linalg.norm(keys.astype(mx.float32), axis=-1)


def add_attention_mass(
    scores: mx.array, keys: mx.array, first: int, count: int, decay: float, *, with_numpy: bool | None = None
) -> mx.array:
    """Let `count` tokens from row `first` on, as queries, add their attention over the rows before them to those rows.

    Token by token this is `scores = scores * decay + softmax(K_before . k / sqrt(D))`, computed for all of them
    at once, so it does not depend on how a stream was sliced.

    scores: [B, H_kv, R] float32. keys: [B, H_kv, R, D]. with_numpy: None where that is faster.
    Returns the new scores, [B, H_kv, R].
    """
    rows = scores.shape[-1]
    if cpu_attention.on_cpu(keys.dtype) if with_numpy is None else with_numpy:
        mx.eval(keys)
        heads = np.array(keys, copy=False).reshape(-1, *keys.shape[2:])
        mass = mx.array(cpu_attention.attention_mass(heads, first, count, decay))
        return scores * decay**count + mass.reshape(scores.shape)
    for start in range(first, first + count, _QUERY_SLICE):
        stop = min(start + _QUERY_SLICE, first + count)
        queries = keys[..., start:stop, :].astype(mx.float32) * keys.shape[-1] ** -0.5
        logits = queries @ keys[..., :stop, :].astype(mx.float32).swapaxes(-1, -2)
        if stop - start == 1 and start:
            # One token, as in decoding: it sees every row but its own, and nothing need be masked.
            weights = mx.softmax(logits[..., :start], axis=-1)
        else:
            mask = _before(start, stop)
            weights = mx.softmax(mx.where(mask, logits, mx.finfo(mx.float32).min), axis=-1)
            if start == 0:
                # The first token of a stream sees no row: its softmax is to be zero, not uniform.
                weights = weights * mask
        # One product fades and sums.
        mass = (_fading(stop - start, decay) @ weights)[..., 0, :]
        if mass.shape[-1] < rows:
            mass = mx.pad(mass, [(0, 0), (0, 0), (0, rows - mass.shape[-1])])
        scores = scores * decay ** (stop - start) + mass
    return scores


# Small constants that every layer needs at every eviction: made once, since an operation costs more than its numbers.
_SMALL = 1 << 16


def _before(start: int, stop: int) -> mx.array:
    """[stop - start, stop] bool: whether the column is before the row's token."""
    return _kept_before(start, stop) if (stop - start) * stop <= _SMALL else _new_before(start, stop)


def _new_before(start: int, stop: int) -> mx.array:
    mask = mx.arange(start, stop)[:, None] > mx.arange(stop)[None, :]
    mx.eval(mask)
    return mask


_kept_before = lru_cache(maxsize=64)(_new_before)


@lru_cache(maxsize=64)
def _fading(count: int, decay: float) -> mx.array:
    """[1, count]: what is left of each of `count` tokens' mass when the last has come."""
    weights = (decay ** mx.arange(count - 1, -1, -1))[None]
    mx.eval(weights)
    return weights
