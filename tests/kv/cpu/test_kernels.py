"""Kernels for quantised weights, against MLX's own dequantising and NumPy."""

from __future__ import annotations

import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux's CPUs")
if sys.platform == "linux":
    from kv.cpu import attending, attention, kernels
    from kv.cpu.kernels import Table


def quantised(outputs: int, inputs: int, bits: int, group: int, dtype: mx.Dtype) -> tuple[Table, np.ndarray]:
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(outputs + inputs))
    q, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    wide = mx.dequantize(q, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    table = kernels.pack(np.array(q), np.array(scales), np.array(biases), bits=bits, group=group)
    return table, np.array(wide).astype(np.float64)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs", [64, 75])
def test_products_are_those_of_the_weights(bits: int, group: int, outputs: int, dtype: mx.Dtype) -> None:
    table, weight = quantised(outputs, 256, bits, group, dtype)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((kernels.MANY + 5, 256), dtype=np.float32)
    want = x.astype(np.float64) @ weight.T
    for count in (1, 2, 3, 4, 5, 7, 8, 13, kernels.MANY - 1, kernels.MANY, len(x)):
        got = table.times(x[:count].copy())
        assert np.abs(got - want[:count]).max() < 1e-6 * np.abs(want).max()
        if count < kernels.MANY:
            # A row's numbers do not depend on how many come with it.
            np.testing.assert_array_equal(got[-1:], table.times(x[count - 1 : count].copy()))
    rows = np.array([[0, outputs - 1], [33, 5]])
    np.testing.assert_allclose(table.rows(rows), weight[rows], rtol=1e-6, atol=1e-6)


def test_what_has_no_kernel_or_is_not_finite_is_refused() -> None:
    q, scales, biases = (np.array(a) for a in mx.quantize(mx.ones((32, 64)), group_size=32, bits=4))
    for bits, group in ((2, 32), (6, 32), (4, 16)):
        with pytest.raises(ValueError, match=f"{bits} bits in groups of {group}"):
            kernels.pack(q, scales, biases, bits=bits, group=group)
    for bad in (np.nan, np.inf):
        broken = scales.copy()
        broken[3, 1] = bad
        with pytest.raises(ValueError, match="not finite"):
            kernels.pack(q, broken, biases, bits=4, group=32)
        with pytest.raises(ValueError, match="not finite"):
            kernels.pack(q, scales, broken, bits=4, group=32)


def test_threads_that_come_at_once_get_their_own_products() -> None:
    table, weight = quantised(512, 256, 4, 32, mx.float16)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = np.random.default_rng(seed).standard_normal((3, 256), dtype=np.float32)
            for _ in range(200):
                np.testing.assert_allclose(table.times(x), x @ weight.T, atol=1e-4)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_exponentials_and_what_is_made_of_them() -> None:
    rng = np.random.default_rng(1)
    gate = np.concatenate([rng.uniform(-30, 30, (9, 200)), [[-1e4, -88, -87, 0, 88, 1e4, 1e-9, -1e-9] * 25]])
    gate, up = gate.astype(np.float32), rng.standard_normal((10, 200), dtype=np.float32)
    with np.errstate(over="ignore"):
        want = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(kernels.swiglu(gate, up), want, rtol=1e-5, atol=1e-30)
    both = np.concatenate([gate, up], axis=1)
    np.testing.assert_array_equal(kernels.swiglu(both[:, :200], both[:, 200:]), kernels.swiglu(gate, up))


@pytest.mark.parametrize(("heads", "shared", "width", "out_width"), [(3, 3, 64, 64), (2, 1, 16, 48), (1, 7, 128, 128)])
def test_attention_is_numpys(heads: int, shared: int, width: int, out_width: int) -> None:
    rng = np.random.default_rng(2)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    lengths = [0, 1, 750]
    buffers = [(normal(heads, length + 9, width), normal(heads, length + 9, out_width)) for length in lengths]
    held = [(k[:, :length], v[:, :length]) for (k, v), length in zip(buffers, lengths, strict=True)]
    queries, keys = normal(3, heads * shared, width), normal(3, heads, 1, width)
    values = normal(3, heads, 1, out_width)
    out, weights = attending.attend_step(queries, keys, values, held, [0, 0, 0], 0.2)
    for i, (k, v) in enumerate(held):
        rows = np.concatenate([k, keys[i]], axis=1), np.concatenate([v, values[i]], axis=1)
        want, paid = attention.attend(queries[i], *rows, 0.2)
        np.testing.assert_allclose(out[i], want, atol=2e-6)
        np.testing.assert_allclose(weights[i], paid, atol=2e-6)
        alone, _ = attending.attend_step(queries[i : i + 1], keys[i : i + 1], values[i : i + 1], [held[i]], [0], 0.2)
        np.testing.assert_array_equal(alone[0], out[i])
    # Three tokens of one stream: as if the first two had been stored, to the last bit.
    run, _ = attending.attend_step(queries, keys, values, [held[2]] * 3, [0, 1, 2], 0.2)
    for i in range(3):
        k, v = (np.concatenate([rows, *new[:i]], axis=1) for rows, new in zip(held[2], (keys, values), strict=True))
        alone, _ = attending.attend_step(queries[i : i + 1], keys[i : i + 1], values[i : i + 1], [(k, v)], [0], 0.2)
        np.testing.assert_array_equal(alone[0], run[i])
    for count in (2, 31, 64, 75):
        queries = normal(heads * shared, count, width)
        for k, v in ((normal(heads, count, width), normal(heads, count, out_width)), held[2]):
            got = attending.attend_pass(queries, k, v, 0.2)
            if got is not None:
                np.testing.assert_allclose(got, attention.attend_pass(queries, k, v, 0.2), atol=2e-6)
