"""Several streams through one layer at once, each with an evicting cache of its own: what mlx-lm's batches run on.

Streams keep different numbers of rows, so rows are padded on the left for the pass and no longer: what is stored,
scored and evicted is each stream's own, and comes out as if it had run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kv.caches.layer import Stream
from kv.caches.masks import check_full_attention

# Tokens of a prompt that is not padded.
_ALL = 2**62


class BatchEvictingCache:
    """One layer's caches of a batch, following mlx-lm's protocol for batches. Made by `EvictingCache.merge`.

    caches: one a stream, in batch order.
    """

    def __init__(self, caches: Sequence[Stream]) -> None:
        self.caches = list(caches)
        # Tokens of the prompts that are being read, a stream each, while they are padded on the right; else None.
        self._unread: list[int] | None = None
        self._shown = [0] * len(self.caches)

    @property
    def offset(self) -> mx.array:
        """Each stream's true position, [B]."""
        return mx.array([cache.offset for cache in self.caches])

    @property
    def nbytes(self) -> int:
        """Bytes held by all streams."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def observes(self) -> bool:
        """Whether the streams want to see queries."""
        return any(cache.observes for cache in self.caches)

    # A pass

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store a pass, each stream its part, and return every row to attend to: [B, H_kv, longest + N, D].

        keys, values: [B, H_kv, N, D]; of a prompt padded on the right, the padding is not stored.
        Raises ValueError if B is not the number of streams.
        """
        if keys.shape[0] != len(self.caches):
            raise ValueError(f"batch of {keys.shape[0]}: {len(self.caches)} streams are cached")
        count = keys.shape[2]
        longest = max(cache.tokens_kept for cache in self.caches)
        all_keys, all_values = [], []
        self._shown = [count] * len(self.caches)
        if self._unread is not None:
            self._shown = [min(count, left) for left in self._unread]
            self._unread = [left - shown for left, shown in zip(self._unread, self._shown, strict=True)]
        for i, (cache, shown) in enumerate(zip(self.caches, self._shown, strict=True)):
            new_keys, new_values = keys[i : i + 1], values[i : i + 1]
            pad = [(0, 0), (0, 0), (longest - cache.tokens_kept, 0), (0, 0)]
            stored_keys, stored_values, _ = cache.arrays
            if stored_keys is not None and stored_values is not None:
                new_keys = mx.concatenate([stored_keys, new_keys], axis=2)
                new_values = mx.concatenate([stored_values, new_values], axis=2)
            all_keys.append(mx.pad(new_keys, pad))
            all_values.append(mx.pad(new_values, pad))
            if shown:
                cache.update_and_fetch(keys[i : i + 1, :, :shown], values[i : i + 1, :, :shown])
        return mx.concatenate(all_keys), mx.concatenate(all_values)

    def observe(self, queries: mx.array, scale: float) -> None:
        """Show each stream its queries of the pass that has just been stored; see `kv.attention.observed`."""
        for i, (cache, shown) in enumerate(zip(self.caches, self._shown, strict=True)):
            if shown:
                cache.observe(queries[i : i + 1, :, :shown], scale)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The mask of a pass of N tokens, [B, 1, N, longest + N]. Raises ValueError for sliding windows."""
        check_full_attention(window_size)
        kept = mx.array([cache.tokens_kept for cache in self.caches])[:, None, None, None]
        longest = max(cache.tokens_kept for cache in self.caches)
        columns = mx.arange(longest + N)
        causal = columns <= mx.arange(longest, longest + N)[:, None]
        return causal & (columns >= longest - kept)

    # The batch

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce prompts padded on the right to one length. lengths: tokens of each.

        Raises ValueError for padding on the left, which would be stored as text.
        """
        if left_padding is not None and any(left_padding):
            raise ValueError(f"left_padding: {list(left_padding)} is not supported; pad prompts on the right")
        if right_padding is not None and any(right_padding):
            if lengths is None:
                raise ValueError("lengths: needed to tell a prompt from its padding")
            self._unread = list(lengths)

    def finalize(self) -> None:
        """The padded prompts have been read."""
        self._unread = None

    def filter(self, batch_indices: Any) -> None:
        """Keep these streams only, in this order."""
        indices = [int(index) for index in batch_indices]
        self.caches = [self.caches[i] for i in indices]
        self._shown = [self._shown[i] for i in indices]
        if self._unread is not None:
            self._unread = [self._unread[i] for i in indices]

    def extend(self, other: BatchEvictingCache) -> None:
        """Take the streams of another batch in, after the own."""
        if self._unread is not None or other._unread is not None:
            ours, theirs = (batch._unread or [_ALL] * len(batch.caches) for batch in (self, other))
            self._unread = ours + theirs
        self.caches += other.caches
        self._shown += other._shown

    def extract(self, idx: int) -> Any:
        """A copy of one stream's cache; the stream may go on in the batch."""
        return self.caches[idx].copied()

    # The rest of mlx-lm's protocol

    @property
    def state(self) -> list[Any]:
        """The arrays to evaluate."""
        return [cache.arrays for cache in self.caches]

    def is_trimmable(self) -> bool:
        """False, as for one stream."""
        return False

    def size(self) -> int:
        """Tokens stored by the stream that keeps most."""
        return max((cache.tokens_kept for cache in self.caches), default=0)

    def empty(self) -> bool:
        """True while no stream has stored anything."""
        return all(cache.empty() for cache in self.caches)
