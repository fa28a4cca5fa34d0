"""Several streams in one forward pass, a token a row: a layer's caches of all of them, and whether a model allows it.

Most often each stream has one row. One with a draft of its next tokens has several, and each sees those before it.
Projections and MLPs run over all rows at once: the weights, most of what a step reads, are read once for all.
Attention runs stream by stream over the buffers that each stream's caches have anyway: nothing is padded, masked or
copied, and what is stored, scored and evicted is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from kv.attention import flow, hook
from kv.caches.cache import EvictingCache
from kv.caches.masks import check_full_attention
from kv.config import KVCacheConfig
from kv.cpu import attention as cpu_attention
from kv.cpu.passes import wanting


def can_share_a_pass(model: Any) -> bool:
    """Whether `model` attends with mlx-lm's function, over just what its caches return.

    model: an mlx-lm model. Found out by a pass that is laid out and never computed.
    """
    streams = [KVCacheConfig(method="full").build(len(model.layers)) for _ in range(2)]
    try:
        hook.install(model, "attends_by_stream", _by_stream)
        layers = layers_of(streams, quick=False)
        with wanting("shapes"):
            model(mx.zeros((len(streams), 1), dtype=mx.int32), cache=layers)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return all(layer.attended for layer in layers)


class StreamsLayer(flow.AttendsRows):
    """One layer's caches of several streams, for a pass of a token a row.

    See `kv.attention.flow.AttendsRows`. Without `quick` attention is laid out as MLX does.
    """

    def __init__(
        self, caches: Sequence[EvictingCache], counts: Sequence[int], offset: mx.array, *, quick: bool
    ) -> None:
        super().__init__(caches, counts, offset, quick=quick)
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the new rows in, [B, H_kv, 1, D]; they are stored by `attend`, stream by stream."""
        self._new = keys, values
        return keys, values

    def attend(
        self,
        attention: hook.Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | None,
        **options: Any,
    ) -> mx.array:
        """Store each stream's new rows and let their queries attend to all it holds up to them: [B, H_q, 1, D].

        attention: the module's own. queries: [B, H_q, 1, D]. keys, values: what `update_and_fetch` has returned.
        Raises ValueError if they are not.
        """
        if self._new is None or keys is not self._new[0] or values is not self._new[1]:
            raise ValueError("the model attends to other keys and values than those it has cached")
        self.attended = True
        if self.quick and cpu_attention.serves(attention, keys.dtype, mask, options):
            return self._attend_on_cpu(queries, keys, values, scale)
        outputs = []
        for cache, rows in self._rows():
            held_keys, held_values = cache.update_and_fetch(_in_line(keys[rows]), _in_line(values[rows]))
            output = attention(
                _in_line(queries[rows]),
                held_keys,
                held_values,
                cache=cache,
                scale=scale,
                mask=mask if rows.stop - rows.start == 1 else _causal(mask, rows.stop - rows.start, cache),
                **options,
            )
            outputs.append(_in_line(output))
        return mx.concatenate(outputs)

    def _attend_on_cpu(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        for cache, rows in self._rows():
            cache.update_and_fetch(_in_line(keys[rows]), _in_line(values[rows]))
        mx.eval(queries, [cache.buffers for cache in self.caches])
        asked = np.array(queries, copy=False)[:, :, 0]
        outputs = []
        for cache, rows in self._rows():
            for place in range(rows.start, rows.stop):
                # Views: they have to be gone when the next row comes, or storing it would copy the buffer.
                held_keys, held_values = (
                    np.array(buffer, copy=False)[0, :, : cache.tokens_kept - (rows.stop - 1 - place)]
                    for buffer in cache.buffers
                )
                output, weights = cpu_attention.attend(asked[place], held_keys, held_values, scale)
                outputs.append(output)
            if cache.observes:
                cache.observe_mass(mx.array(weights.mean(axis=1))[None])
        return mx.array(np.stack(outputs))[:, :, None]

    def _rows(self) -> Iterator[tuple[EvictingCache, slice]]:
        start = 0
        for cache, count in zip(self.caches, self.counts, strict=True):
            yield cache, slice(start, start + count)
            start += count

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """The mask of a pass of one token, which sees everything. Raises ValueError for sliding windows."""
        check_full_attention(window_size)
        return mx.ones((1, 1), dtype=mx.bool_) if return_array else None


def layers_of(
    streams: Sequence[list[EvictingCache]], counts: Sequence[int] | None = None, *, quick: bool
) -> list[StreamsLayer]:
    """The caches of a pass: one a layer, from each stream's. counts (None: a row each), quick: see `StreamsLayer`.

    A stream that is scored by observed attention has one row: what a draft's pay could not be taken back.
    """
    counts = counts or [1] * len(streams)
    at = [caches[0].offset + place for caches, count in zip(streams, counts, strict=True) for place in range(count)]
    offset = mx.array(at)
    return [StreamsLayer(caches, counts, offset, quick=quick) for caches in zip(*streams, strict=True)]


def _in_line(rows: mx.array) -> mx.array:
    """[n, H, 1, D] as [1, H, n, D], or back."""
    return mx.swapaxes(rows, 0, 2) if rows.shape[0] > 1 or rows.shape[2] > 1 else rows


def _causal(mask: mx.array | None, count: int, cache: EvictingCache) -> mx.array | str:
    """The mask of a stream's `count` rows, once they are stored, of the kind that the model asked for."""
    if mask is None:
        return "causal"
    return mx.tri(count, cache.tokens_kept, cache.tokens_kept - count, dtype=mx.int32).astype(mx.bool_)


def _by_stream(module: ModuleType, attention: hook.Attention) -> hook.Attention:
    def attend(queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, **options: Any) -> mx.array:
        if isinstance(cache, StreamsLayer):
            # Each stream's cache with all hooks that the module has, whichever came first: it may want to see queries.
            return cache.attend(hook.attention_of(module), queries, keys, values, **options)
        return attention(queries, keys, values, cache=cache, **options)

    return attend
