"""Attention for models whose activations are NumPy arrays (`kv.cpu.layers`): where they meet caches, which are MLX's.

Each layer's attention is handed its cache in a shell that takes NumPy's keys and values, and a hook on the attention
function takes the shell off again. Over this package's caches attention is computed in NumPy, as
`kv.attention.observed` does; for every other cache, and for every mask but the plain ones, it is the model's own.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from kv.attention import hook
from kv.caches.cache import EvictingCache
from kv.cpu import attention as cpu_attention
from kv.cpu.attention import Floats


@runtime_checkable
class AttendsRows(Protocol):
    """A cache that attends by itself, such as that of several streams in a pass of a token each."""

    def attend_rows(self, queries: Floats, scale: float) -> Floats | None:
        """Attention of [B, H_q, 1, D]; None where it is not to be had here."""


class _Shell:
    """A cache as the layers see it, for one pass through one layer."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.stored: tuple[Any, Any] | None = None

    @property
    def offset(self) -> Any:
        return self.cache.offset

    def update_and_fetch(self, keys: Floats, values: Floats) -> tuple[Any, Any]:
        self.stored = self.cache.update_and_fetch(mx.array(keys), mx.array(values))
        return self.stored


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
        if isinstance(cache, _Shell):
            cache = cache.cache
        rest = dict(options)
        scale, mask = rest.pop("scale"), rest.pop("mask", None)
        plain = cpu_attention.serves(attention, mx.float32, None, rest)
        if plain and mask is None and isinstance(cache, AttendsRows):
            output = cache.attend_rows(queries, scale)
            if output is not None:
                return output
        if plain and isinstance(cache, EvictingCache) and len(queries) == 1 and _sees_what_came(mask, queries.shape[2]):
            return _attend(queries, keys, values, cache, scale)
        arrays = (mx.array(array) if isinstance(array, np.ndarray) else array for array in (queries, keys, values))
        return np.array(hook.attention_of(module)(*arrays, cache=cache, **options))

    return attend


def _sees_what_came(mask: Any, count: int) -> bool:
    return mask is None if count == 1 else isinstance(mask, str) and mask == "causal"


def _attend(queries: Floats, keys: mx.array, values: mx.array, cache: EvictingCache, scale: float) -> Floats:
    mx.eval(keys, values)
    held_keys, held_values = (np.array(array, copy=False)[0] for array in (keys, values))
    if queries.shape[2] == 1:
        output = cpu_attention.attend(queries[0, :, 0], held_keys, held_values, scale)[0][None, :, None]
    else:
        output = cpu_attention.attend_pass(queries[0], held_keys, held_values, scale)[None]
    # The views go first: storing the next row would copy a buffer that is looked at.
    del held_keys, held_values
    if cache.observes:
        cache.observe(mx.array(queries), scale)
    return output


def _taking_swiglu(_module: ModuleType, swiglu: Any) -> Any:
    from kv.cpu import kernels

    def activate(gate: Any, up: Any) -> Any:
        if not isinstance(gate, np.ndarray):
            return swiglu(gate, up)
        width = gate.shape[-1]
        return kernels.swiglu(gate.reshape(-1, width), up.reshape(-1, width)).reshape(gate.shape)

    return activate
