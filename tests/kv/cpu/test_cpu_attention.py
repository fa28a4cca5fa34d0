"""Attention in NumPy, against its definition; and where it stands in for the model's."""

from __future__ import annotations

import importlib

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention as stock

from kv.caches.scoring import add_attention_mass
from kv.cpu import attention as cpu_attention
from tests.kv.feeding import tiny_llama
from tests.kv.streams import loaded


@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(9, 3, 1), (9, 3, 900), (4, 4, 384), (4, 1, 385), (6, 2, 70)])
def test_attention_on_the_cpu_is_attention(heads: int, kv_heads: int, rows: int) -> None:
    rng = np.random.default_rng(rows)
    queries, keys, values = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((heads, 16), (kv_heads, rows + 7, 16), (kv_heads, rows + 7, 24))
    )
    # Weights far apart, whose exponentials would overflow as they are.
    keys *= 100
    got, weights = cpu_attention.attend(queries, keys[:, :rows], values[:, :rows], 0.25)
    shared = heads // kv_heads
    for head in range(heads):
        logits = keys[head // shared, :rows].astype(np.float64) @ queries[head] * 0.25
        want = np.exp(logits - logits.max())
        want /= want.sum()
        np.testing.assert_allclose(weights[head // shared, head % shared], want, atol=1e-4)
        np.testing.assert_allclose(got[head], want @ values[head // shared, :rows], atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "count"),
    [(9, 3, 2, 2), (4, 4, 70, 70), (4, 1, 90, 7), (6, 2, 900, 257), (9, 3, 2000, 130)],
)
def test_a_pass_attends_to_what_came_before_each_token(heads: int, kv_heads: int, rows: int, count: int) -> None:
    rng = np.random.default_rng(rows)
    queries, keys, values = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((heads, count, 16), (kv_heads, rows, 16), (kv_heads, rows, 24))
    )
    keys *= 100
    got = cpu_attention.attend_pass(queries, keys, values, 0.25)
    assert got.shape == (heads, count, 24)
    for head in range(heads):
        logits = queries[head].astype(np.float64) @ keys[head // (heads // kv_heads)].T * 0.25
        logits[np.arange(rows - count, rows)[:, None] < np.arange(rows)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        want = weights / weights.sum(axis=1, keepdims=True) @ values[head // (heads // kv_heads)]
        np.testing.assert_allclose(got[head], want, atol=2e-4)


@pytest.mark.parametrize("with_numpy", [True, False])
@pytest.mark.parametrize(
    ("rows", "first", "count"), [(1, 0, 1), (9, 0, 9), (40, 17, 1), (300, 3, 290), (900, 600, 300)]
)
def test_keys_as_queries_score_token_by_token(rows: int, first: int, count: int, with_numpy: bool) -> None:
    rng = np.random.default_rng(rows)
    keys = rng.normal(size=(1, 2, rows, 16)).astype(np.float32) * 3
    scores = rng.random((1, 2, rows)).astype(np.float32)
    got = add_attention_mass(mx.array(scores), mx.array(keys), first, count, 0.9, with_numpy=with_numpy)
    want = scores.astype(np.float64)
    for token in range(first, first + count):
        want *= 0.9
        for head in range(2):
            if token:
                logits = keys[0, head, :token].astype(np.float64) @ keys[0, head, token] / 4
                weights = np.exp(logits - logits.max())
                want[0, head, :token] += weights / weights.sum()
    np.testing.assert_allclose(np.array(got), want, atol=1e-4)


@pytest.mark.parametrize("count", [1, 12])
def test_what_is_not_plain_attention_of_one_stream_is_left_to_mlx(count: int) -> None:
    queries, keys, values = (mx.random.normal((1, heads, rows, 8)) for heads, rows in ((4, count), (2, 40), (2, 40)))
    plain = {"scale": 0.3, "mask": "causal" if count > 1 else None}
    ours = cpu_attention.attend_instead(stock, queries, keys, values, plain)
    if mx.default_device() == mx.Device(mx.cpu):
        assert ours is not None
        theirs = stock(queries, keys, values, cache=None, **plain)
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-5)
    several = [mx.repeat(array, 2, axis=0) for array in (queries, keys, values)]
    halves = [array.astype(mx.bfloat16) for array in (queries, keys, values)]
    masked = {"scale": 0.3, "mask": mx.ones((count, 40), dtype=mx.bool_)}
    assert cpu_attention.attend_instead(stock, *several, plain) is None  # type: ignore[arg-type]
    assert cpu_attention.attend_instead(stock, *halves, plain) is None  # type: ignore[arg-type]
    assert cpu_attention.attend_instead(stock, queries, keys, values, masked) is None
    assert cpu_attention.attend_instead(stock, queries, keys, values, {**plain, "sinks": mx.zeros(4)}) is None
    assert cpu_attention.attend_instead(lambda *_, **__: queries, queries, keys, values, plain) is None


def test_the_cpu_attends_by_itself_only_where_that_is_what_the_model_does() -> None:
    assert loaded(tiny_llama(width=16)).decodes_together
    hooked = importlib.import_module("mlx_lm.models.llama").scaled_dot_product_attention
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert cpu_attention.serves(hooked, mx.float32, None, {}) is on_cpu
    assert not cpu_attention.serves(lambda *_, **__: mx.zeros(1), mx.float32, None, {})
    assert not cpu_attention.serves(hooked, mx.bfloat16, None, {})
    assert not cpu_attention.serves(hooked, mx.float32, mx.zeros((1, 1)), {})
    assert not cpu_attention.serves(hooked, mx.float32, None, {"sinks": mx.zeros(4)})
