"""Attention in NumPy, against its definition; and where it stands in for the model's."""

from __future__ import annotations

import importlib

import mlx.core as mx
import numpy as np
import pytest

from kv import cpu_attention
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


def test_the_cpu_attends_by_itself_only_where_that_is_what_the_model_does() -> None:
    assert loaded(tiny_llama(width=16)).decodes_together
    hooked = importlib.import_module("mlx_lm.models.llama").scaled_dot_product_attention
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert cpu_attention.serves(hooked, mx.float32, None, {}) is on_cpu
    assert not cpu_attention.serves(lambda *_, **__: mx.zeros(1), mx.float32, None, {})
    assert not cpu_attention.serves(hooked, mx.bfloat16, None, {})
    assert not cpu_attention.serves(hooked, mx.float32, mx.zeros((1, 1)), {})
    assert not cpu_attention.serves(hooked, mx.float32, None, {"sinks": mx.zeros(4)})
