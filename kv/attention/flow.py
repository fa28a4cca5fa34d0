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
from kv.cpu.passes import wanted


class AttendsRows:
    """A layer's caches of several streams, for a pass of a token a row.

    caches: one a stream, in the order of the rows. counts: how many rows each has, one after the other. offset: each
    row's position, [B]. quick: whether attention may be computed at once. attended: whether it has been.
    """

    def __init__(
        self, caches: Sequence[EvictingCache], counts: Sequence[int], offset: mx.array, *, quick: bool
    ) -> None:
        self.caches = caches
        self.counts = counts
        self.offset = offset
        self.quick = quick
        self.attended = False


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


def install_stack(model: Any) -> bool:
    """Let the few rows of a step go through all layers in one call; whether the layers are of a kind that can.

    Raises AttributeError for a model that is built in another way than mlx-lm's own.
    """
    from kv.cpu.stack import Stack

    inner: Any = model.model
    stack = Stack.of(model.layers)
    # Of a model that is spread over processes these are some of them.
    if stack is None or [id(layer) for layer in inner.layers] != [id(layer) for layer in model.layers]:
        return False
    inner.stack = stack
    if not getattr(type(inner), "takes_rows", False):
        inner.__class__ = _stacked(type(inner))
    return True


def remove_stack(model: Any) -> None:
    """Undo `install_stack`."""
    model.model.stack = None


def _stacked(kind: Any) -> type:
    class Stacked(kind):  # type: ignore[misc]
        takes_rows = True

        def __call__(self, inputs: Any, cache: Any = None, *rest: Any, **options: Any) -> Any:
            # Embeddings of the caller's own, say.
            asks_more = any(each is not None for each in (*rest, *options.values()))
            simple = self.stack is not None and cache is not None and not asks_more
            if simple and wanted() != "shapes" and (rows := _rows_of(inputs, cache)) is not None:
                return self.norm(_through(self.stack, self.embed_tokens(inputs), cache[0].offset, *rows))
            return kind.__call__(self, inputs, cache, *rest, **options)

    Stacked.__module__, Stacked.__qualname__, Stacked.__name__ = kind.__module__, kind.__qualname__, kind.__name__
    return Stacked


# Of streams and of rows that are one layer's.
_Rows = tuple[list[Sequence[EvictingCache]], Sequence[int]]


def _rows_of(inputs: Any, layers: Sequence[Any]) -> _Rows | None:
    """For each layer the streams' caches, and how many rows each has; None if this is no pass of single tokens."""
    first = layers[0]
    if isinstance(first, AttendsRows) and inputs.shape[1] == 1 and _at_once(first):
        for layer in layers:
            layer.attended = True
        caches, counts = [layer.caches for layer in layers], first.counts
    elif isinstance(first, EvictingCache) and inputs.shape == (1, 1):
        caches, counts = [[layer] for layer in layers], [1]
    else:
        return None
    floats = all(
        cache.empty() or cache.buffers[0].dtype == cache.buffers[1].dtype == mx.float32
        for layer in caches
        for cache in layer
    )
    return (caches, counts) if floats else None


def _through(
    stack: Any, x: Floats, offset: Any, layers: Sequence[Sequence[EvictingCache]], counts: Sequence[int]
) -> Floats:
    weighed = any(cache.observes for cache in layers[0])
    held = [_held(caches, counts) for caches in layers]
    positions = tuple(np.array(offset).reshape(-1).tolist())
    rows = np.array(x.reshape(len(x), -1))
    out, keys, values, weights = stack.run(rows, positions, held, _before(counts), weighed=weighed)
    del held
    for layer, caches in enumerate(layers):
        _store(caches, counts, keys[layer], values[layer], weights[layer] if weighed else ())
    result: Floats = out.reshape(x.shape)
    return result


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
        if not _at_once(cache):
            return None
        cache.attended = True
        output, weights = _step(cache.caches, cache.counts, queries, keys, values, scale)
        _store(cache.caches, cache.counts, keys, values, weights)
        return output
    if not isinstance(cache, EvictingCache) or len(queries) > 1:
        return None
    if queries.shape[2] == 1 and mask is None:
        output, weights = _step([cache], [1], queries, keys, values, scale)
        _store([cache], [1], keys, values, weights)
        return output
    if isinstance(mask, str) and mask == "causal":
        output = _attend_pass(queries[0], *cache.update_and_fetch(mx.array(keys), mx.array(values)), scale)[None]
        if cache.observes:
            cache.observe(mx.array(queries), scale)
        return output
    return None


def _at_once(layer: AttendsRows) -> bool:
    return layer.quick and cpu_attention.on_cpu(mx.float32)


def _step(
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

    output, weights = attending.attend_step(
        queries[:, :, 0], keys, values, _held(caches, counts), _before(counts), scale
    )
    return output[:, :, None], weights


def _held(caches: Sequence[EvictingCache], counts: Sequence[int]) -> list[tuple[Floats, Floats] | None]:
    """What each row's stream holds: views, which must be gone before a token is stored, or that copies the buffers."""
    held: list[tuple[Floats, Floats] | None] = []
    for cache, count in zip(caches, counts, strict=True):
        theirs = None
        if not cache.empty():
            keys, values = (np.array(buffer, copy=False)[0] for buffer in cache.buffers)
            theirs = keys[:, : cache.tokens_kept], values[:, : cache.tokens_kept]
        held += [theirs] * count
    return held


def _before(counts: Sequence[int]) -> list[int]:
    """How many rows right before each one are of its own stream."""
    return [place for count in counts for place in range(count)]


def _store(
    caches: Sequence[EvictingCache], counts: Sequence[int], keys: Floats, values: Floats, weights: Sequence[Floats]
) -> None:
    """Store rows, stream by stream: [B, H_kv, 1, D]. weights: what each has paid, [H_kv, n, R], if any is scored so."""
    start = 0
    for cache, count in zip(caches, counts, strict=True):
        rows = slice(start, start + count)
        cache.update_and_fetch(mx.array(keys[rows].swapaxes(0, 2)), mx.array(values[rows].swapaxes(0, 2)))
        if cache.observes:
            # Such a stream has one row: what a draft's pay could not be taken back.
            cache.observe_mass(mx.array(weights[start].mean(axis=1))[None])
        start += count


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
