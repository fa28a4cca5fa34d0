"""Attention on the CPU in NumPy: two to three times as fast as MLX 0.32 does it on x86-64.

MLX's CPU build takes 17 ns for an exponential, where NumPy's vector code takes 1, and it reads keys once for each query
head, where heads that share keys can share the reading (`tests.benchmarks.attention`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.base import scaled_dot_product_attention

Floats = npt.NDArray[np.float32]
# The function that a model's module attends with; see `kv.attention.hook`.
Attention = Callable[..., mx.array]

# OpenBLAS multiplies matrices of about this many rows with kernels for small ones, which are 3 times as fast here.
_ROWS = 384
# Weights worked out at a time, in numbers: so many stay in the processor's cache.
_WEIGHTS = 1 << 18


def attend_instead(
    attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, options: dict[str, Any]
) -> mx.array | None:
    """What `attention`, however hooked, would return for one stream; None where that is not to be had here.

    queries: [1, H_q, N, D]. options: all that the model hands to attention.
    """
    rest = dict(options)
    scale, mask = rest.pop("scale", None), rest.pop("mask", None)
    count = queries.shape[2]
    if len(queries) > 1 or (mask is not None if count == 1 else not isinstance(mask, str) or mask != "causal"):
        return None
    if not serves(attention, keys.dtype, None, rest):
        return None
    mx.eval(queries, keys, values)
    asked, held_keys, held_values = (np.array(array, copy=False)[0] for array in (queries, keys, values))
    if count == 1:
        return mx.array(attend(asked[:, 0], held_keys, held_values, scale)[0])[None, :, None]
    return mx.array(attend_pass(asked, held_keys, held_values, scale))[None]


def on_cpu(dtype: mx.Dtype) -> bool:
    """Whether arrays of that type are worked on where NumPy is."""
    return dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def serves(attention: Attention, dtype: mx.Dtype, mask: object, options: dict[str, Any]) -> bool:
    """Whether `attend` does what `attention`, however hooked, does of its own: mlx-lm's, float32, nothing masked.

    options: what the model hands to attention beside its scale and mask.
    """
    return inspect.unwrap(attention) is scaled_dot_product_attention and mask is None and not options and on_cpu(dtype)


def attend(queries: Floats, keys: Floats, values: Floats, scale: float) -> tuple[Floats, Floats]:
    """One token's attention over R rows, its own included: the output, [H_q, D_v], and the weights, [H_kv, n, R].

    queries: [H_q, D]; n of them share a key head. keys: [H_kv, R, D]. values: [H_kv, R, D_v].
    """
    heads, rows, width = keys.shape
    grouped = (queries * np.float32(scale)).reshape(heads, -1, width)
    weights = np.empty((heads, grouped.shape[1], rows), dtype=np.float32)
    for start in range(0, rows, _ROWS):
        part = slice(start, min(start + _ROWS, rows))
        np.matmul(grouped, keys[:, part].swapaxes(1, 2), out=weights[..., part])
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values).reshape(len(queries), -1), weights


def attend_pass(queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats:
    """Attention of the N tokens that came last, each over the rows up to its own: [H_q, N, D_v].

    queries: [H_q, N, D]; n of them share a key head. keys: [H_kv, R, D]. values: [H_kv, R, D_v].
    """
    heads, rows, width = keys.shape
    count = queries.shape[1]
    grouped = (queries * np.float32(scale)).reshape(heads, -1, count, width)
    output = np.empty((*grouped.shape[:3], values.shape[-1]), dtype=np.float32)
    for start, stop in _slices(0, count, grouped.shape[1] * rows):
        seen = rows - count + stop
        for head in range(heads):
            weights = _weights(grouped[head, :, start:stop], keys[head, :seen])
            paid = weights.reshape(-1, seen) @ values[head, :seen]
            output[head, :, start:stop] = paid.reshape(-1, stop - start, paid.shape[-1])
    return output.reshape(len(queries), count, -1)


def attention_mass(keys: Floats, first: int, count: int, decay: float) -> Floats:
    """What `count` tokens from row `first` on, as queries, pay to the rows before them: [heads, R].

    keys: [heads, R, D]. What a token paid fades by `decay` with each that comes after it.
    """
    heads, rows, width = keys.shape
    mass = np.zeros((heads, rows), dtype=np.float32)
    # The first token of a stream sees no row.
    for start, stop in _slices(max(first, 1), first + count, rows):
        fading = (decay ** np.arange(first + count - 1 - start, first + count - 1 - stop, -1)).astype(np.float32)
        for head in range(heads):
            queries = keys[head, start:stop] * np.float32(width**-0.5)
            mass[head, : stop - 1] += fading @ _weights(queries[None], keys[head, : stop - 1])[0]
    return mass


def _weights(queries: Floats, keys: Floats) -> Floats:
    """[n, N, R]: the last query sees all R keys, the one before it all but the last, and so on.

    queries: [n, N, D], scaled. keys: [R, D].
    """
    shared, count, width = queries.shape
    weights: Floats = (queries.reshape(-1, width) @ keys.T).reshape(shared, count, -1)
    if count > 1:
        weights[..., weights.shape[-1] - count :] += _later(count)
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


@lru_cache(maxsize=8)
def _later(count: int) -> Floats:
    """[N, N]: -inf where the column is of a later token than the row, else 0."""
    return np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)


def _slices(start: int, stop: int, cost: int) -> Iterator[tuple[int, int]]:
    """Stretches of queries, whose weights are `cost` numbers each."""
    step = max(8, _WEIGHTS // cost)
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)
