"""Attention kernels: what `kv.cpu.attention` does in NumPy, on all threads and without its copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import carray

from kv.cpu import pool
from kv.cpu.kernels import Floats, at, exp, floats_at, gemm, sgemm

# Tokens of a pass that attend together: times heads that share keys, rows of one product.
_TOGETHER = 32
# Words a stream takes in the table that a step's kernel reads: see `stream_table`.
STREAM = 9


@lru_cache(maxsize=8)
def step_kernel(shared: int, width: int, out_width: int) -> int:
    """The address of the kernel for one token of each of some streams: a chunk is a stream's key head.

    shared: query heads of a key head. width, out_width: of keys and values. Known when it is compiled, they cost half.
    """

    @numba.cfunc(pool.KERNEL, cache=True, fastmath={"reassoc", "contract"}, error_model="numpy")
    def attend_step(arguments: Any, chunk: int, _thread: int) -> None:
        given = carray(arguments, 8)
        heads = given[2]
        number, head = chunk // heads, chunk % heads
        stream = carray(arguments, 8 + (number + 1) * STREAM)[8 + number * STREAM :]
        held = stream[2]
        rows = held + stream[8] + 1
        first = chunk * shared
        queries = carray(floats_at(given[0] + first * width * 4), (shared, width))
        out = carray(floats_at(given[1] + first * out_width * 4), (shared, out_width))
        weights = carray(floats_at(stream[7] + head * shared * rows * 4), (shared, rows))
        keys, values = stream[0] + head * stream[1], stream[3] + head * stream[4]
        # Of the tokens of this pass, the stream's first.
        new_keys = stream[5] - stream[8] * heads * width * 4 + head * width * 4
        new_values = stream[6] - stream[8] * heads * out_width * 4 + head * out_width * 4
        # One loop for all rows: so a row counts for the same to the last bit, whether it was held or came in this pass.
        for r in range(rows):
            key = carray(
                floats_at(keys + r * width * 4 if r < held else new_keys + (r - held) * heads * width * 4), width
            )
            for j in range(shared):
                total = np.float32(0)
                for k in range(width):
                    total += queries[j, k] * key[k]
                weights[j, r] = total
        for j in range(shared):
            _softmax(weights[j], rows)
            for k in range(out_width):
                out[j, k] = np.float32(0)
        for r in range(rows):
            value = carray(
                floats_at(values + r * out_width * 4 if r < held else new_values + (r - held) * heads * out_width * 4),
                out_width,
            )
            for j in range(shared):
                weight = weights[j, r]
                for k in range(out_width):
                    out[j, k] += weight * value[k]

    return int(attend_step.address)


@numba.njit(inline="always")
def _softmax(row: Any, count: int) -> None:
    # Four chains: the processor is done with one comparison long after it could begin the next.
    a = b = c = d = row[0]
    for r in range(0, count - 3, 4):
        a, b, c, d = max(a, row[r]), max(b, row[r + 1]), max(c, row[r + 2]), max(d, row[r + 3])
    for r in range(count - count % 4, count):
        a = max(a, row[r])
    most = max(max(a, b), max(c, d))
    total = np.float32(0)
    for r in range(count):
        row[r] = exp(row[r] - most)
        total += row[r]
    share = np.float32(1) / total
    for r in range(count):
        row[r] *= share


@numba.njit(nogil=True, cache=True)
def _run_step(
    words: int, kernel: int, queries: Floats, out: Floats, keys: Floats, values: Floats, weights: Any, table: Any
) -> None:
    """table: [streams, STREAM]: addresses, strides and counts are filled in, the rest is not."""
    streams, heads, width = keys.shape[0], keys.shape[1], keys.shape[3]
    out_width = values.shape[3]
    given = np.empty(8 + streams * STREAM, dtype=np.int64)
    given[0], given[1], given[2] = at(queries), at(out), heads
    start = 0
    for i in range(streams):
        stream = given[8 + i * STREAM :]
        for k in range(5):
            stream[k] = table[i, k]
        stream[8] = table[i, 8]
        stream[5] = at(keys) + i * heads * width * 4
        stream[6] = at(values) + i * heads * out_width * 4
        stream[7] = at(weights) + start * 4
        start += queries.shape[1] * (table[i, 2] + table[i, 8] + 1)
    pool.run(words, kernel, at(given), streams * heads)


def stream_table(held: Sequence[tuple[Floats, Floats] | None], before: Sequence[int]) -> Any:
    """[S, STREAM]: addresses, strides and counts of what is held, for the kernel; the rest of it is to be filled in.

    held, before: see `attend_step`; None for a stream that holds nothing. Raises ValueError for rows that lie apart.
    """
    table = np.zeros((len(held), STREAM), dtype=np.int64)
    for i, pair in enumerate(held):
        table[i, 8] = before[i]
        if pair is None:
            continue
        for array, start in zip(pair, (0, 3), strict=True):
            if array.dtype != np.float32 or array.strides[1:] != (array.shape[2] * 4, 4):
                raise ValueError("rows of keys and values are not floats that lie one after the other")
            table[i, start] = array.__array_interface__["data"][0]
            table[i, start + 1] = array.strides[0]
        table[i, 2] = pair[0].shape[1]
    return table


def attend_step(
    queries: Floats,
    keys: Floats,
    values: Floats,
    held: Sequence[tuple[Floats, Floats] | None],
    before: Sequence[int],
    scale: float,
) -> tuple[Floats, list[Floats]]:
    """Single tokens over what their streams hold and their own: [S, H_q, D_v], and each one's weights, [H_kv, n, R].

    queries: [S, H_q, D]; n of them share a key head. keys, values: [S, H_kv, 1, D], the tokens' own. held: what each
    one's stream had before the pass, keys and values [H_kv, rows, D], or None for nothing. before: how many tokens
    right before each one are of its own stream: it sees those too.
    """
    streams, heads, width = queries.shape
    scaled = queries * np.float32(scale)
    table = stream_table(held, before)
    key_heads = keys.shape[1]
    counts = (table[:, 2] + table[:, 8] + 1).tolist()
    weights = np.empty(heads * sum(counts), dtype=np.float32)
    out = np.empty((streams, heads, values.shape[3]), dtype=np.float32)
    shared = pool.shared()
    own = np.ascontiguousarray(keys), np.ascontiguousarray(values)
    with shared.lock:
        kernel = step_kernel(heads // key_heads, width, values.shape[3])
        _run_step(shared.words, kernel, scaled, out, *own, weights, table)
    each, start = [], 0
    for rows in counts:
        each.append(weights[start : start + heads * rows].reshape(key_heads, heads // key_heads, rows))
        start += heads * rows
    return out, each


@lru_cache(maxsize=1)
def _pass_kernel() -> int:
    """The address of the kernel for a pass: a chunk is `_TOGETHER` of its tokens, for one key head."""
    together = _TOGETHER

    @numba.cfunc(pool.KERNEL, cache=True, fastmath={"reassoc", "contract"}, error_model="numpy")
    def attend_pass(arguments: Any, chunk: int, thread: int) -> None:
        given = carray(arguments, 16)
        shared, width, out_width, rows, count = given[4], given[5], given[6], given[7], given[8]
        head, block = chunk % given[9], chunk // given[9]
        # The last tokens, which see most, first.
        start = max(0, count - (block + 1) * together)
        stop = count - block * together
        seen = rows - count + stop
        size = stop - start
        scratch = given[12] + thread * given[13]
        asked = carray(floats_at(scratch), (shared * size, width))
        paid = carray(floats_at(scratch + shared * together * width * 4), (shared * size, out_width))
        weights_at = scratch + shared * together * (width + out_width) * 4
        weights = carray(floats_at(weights_at), (shared * size, seen))
        for j in range(shared):
            for i in range(size):
                query = carray(floats_at(given[0] + ((head * shared + j) * count + start + i) * width * 4), width)
                for k in range(width):
                    asked[j * size + i, k] = query[k]
        keys, values = given[1] + head * given[10], given[2] + head * given[11]
        sgemm(given[14], 1, shared * size, seen, width, scratch, width, keys, width, weights_at, seen)
        for j in range(shared):
            for i in range(size):
                visible = seen - size + i + 1
                _softmax(weights[j * size + i], visible)
                for r in range(visible, seen):
                    weights[j * size + i, r] = np.float32(0)
        paid_at = scratch + shared * together * width * 4
        sgemm(given[14], 0, shared * size, out_width, seen, weights_at, seen, values, out_width, paid_at, out_width)
        for j in range(shared):
            for i in range(size):
                out = carray(floats_at(given[3] + ((head * shared + j) * count + start + i) * out_width * 4), out_width)
                for k in range(out_width):
                    out[k] = paid[j * size + i, k]

    return int(attend_pass.address)


@numba.njit(nogil=True, cache=True)
def _run_pass(
    words: int, kernel: int, queries: Floats, keys: Any, values: Any, out: Floats, scratch: Floats, address: int
) -> None:
    heads, rows, width = keys.shape
    count = queries.shape[1]
    given = np.empty(16, dtype=np.int64)
    given[0], given[1], given[2], given[3] = at(queries), at(keys), at(values), at(out)
    given[4], given[5], given[6] = queries.shape[0] // heads, width, values.shape[2]
    given[7], given[8], given[9], given[10], given[11] = rows, count, heads, keys.strides[0], values.strides[0]
    given[12], given[13], given[14] = at(scratch), scratch.strides[0], address
    pool.run(words, kernel, at(given), heads * ((count + _TOGETHER - 1) // _TOGETHER))


def attend_pass(queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats | None:
    """See `kv.cpu.attention.attend_pass`. None where there is no BLAS for it, or rows lie apart."""
    address = gemm()
    heads, rows, width = keys.shape
    if not address or any(array.strides[1:] != (array.shape[2] * 4, 4) for array in (keys, values)):
        return None
    count, out_width = queries.shape[1], values.shape[2]
    scaled = queries * np.float32(scale)
    out = np.empty((len(queries), count, out_width), dtype=np.float32)
    shared = pool.shared()
    with shared.lock:
        scratch = shared.scratch(len(queries) // heads * _TOGETHER * (rows + width + out_width))
        _run_pass(shared.words, _pass_kernel(), np.ascontiguousarray(scaled), keys, values, out, scratch, address)
    return out
