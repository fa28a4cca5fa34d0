"""Attention for models whose activations are NumPy arrays (`kv.cpu.layers`): where they meet caches, which are MLX's.

Each layer's attention is handed its cache in a shell that takes NumPy's keys and values, and a hook on the attention
function takes the shell off again. Over this package's caches attention is computed in NumPy, as
`kv.attention.observed` does; for every other cache, and for every mask but the plain ones, it is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from kv.attention import hook
from kv.caches.cache import EvictingCache
from kv.cpu import attention as cpu_attention
from kv.cpu.attention import Floats


class AttendsRows:
    """A cache that attends by itself, such as that of several streams in one pass, a token a row."""

    def attend_rows(self, queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats | None:
        """Store [B, H_kv, 1, D] and attend: [B, H_q, 1, D_v]. None, and nothing stored, where that is not done here."""
        raise NotImplementedError


class _Shell:
    """A cache as the layers see it, for one pass. What they store waits for the attention function."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def offset(self) -> Any:
        return self.cache.offset

    def update_and_fetch(self, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        return keys, values


def install(model: Any) -> None:
    """Let NumPy arrays flow through the attention of `model`, and of all of its family.

    Raises ValueError if a layer's attention is not mlx-lm's function.
    """
    hook.install(model, "takes_numbers", _taking_numbers)
    hook.install(model, "takes_numbers", _taking_swiglu, name="swiglu", optional=True)
    for layer in model.layers:
        attention = layer.self_attn
        if not getattr(type(attention), "takes_numbers", False):
            attention.__class__ = _shelled(type(attention))


def _shelled(kind: Any) -> type:
    class Shelled(kind):  # type: ignore[misc]
        takes_numbers = True

        def __call__(self, x: Any, mask: Any = None, cache: Any = None, **options: Any) -> Any:
            if cache is not None and isinstance(x, np.ndarray):
                cache = _Shell(cache)
            return kind.__call__(self, x, mask, cache, **options)

    Shelled.__module__, Shelled.__qualname__, Shelled.__name__ = kind.__module__, kind.__qualname__, kind.__name__
    return Shelled


def _taking_numbers(module: ModuleType, attention: hook.Attention) -> hook.Attention:
    def attend(queries: Any, keys: Any, values: Any, cache: Any = None, **options: Any) -> Any:
        if not isinstance(queries, np.ndarray):
            return attention(queries, keys, values, cache=cache, **options)
        stored = isinstance(cache, _Shell)
        if isinstance(cache, _Shell):
            cache = cache.cache
        rest = dict(options)
        scale, mask = rest.pop("scale"), rest.pop("mask", None)
        if stored and cpu_attention.serves(attention, mx.float32, None, rest):
            output = _attend(queries, keys, values, cache, mask, scale)
            if output is not None:
                return output
        arrays = [mx.array(array) for array in (queries, keys, values)]
        if stored:
            arrays[1:] = cache.update_and_fetch(*arrays[1:])
        return np.array(hook.attention_of(module)(*arrays, cache=cache, **options))

    return attend


def _attend(queries: Floats, keys: Floats, values: Floats, cache: Any, mask: Any, scale: float) -> Floats | None:
    """Store a pass and attend, for the caches and masks that are known; None, and nothing stored, for others."""
    if mask is None and isinstance(cache, AttendsRows):
        return cache.attend_rows(queries, keys, values, scale)
    if not isinstance(cache, EvictingCache) or len(queries) > 1:
        return None
    if queries.shape[2] == 1 and mask is None:
        output, _ = step([cache], [1], queries, keys, values, scale)
        cache.update_and_fetch(mx.array(keys), mx.array(values))
    elif isinstance(mask, str) and mask == "causal":
        output = _attend_pass(queries[0], *cache.update_and_fetch(mx.array(keys), mx.array(values)), scale)[None]
    else:
        return None
    if cache.observes:
        cache.observe(mx.array(queries), scale)
    return output


def step(
    caches: Sequence[EvictingCache],
    counts: Sequence[int],
    queries: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
) -> tuple[Floats, list[Floats]]:
    """Attention of tokens that have yet to be stored: [B, H_q, 1, D_v]; weights: [H_kv, n, R] each.

    counts: how many of the B rows are of each stream, one after the other; a token sees those of its stream before it.
    So nothing waits for MLX: tokens are stored when everything else is, after the pass.
    """
    from kv.cpu import attending

    held: list[tuple[Floats, Floats]] = []
    for cache, count in zip(caches, counts, strict=True):
        if cache.empty():
            theirs = keys[0, :, :0], values[0, :, :0]
        else:
            # Views, gone before the token is stored: else that would copy the buffers.
            held_keys, held_values = (np.array(buffer, copy=False)[0] for buffer in cache.buffers)
            theirs = held_keys[:, : cache.tokens_kept], held_values[:, : cache.tokens_kept]
        held += [theirs] * count
    before = [place for count in counts for place in range(count)]
    output, weights = attending.attend_step(queries[:, :, 0], keys, values, held, before, scale)
    return output[:, :, None], weights


def _attend_pass(queries: Floats, keys: mx.array, values: mx.array, scale: float) -> Floats:
    from kv.cpu import attending

    mx.eval(keys, values)
    held_keys, held_values = (np.array(array, copy=False)[0] for array in (keys, values))
    output = attending.attend_pass(queries, held_keys, held_values, scale)
    return cpu_attention.attend_pass(queries, held_keys, held_values, scale) if output is None else output


def _taking_swiglu(_module: ModuleType, swiglu: Any) -> Any:
    from kv.cpu import kernels

    def activate(gate: Any, up: Any) -> Any:
        if not isinstance(gate, np.ndarray):
            return swiglu(gate, up)
        width = gate.shape[-1]
        return kernels.swiglu(gate.reshape(-1, width), up.reshape(-1, width)).reshape(gate.shape)

    return activate
