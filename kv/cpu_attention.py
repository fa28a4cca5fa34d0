"""Attention of one new token, on the CPU, in NumPy: three times as fast as MLX 0.32 does it on x86-64.

MLX's CPU build takes 17 ns for an exponential, where NumPy's vector code takes 1, and it reads keys once for each query
head, where heads that share keys can share the reading. Measured with SmolLM2's shape (9 query heads, 3 key heads,
width 64) over 900 rows: 0.47 ms a layer in MLX, 0.13 ms here.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.base import scaled_dot_product_attention

from kv.hook import Attention

Floats = npt.NDArray[np.float32]

# OpenBLAS multiplies matrices of about this many rows with kernels for small ones, which are 3 times as fast here.
_ROWS = 384


def serves(attention: Attention, dtype: mx.Dtype, mask: object, options: dict[str, Any]) -> bool:
    """Whether `attend` does what `attention`, however hooked, does of its own: mlx-lm's, float32, nothing masked.

    options: what the model hands to attention beside its scale and mask.
    """
    return (
        inspect.unwrap(attention) is scaled_dot_product_attention
        and dtype == mx.float32
        and mask is None
        and not options
        and mx.default_device() == mx.Device(mx.cpu)
    )


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
