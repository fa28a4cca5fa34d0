"""Several streams in one forward pass of a token each: a layer's caches of all of them, and whether a model allows it.

Projections and MLPs run over all rows at once: the weights, most of what a step reads, are read once for all.
Attention runs stream by stream over the buffers that each stream's caches have anyway: nothing is padded, masked or
copied, and what is stored, scored and evicted is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from kv.attention import flow, hook
from kv.caches.cache import EvictingCache
from kv.caches.masks import check_full_attention
from kv.config import KVCacheConfig
from kv.cpu import attention as cpu_attention
from kv.cpu.attention import Floats
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
    """One layer's caches of several streams, for a pass of one token each.

    caches: one a stream, in the order of the rows. offset: each stream's position, [B].
    quick: whether attention may be computed at once, on the CPU; else it is laid out as MLX does.
    """

    def __init__(self, caches: Sequence[EvictingCache], offset: mx.array, *, quick: bool) -> None:
        self.caches = caches
        self.offset = offset
        self._quick = quick
        self.attended = False
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
        """Store each stream's new row and let its query attend to all it holds: [B, H_q, 1, D].

        attention: the module's own. queries: [B, H_q, 1, D]. keys, values: what `update_and_fetch` has returned.
        Raises ValueError if they are not.
        """
        if self._new is None or keys is not self._new[0] or values is not self._new[1]:
            raise ValueError("the model attends to other keys and values than those it has cached")
        self.attended = True
        if self._quick and cpu_attention.serves(attention, keys.dtype, mask, options):
            return self._attend_on_cpu(queries, keys, values, scale)
        outputs = []
        for i, cache in enumerate(self.caches):
            row = slice(i, i + 1)
            held_keys, held_values = cache.update_and_fetch(keys[row], values[row])
            outputs.append(
                attention(queries[row], held_keys, held_values, cache=cache, scale=scale, mask=mask, **options)
            )
        return mx.concatenate(outputs)

    def attend_rows(self, queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats | None:
        """What `update_and_fetch` and `attend` do, at once and without MLX, but for the storing, which may wait."""
        if not self._quick or not cpu_attention.on_cpu(mx.float32):
            return None
        self.attended = True
        output, weights = flow.step(self.caches, queries, keys, values, scale)
        for i, cache in enumerate(self.caches):
            cache.update_and_fetch(mx.array(keys[i : i + 1]), mx.array(values[i : i + 1]))
            if cache.observes:
                cache.observe_mass(mx.array(weights[i].mean(axis=1))[None])
        return output

    def _attend_on_cpu(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        for i, cache in enumerate(self.caches):
            cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])
        mx.eval(queries, [cache.buffers for cache in self.caches])
        asked = np.array(queries, copy=False)[:, :, 0]
        outputs = []
        for i, cache in enumerate(self.caches):
            # Views: they have to be gone when the next row comes, or storing it would copy the buffer.
            held_keys, held_values = (
                np.array(buffer, copy=False)[0, :, : cache.tokens_kept] for buffer in cache.buffers
            )
            output, weights = cpu_attention.attend(asked[i], held_keys, held_values, scale)
            outputs.append(output)
            if cache.observes:
                cache.observe_mass(mx.array(weights.mean(axis=1))[None])
        return mx.array(np.stack(outputs))[:, :, None]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """The mask of a pass of one token, which sees everything. Raises ValueError for sliding windows."""
        check_full_attention(window_size)
        return mx.ones((1, 1), dtype=mx.bool_) if return_array else None


def layers_of(streams: Sequence[list[EvictingCache]], *, quick: bool) -> list[StreamsLayer]:
    """The caches of a pass: one a layer, from those of each stream. quick: see `StreamsLayer`."""
    offset = mx.array([caches[0].offset for caches in streams])
    return [StreamsLayer(caches, offset, quick=quick) for caches in zip(*streams, strict=True)]


def _by_stream(module: ModuleType, attention: hook.Attention) -> hook.Attention:
    def attend(queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, **options: Any) -> mx.array:
        if isinstance(cache, StreamsLayer):
            # Each stream's cache with all hooks that the module has, whichever came first: it may want to see queries.
            return cache.attend(hook.attention_of(module), queries, keys, values, **options)
        return attention(queries, keys, values, cache=cache, **options)

    return attend
