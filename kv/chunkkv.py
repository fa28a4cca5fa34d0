"""ChunkKV: a KV cache that keeps or evicts whole chunks and whole declared blocks under a fixed token budget.

Method: ChunkKV (Liu et al., arXiv:2502.00299) as adapted by the chunkkv source document: units are ranked by a pooled
per-token proxy, since a cache sees keys and values but not attention. What is done otherwise than there, and why:

- A forward pass attends to every stored row and all of its own; only what is *stored* shrinks, afterwards. Evicting
  first would shift the causal mask that mlx-lm aligns to the lower right.
- `offset` is the true position, never the number of kept rows: mlx-lm rotates by it before it calls the cache.
- The mask is None or the string "causal", which every layer aligns to its own rows.
- A chunk is a fixed span of positions, never re-partitioned over compacted rows and never cut to align heads.
- Collected attention decays and the newest tokens are spared, or the oldest tokens would win by age alone.
- The model's dtype is kept, and buffers shrink when rows leave: `nbytes` is what is held.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kv import scoring
from kv.config import ChunkKVOptions
from kv.group import CacheGroup

_STEP = 64


class ChunkKVCache:
    """One layer's cache, following mlx-lm's cache protocol. Build them with `KVCacheBuilder`.

    options: the method's options. group: the layers that decide together.
    head_dim: the key width to expect, checked at the first pass; None takes any.
    """

    def __init__(self, options: ChunkKVOptions, group: CacheGroup, head_dim: int | None = None) -> None:
        self.options = options
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
        return self.options.budget

    @property
    def chunk_size(self) -> int:
        """Tokens in an eviction unit of undeclared text."""
        return self.options.chunk_size

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
        return self.keys.nbytes + self.values.nbytes + self.scores.nbytes

    # mlx-lm's protocol

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store a pass and return every row to attend to: [B, H_kv, kept + N, D] keys and values.

        keys, values: [B, H_kv, N, D], keys already rotated; their widths may differ.
        Raises ValueError for shapes or dtypes that do not belong to this stream; nothing is stored then.
        """
        self._check(keys, values)
        count = keys.shape[2]
        if self.options.scope == "head" and self.keys is None:
            self.group.set_lanes(keys.shape[0] * keys.shape[1])
        all_keys, all_values = self._append(keys, values)
        self.offset += count
        self.tokens_seen += count
        if self is self.group.layers[-1]:
            self.group.settle(count)
            # Attention does not need the scores; without this edge their graph would grow until the next eviction.
            all_keys = mx.depends([all_keys], [layer.scores for layer in self.group.layers])[0]
        return all_keys, all_values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of a pass of N tokens. Raises ValueError for sliding windows, which this cache cannot serve."""
        if window_size is not None:
            raise ValueError(f"window_size: {window_size} is not supported; this cache serves full attention")
        if N == 1:
            return None
        if not return_array:
            return "causal"
        return mx.arange(self._rows, self._rows + N)[:, None] >= mx.arange(self._rows + N)[None]

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, mx.array]:
        """The arrays to evaluate. Saving a session is refused: `from_state` does not exist yet."""
        return self.keys, self.values, self.scores

    @state.setter
    def state(self, value: Any) -> None:
        raise ValueError("ChunkKVCache cannot be loaded from a saved state")

    def is_trimmable(self) -> bool:
        """False: mlx-lm may not cut rows off, since that could cut a block. See `CacheGroup.truncate`."""
        return False

    def size(self) -> int:
        """Tokens stored now."""
        return self._rows

    def empty(self) -> bool:
        """True while nothing was stored."""
        return self.keys is None

    # For the group

    def begin_scores(self, total: int) -> None:
        """Make room in the scores for rows up to `total`."""
        assert self.keys is not None
        shape = (*self.keys.shape[:2], total - self.scores.shape[-1])
        old = self.scores if self.scores.shape[-1] else mx.zeros((*shape[:2], 0))
        if self.options.score == "key_norm":
            fresh = scoring.key_norms(self.keys[..., old.shape[-1] : total, :])
        else:
            fresh = mx.zeros(shape)
            if not old.shape[-1]:
                # No row can score the very first token; the source document starts it at 1.
                fresh[..., 0] = 1.0
        self.scores = mx.concatenate([old, fresh], axis=-1)

    def score_rows(self, first: int, count: int, alive: mx.array | None) -> None:
        """Let rows [first, first + count) score the rows before them."""
        if self.options.score == "attn_mass":
            assert self.keys is not None
            self.scores = scoring.add_attention_mass(self.scores, self.keys, first, count, self.options.decay, alive)

    def keep(self, index: mx.array) -> None:
        """Keep the rows of `index`, [n] for all heads or [B * H_kv, n] a head each; the buffers shrink to them."""
        assert self.keys is not None
        assert self.values is not None
        if index.ndim == 1:
            self.keys, self.values = self.keys[:, :, index], self.values[:, :, index]
            self.scores = self.scores[:, :, index]
        else:
            index = index.reshape(*self.keys.shape[:2], -1)
            self.keys = mx.take_along_axis(self.keys, index[..., None], axis=2)
            self.values = mx.take_along_axis(self.values, index[..., None], axis=2)
            self.scores = mx.take_along_axis(self.scores, index, axis=2)
        self._rows = index.shape[-1]

    def truncate(self, rows: int, position: int) -> None:
        """Forget rows from `rows` on; the next token is at `position`."""
        self._rows = rows
        self.offset = position
        self.scores = self.scores[..., :rows]

    def rotate(self, deltas: mx.array, rope: nn.Module, position: int) -> None:
        """Move row i's key by deltas[i] positions; the next token is at `position`. deltas: [rows] int."""
        assert self.keys is not None
        batch, heads, _, width = self.keys.shape
        # Tokens in the batch axis: rope takes one offset a batch row.
        keys = self.keys[..., : self._rows, :].transpose(2, 0, 1, 3).reshape(-1, batch * heads, 1, width)
        moved = rope(keys, offset=deltas).reshape(-1, batch, heads, width).transpose(1, 2, 0, 3)
        self.keys = mx.contiguous(moved)
        self.values = mx.contiguous(self.values[..., : self._rows, :]) if self.values is not None else None
        self.offset = position

    # Internals

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self._rows + keys.shape[2]
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
        room = max(end, min(-(-end // _STEP) * _STEP, self.options.budget))
        spare = mx.zeros((*new.shape[:2], room - self._rows, new.shape[3]), dtype=new.dtype)
        if buffer is None:
            return spare
        return mx.concatenate([buffer[..., : self._rows, :], spare], axis=2)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {keys.shape} and values {values.shape} differ in batch, heads or tokens")
        if self.head_dim is not None and keys.shape[3] != self.head_dim:
            raise ValueError(f"head_dim: keys are {keys.shape[3]} wide, the cache was built for {self.head_dim}")
        if keys.shape[0] != 1 and self.options.scope != "head":
            raise ValueError(
                f"batch of {keys.shape[0]}: scope {self.options.scope!r} serves one stream a cache; "
                'use scope="head" or a cache for each'
            )
        if self.keys is None or self.values is None:
            return
        for name, new, held in (("keys", keys, self.keys), ("values", values, self.values)):
            if new.dtype != held.dtype:
                raise ValueError(f"{name}: dtype {new.dtype} after {held.dtype}")
            if (*new.shape[:2], new.shape[3]) != (*held.shape[:2], held.shape[3]):
                raise ValueError(f"{name}: shape {new.shape} does not continue {held.shape}")
