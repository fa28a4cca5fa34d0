"""Quantised models on the CPU, against mlx-lm's own dequantised to float32."""

from __future__ import annotations

import copy
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from kv.caches.policy import Score
from kv.config import KVCacheConfig
from kv.cpu.passes import wanting
from kv.model import loading, oncpu
from kv.model.streams import layers_of
from kv.session.session import NewBlock, Session
from kv.session.together import step_together
from tests.kv.attention.test_observed import FAMILIES, tiny
from tests.kv.streams import Stream, loaded, step, words

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux's CPUs")
# Of those, the ones whose activations are NumPy's all the way; the others cross to MLX between layers.
FLOWING = {"llama", "mistral", "qwen2", "qwen3"}


def both(family: str = "llama", bits: int = 4, group: int = 32, **mixed: int) -> tuple[Any, Any]:
    """A quantised tiny model on the CPU, and the same dequantised by mlx-lm. mixed: bits of layers of that name."""
    model, _ = tiny(family)

    def kind(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return {"group_size": group, "bits": mixed.get(path.rpartition(".")[2], bits)}

    nn.quantize(model, group_size=group, bits=bits, class_predicate=kind)
    stock = dequantize_model(copy.deepcopy(model))
    mx.eval(stock.parameters())
    return oncpu.prepare(model), stock


def in_one_call(model: Any) -> bool:
    return getattr(model.model, "stack", None) is not None


def flows(model: Any) -> bool:
    return isinstance(model.model.embed_tokens(mx.array([[1]])), np.ndarray)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, 64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dequantised_model(family: str, bits: int, group: int) -> None:
    model, stock = both(family, bits, group)
    assert flows(model) == (family in FLOWING)
    tokens = np.random.default_rng(5).integers(0, 100, 200)
    mine, theirs = make_prompt_cache(model), make_prompt_cache(stock)
    at = 0
    for count in (1, 7, 60, 1, 25, 1, 100):
        passed = mx.array(tokens[at : at + count])[None]
        got, want = np.array(model(passed, cache=mine)), np.array(stock(passed, cache=theirs))
        assert np.abs(got - want).max() < 1e-4 * np.ptp(want)
        at += count
    # Without a cache, and two rows at once.
    pair = mx.array(tokens[:40].reshape(2, 20))
    want = np.array(stock(pair))
    assert np.abs(np.array(model(pair)) - want).max() < 1e-4 * np.ptp(want)


def test_bits_may_differ_and_what_has_no_kernel_is_dequantised() -> None:
    model, stock = both(k_proj=8, up_proj=2, o_proj=6)
    assert flows(model)
    tokens = mx.array([words(1, 30)])
    want = np.array(stock(tokens))
    assert np.abs(np.array(model(tokens)) - want).max() < 1e-4 * np.ptp(want)


def test_scales_that_are_not_finite_name_their_layer() -> None:
    model, _ = tiny("llama")
    nn.quantize(model, group_size=32, bits=4)
    layer = model.layers[1].mlp.down_proj
    layer.scales = mx.where(mx.arange(layer.scales.size).reshape(layer.scales.shape) == 3, mx.nan, layer.scales)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: its scales or biases are not finite"):
        oncpu.prepare(model)


def test_an_unquantised_model_stays_mlxs() -> None:
    model, _ = tiny("llama")
    kinds = {path: type(module) for path, module in model.named_modules()}
    assert {path: type(module) for path, module in oncpu.prepare(model).named_modules()} == kinds


def test_no_more_logits_are_made_than_are_wanted() -> None:
    model, _ = both()
    tokens = mx.array([words(1, 9)])
    whole = np.array(model(tokens))
    with wanting("last"):
        np.testing.assert_allclose(np.array(model(tokens)), whole[:, -1:], atol=1e-5)
    with wanting("none"):
        assert model(tokens).shape == (1, 0, 100)
    with wanting("shapes"):
        assert model(tokens).shape == whole.shape


@pytest.mark.parametrize("score", ["attn_mass", "key_norm", "observed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_sessions_together_alone_and_through_stock_mlx_lm(family: str, score: Score) -> None:
    model, stock = both(family)
    streams = [Stream(loaded(model), 10 * seed, [30 + seed, 70], score=score) for seed in range(3)]
    step(streams, 3)
    streams[0].evict("b0")
    step([streams[2], streams[0]], 3)
    streams[1].close(1, words(7, 4))
    streams[1].read([NewBlock("question", words(9, 12))])
    step(streams, 3)
    for stream in streams:
        stream.check()
    session, cache = Session(loaded(model), budget=300, prefill_step=64, score=score), make_prompt_cache(stock)
    text = words(3, 150)
    for _ in session.prefill([NewBlock("text", text[:-1])], answer=NewBlock("answer", text[-1:])):
        pass
    stock(mx.array(text[:-1])[None], cache=cache)
    token = text[-1]
    for _ in range(5):
        want = np.array(stock(mx.array([[token]]), cache=cache)[0, -1])
        np.testing.assert_allclose(np.array(session.step(token)), want, atol=1e-4 * np.ptp(want))
        token = int(want.argmax())


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_in_one_call_are_those_layer_by_layer(family: str) -> None:
    model, stock = both(family)
    assert in_one_call(model) == (family in FLOWING)
    rng = np.random.default_rng(3)
    # Layers that come to hold different numbers of rows.
    config = KVCacheConfig(method="h2o", h2o_budget=40, h2o_n_sink=2, h2o_recent=4, h2o_scope="layer")
    mine, theirs, plain, whole = *(config.build(len(model.layers)) for _ in range(3)), make_prompt_cache(stock)
    tokens = rng.integers(0, 100, 90)
    for cache in (mine, theirs, plain, whole):
        (model if cache is not whole else stock)(mx.array(tokens)[None], cache=cache)
    for token in rng.integers(0, 100, 6).tolist():
        got = np.array(model(mx.array([[token]]), cache=mine))
        if in_one_call(model):
            stack, model.model.stack = model.model.stack, None
            want = np.array(model(mx.array([[token]]), cache=theirs))
            model.model.stack = stack
        else:
            want = np.array(model(mx.array([[token]]), cache=theirs))
        assert np.abs(got - want).max() < 1e-5 * np.ptp(want)
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a.arrays, b.arrays, strict=True):
                np.testing.assert_allclose(np.array(x), np.array(y), atol=1e-5)


def test_a_row_comes_out_the_same_however_many_there_are() -> None:
    model, _ = both("qwen2")
    rng = np.random.default_rng(4)
    config = KVCacheConfig(method="full")

    def held() -> list[Any]:
        caches = config.build(len(model.layers))
        model(mx.array(text)[None], cache=caches)
        return caches

    text, draft = rng.integers(0, 100, 50), rng.integers(0, 100, 7).tolist()
    alone, drafted = held(), held()
    want = [np.array(model(mx.array([[token]]), cache=alone))[0, 0] for token in draft]
    got = model(mx.array(draft)[:, None], cache=layers_of([drafted], [len(draft)], quick=True))
    assert in_one_call(model)
    np.testing.assert_array_equal(np.array(got)[:, 0], np.stack(want))
    for a, b in zip(alone, drafted, strict=True):
        for x, y in zip(a.arrays[:2], b.arrays[:2], strict=True):
            np.testing.assert_array_equal(np.array(x), np.array(y))


def test_layers_of_another_make_are_not_taken_for_llamas() -> None:
    model, _ = tiny("llama")

    class Scaled(type(model.layers[0])):  # type: ignore[misc]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            return super().__call__(x, mask, cache) * 0.5

    # As a family of its own would look that calls its layers by the same names.
    model.layers[0].__class__ = Scaled
    Scaled.__module__ = "mlx_lm.models.llama"
    nn.quantize(model, group_size=32, bits=4)
    stock = dequantize_model(copy.deepcopy(model))
    prepared = oncpu.prepare(model)
    assert not in_one_call(prepared)
    tokens = mx.array([words(1, 30)])
    want = np.array(stock(tokens))
    assert np.abs(np.array(prepared(tokens)) - want).max() < 1e-4 * np.ptp(want)


def test_forks_of_a_session_go_their_own_ways() -> None:
    model, _ = both()
    session = Session(loaded(model), budget=300, prefill_step=64)
    for _ in session.prefill([NewBlock("text", words(1, 70))], answer=NewBlock("answer", words(2, 3))):
        pass
    fork = session.fork({"text": "text", "answer": "answer"})
    for tokens in ([5, 6], [7, 8], [9, 5]):
        step_together([session, fork], tokens)
    again = Session(loaded(model), budget=300, prefill_step=64)
    for _ in again.prefill([NewBlock("text", words(1, 70))], answer=NewBlock("answer", words(2, 3))):
        pass
    for token in (5, 7, 9):
        again.step(token)
    np.testing.assert_allclose(np.array(session.step(1)), np.array(again.step(1)), atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_is_quantised_at_load_if_that_is_asked_for(bits: int) -> None:
    model, _ = tiny("qwen2")
    stock = copy.deepcopy(model)
    loading._quantize(model, bits)
    before = weights(model)
    # It has its bits now.
    loading._quantize(model, 12 - bits)
    assert all(model_weight is before[path] for path, model_weight in weights(model).items())
    tokens = mx.array([words(1, 30)])
    want = np.array(stock(tokens))
    got = np.array(oncpu.prepare(model)(tokens))
    assert flows(model)
    assert np.abs(got - want).max() < (0.02 if bits == 8 else 0.5) * np.ptp(want)
    with pytest.raises(ValueError, match="quantize: 3 is not 0, 4 or 8"):
        loading._quantize(stock, 3)


def weights(model: Any) -> dict[str, mx.array]:
    return {path: module.weight for path, module in model.named_modules() if "weight" in module}
