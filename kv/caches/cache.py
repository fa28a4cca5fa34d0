"""One layer's evicting cache, following mlx-lm's cache protocol. Its group decides what leaves; it moves the tensors.

What every method here has in common, where the chunkkv source document and its peers do otherwise, and why:

- A forward pass attends to every stored row and all of its own; only what is *stored* shrinks, afterwards. Evicting
  first would shift the causal mask that mlx-lm aligns to the lower right.
- `offset` is the true position, never the number of kept rows: mlx-lm rotates by it before it calls the cache.
- The mask is None or the string "causal", which every layer aligns to its own rows.
- The model's dtype is kept, and buffers shrink when rows leave: `nbytes` is what is held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache

from kv.caches.batch import BatchEvictingCache
from kv.caches.group import CacheGroup
from kv.caches.masks import full_attention_mask
from kv.caches.policy import Policy
from kv.caches.rotation import moved
from kv.caches.saving import restored
from kv.caches.scoring import ObservedAttention

_STEP = 64


class EvictingCache:
    """One layer's cache. Build them with `KVCacheBuilder`.

    method: the method's name. policy: what it does. group: the layers that decide together.
    head_dim: the key width to expect, checked at the first pass; None takes any.
    """

    def __init__(self, method: str, policy: Policy, group: CacheGroup, head_dim: int | None = None) -> None:
        self.method = method
        self.policy = policy
        self.group = group
        self.head_dim = head_dim
        self.offset = 0
        self.tokens_seen = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.scores: mx.array = mx.zeros((1, 1, 0))
        self._rows = 0
        group.join(self)

    # What is held

    @property
    def layer_budget(self) -> int:
        """Most tokens kept between forward passes."""
        return self.policy.budget

    @property
    def chunk_size(self) -> int:
        """Tokens in an eviction unit of undeclared text."""
        return self.policy.chunk_size

    @property
    def tokens_kept(self) -> int:
        """Tokens stored now."""
        return self._rows

    @property
    def compression_ratio(self) -> float:
        """Tokens seen / tokens kept; 1.0 while nothing was evicted."""
        return self.tokens_seen / self._rows if self._rows else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, spare rows and scores included."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes + self.scores.nbytes + self.group.host_nbytes

    # mlx-lm's protocol

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store a pass and return every row to attend to: [B, H_kv, kept + N, D] keys and values.

        keys, values: [B, H_kv, N, D], keys already rotated; their widths may differ.
        Raises ValueError for shapes or dtypes that do not belong to this stream; nothing is stored then.
        """
        self._check(keys, values)
        count = keys.shape[2]
        if self is self.group.layers[0]:
            self.group.admit(count)
        if self.policy.scope == "head" and self.keys is None:
            self.group.set_lanes(keys.shape[0] * keys.shape[1])
        all_keys, all_values = self._append(keys, values)
        self.offset += count
        self.tokens_seen += count
        if self is self.group.layers[-1]:
            self.group.settle(count)
        return all_keys, all_values

    @property
    def observes(self) -> bool:
        """Whether this cache wants to see queries."""
        return isinstance(self.policy.scorer, ObservedAttention)

    def observe(self, queries: mx.array, scale: float) -> None:
        """Be shown the queries of the pass that has just been stored, [B, H_q, N, D]; see `kv.attention.observed`."""
        assert isinstance(self.policy.scorer, ObservedAttention)
        assert self.keys is not None
        if self in self.group.judges:
            self.scores = self.policy.scorer.observe(self.scores, self.rows_at(None, self._rows), queries, scale)
        if self is self.group.layers[-1]:
            self.group.settle_observed(queries.shape[2])

    def observe_mass(self, mass: mx.array) -> None:
        """Be told, in place of `observe`, what attention the one token just stored has paid: [B, H_kv, R], by row."""
        assert isinstance(self.policy.scorer, ObservedAttention)
        if self in self.group.judges:
            self.scores = self.policy.scorer.add(self.scores, mass, 1)
        if self is self.group.layers[-1]:
            self.group.settle_observed(1)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of a pass of N tokens.

        Raises ValueError for sliding windows, which this cache cannot serve, and for one array that is to serve layers
        that may keep different numbers of rows.
        """
        if return_array and self.group.declares and self.policy.scope != "model":
            raise ValueError(
                f"scope: {self.policy.scope!r} lets layers evict different blocks, and this model uses one mask array "
                'for all of them; declared blocks need scope="model" here'
            )
        return full_attention_mask(N, self._rows, return_array, window_size)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, mx.array, mx.array | None, str]:
        """What mlx-lm evaluates and saves: keys, values, scores, the positions of rows, and the books as JSON."""
        books = {
            "method": self.method,
            "policy": self.policy.to_builtins(),
            "head_dim": self.head_dim,
            "tokens_seen": self.tokens_seen,
            "layer": self.group.layers.index(self),
            "layers": len(self.group.layers),
            "group": self.group.books(),
        }
        return *self.arrays, self.group.row_positions, json.dumps(books)

    @property
    def buffers(self) -> tuple[mx.array, mx.array]:
        """Keys and values with the spare rows after them, [B, H_kv, >= R, D]; something must have been stored."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    @property
    def arrays(self) -> tuple[mx.array | None, mx.array | None, mx.array]:
        """Keys [B, H_kv, R, D], values, and the scores earned so far [B, H_kv, <= R]."""
        if self.keys is None or self.values is None:
            return None, None, self.scores
        return self.keys[..., : self._rows, :], self.values[..., : self._rows, :], self.scores

    @classmethod
    def from_state(cls, state: Any) -> EvictingCache:
        """The cache that had that state; those of a group come in layer order, as mlx-lm loads them.

        Raises ValueError if the state is not one of ours.
        """
        keys, values, scores, positions, text = state
        try:
            books = json.loads(text)
            policy = Policy.from_builtins(books["policy"])
            group = restored(policy, books["group"], positions, books["layer"], books["layers"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of an {cls.__name__} that can be loaded: {error!r}") from error
        cache = cls(books["method"], policy, group, books["head_dim"])
        cache.keys, cache.values, cache.scores = keys, values, scores
        cache._rows, cache.offset, cache.tokens_seen = group.rows, group.position, books["tokens_seen"]
        return cache

    @property
    def merge(self) -> Callable[[Sequence[EvictingCache]], BatchEvictingCache]:
        """Makes a batch of streams from copies of the cache that each has of this layer.

        Raises AttributeError, by which mlx-lm knows not to batch, if layers keep different numbers of rows: one mask
        has to do for all of them.
        """
        if self.policy.uneven or (self.group.declares and self.policy.scope != "model"):
            raise AttributeError(
                f"{self.method}: layers that keep different numbers of rows cannot share a batch's mask"
            )
        return lambda caches: BatchEvictingCache([cache.copied() for cache in caches])

    def copied(self) -> EvictingCache:
        """A copy that goes its own way. The other layers of the group follow, in order."""
        copy = self.group.copied(self.group.layers.index(self))
        assert isinstance(copy, EvictingCache)
        return copy

    def is_trimmable(self) -> bool:
        """False: mlx-lm may not cut rows off, since that could cut a block. See `CacheGroup.truncate`."""
        return False

    def size(self) -> int:
        """Tokens stored now."""
        return self._rows

    def empty(self) -> bool:
        """True while nothing was stored."""
        return self.keys is None

    def release(self) -> None:
        """Let go of all arrays. The cache cannot be used afterwards."""
        self.keys = self.values = None
        self.scores = mx.zeros((1, 1, 0))

    # For the group

    def rows_at(self, index: mx.array | None, end: int) -> mx.array:
        """The keys of the rows of `index`, or of the first `end` rows: [B, H_kv, n, D]. See `keep`."""
        assert self.keys is not None
        if index is None:
            return self.keys[..., :end, :]
        return _take(self.keys, index)

    def lift(self, begin: int, end: int) -> tuple[mx.array, mx.array]:
        """Copies of the keys and values of rows [begin, end)."""
        assert self.keys is not None
        assert self.values is not None
        return mx.contiguous(self.keys[..., begin:end, :]), mx.contiguous(self.values[..., begin:end, :])

    def insert(self, keys: mx.array, values: mx.array) -> None:
        """Store rows that no pass has made, as those of the next tokens. keys: rotated to their positions."""
        self._check(keys, values)
        count = keys.shape[2]
        self._append(keys, values)
        self.offset += count
        self.tokens_seen += count
        if self.observes:
            # Nobody has looked at them yet; other scores are worked out when they are asked for.
            self.scores = mx.pad(self.scores, [(0, 0), (0, 0), (0, count)])

    def score_rows(self, keys: mx.array, new: int) -> None:
        """Let the last `new` rows of `keys` earn and give scores."""
        self.scores = self.policy.scorer.score(self.scores, keys, new)

    def keep_scores(self, index: mx.array) -> None:
        """Keep the scores of the rows of `index`; see `keep`."""
        self.scores = _take(self.scores[..., None], index)[..., 0]

    def keep(self, index: mx.array) -> None:
        """Keep the keys and values of the rows of `index`; the buffers shrink to them.

        index: [n] for all heads, or [B * H_kv, n] for each its own.
        """
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = _take(self.keys, index), _take(self.values, index)
        self._rows = index.shape[-1]

    def hold(self, array: mx.array) -> None:
        """Let `array` be worked out whenever the keys are, so that what nobody asks for does not pile up."""
        assert self.keys is not None
        self.keys = mx.depends(self.keys, [array])

    def fold(self, lost: mx.array, kept: mx.array, lost_scores: mx.array, kept_scores: mx.array) -> None:
        """Fold the values of rows `lost` into those of the rows `kept` whose keys resemble theirs most.

        By how much: the ratio of their scores, at most 1, which is CaM's merge probability (its Eq. 14), so that
        nothing is random. lost: [m], kept: [n], or [B * H_kv, m] and [B * H_kv, n]; the other two say where their
        scores are.
        """
        assert self.keys is not None
        assert self.values is not None
        lost_keys, kept_keys = (_unit(_take(self.keys, rows)) for rows in (lost, kept))
        nearest = mx.argmax(lost_keys @ kept_keys.swapaxes(-1, -2), axis=-1)
        scores = self.scores[..., None]
        theirs = mx.take_along_axis(_take(scores, kept_scores)[..., 0], nearest, axis=-1)
        earned = _take(scores, lost_scores)[..., 0] / mx.maximum(theirs, 1e-9)
        share = (nearest[..., None, :] == mx.arange(kept.shape[-1])[:, None]) * mx.clip(earned, 0, 1)[..., None, :]
        share = share.astype(self.values.dtype)
        folded = (_take(self.values, kept) + share @ _take(self.values, lost)) / (1 + share.sum(axis=-1, keepdims=True))
        index = _index(self.values, kept)
        self.values = mx.put_along_axis(
            self.values, mx.broadcast_to(index[..., None], (*index.shape, self.values.shape[-1])), folded, axis=2
        )

    def truncate(self, rows: int, position: int) -> None:
        """Forget rows from `rows` on; the next token is at `position`. A buffer much longer than that is let go."""
        self._rows = rows
        self.tokens_seen -= self.offset - position
        self.offset = position
        self.scores = self.scores[..., :rows]
        if self.keys is not None and self.values is not None and self.keys.shape[2] - rows > 2 * _STEP:
            self.keys, self.values = (mx.contiguous(held[..., :rows, :]) for held in (self.keys, self.values))

    def rotate(self, deltas: mx.array, rope: nn.Module, position: int) -> None:
        """Move row i's key by deltas[i] positions; the next token is at `position`. deltas: [rows] int."""
        assert self.keys is not None
        self.keys = moved(self.keys[..., : self._rows, :], deltas, rope)
        self.values = mx.contiguous(self.values[..., : self._rows, :]) if self.values is not None else None
        self.offset = position

    # Internals

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self._rows + keys.shape[2]
        if self.keys is None:
            self.scores = mx.zeros((*keys.shape[:2], 0))
        self.keys = self._grown(self.keys, keys, end)
        self.values = self._grown(self.values, values, end)
        self.keys[..., self._rows : end, :] = keys
        self.values[..., self._rows : end, :] = values
        self._rows = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _grown(self, buffer: mx.array | None, new: mx.array, end: int) -> mx.array:
        held = 0 if buffer is None else buffer.shape[2]
        if buffer is not None and end <= held:
            return buffer
        # Spare rows make decoding cheap, but never beyond the budget: the promised peak is budget + one pass.
        room = max(end, min(-(-end // _STEP) * _STEP, self.policy.budget))
        spare = mx.zeros((*new.shape[:2], room - self._rows, new.shape[3]), dtype=new.dtype)
        if buffer is None:
            return spare
        return mx.concatenate([buffer[..., : self._rows, :], spare], axis=2)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {keys.shape} and values {values.shape} differ in batch, heads or tokens")
        if self.head_dim is not None and keys.shape[3] != self.head_dim:
            raise ValueError(f"head_dim: keys are {keys.shape[3]} wide, the cache was built for {self.head_dim}")
        if keys.shape[0] != 1 and self.policy.scope != "head":
            other = "" if self.policy.trigger == "never" else ', or scope="head"'
            raise ValueError(
                f"batch of {keys.shape[0]}: with scope {self.policy.scope!r} a cache serves one stream; "
                f"use a cache for each{other}"
            )
        if keys.dtype != values.dtype:
            raise ValueError(f"keys are {keys.dtype}, values {values.dtype}")
        if self.keys is None or self.values is None:
            return
        for name, new, held in (("keys", keys, self.keys), ("values", values, self.values)):
            if new.dtype != held.dtype:
                raise ValueError(f"{name}: dtype {new.dtype} after {held.dtype}")
            if (*new.shape[:2], new.shape[3]) != (*held.shape[:2], held.shape[3]):
                raise ValueError(f"{name}: shape {new.shape} does not continue {held.shape}")


def _index(rows: mx.array, index: mx.array) -> mx.array:
    """`index` as [B, H_kv, n]."""
    return (
        mx.broadcast_to(index, (*rows.shape[:2], index.shape[-1]))
        if index.ndim == 1
        else index.reshape(*rows.shape[:2], -1)
    )


def _take(rows: mx.array, index: mx.array) -> mx.array:
    """Rows of [B, H_kv, R, D] by index [n], or [B * H_kv, n] for each head its own."""
    if index.ndim == 1:
        return rows[:, :, index]
    return mx.take_along_axis(rows, _index(rows, index)[..., None], axis=2)


def _unit(vectors: mx.array) -> mx.array:
    vectors = vectors.astype(mx.float32)
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)


# `mlx_lm.models.cache.load_prompt_cache` finds classes by name among its own.
vars(mlx_lm.models.cache).setdefault(EvictingCache.__name__, EvictingCache)
