"""The cache against a NumPy oracle and stock mlx-lm."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from kv import EvictingCache, KVCacheBuilder, KVCacheConfig
from kv.group import Evicted
from tests.kv.feeding import FakeLayers, build, feed, named_values, survivors, tiny_llama
from tests.kv.oracle import OracleLayer

LAYERS, HEADS, WIDTH = 3, 2, 16


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_llama(width=WIDTH, kv_heads=HEADS, layers=LAYERS)


def slicing(draw: Any, total: int) -> list[int]:
    sizes = []
    while sum(sizes) < total:
        sizes.append(min(draw(st.integers(1, 40)), total - sum(sizes)))
    return sizes


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    chunk = draw(st.integers(1, 6))
    sinks = draw(st.integers(0, 4))
    budget = draw(st.integers(sinks + chunk + 1, 40))
    recent = draw(st.integers(0, budget - sinks - chunk))
    stride = draw(st.integers(1, max(1, (budget - sinks - chunk + 1) // 2)))
    total = draw(st.integers(1, 120))
    scope = draw(st.sampled_from(["head", "layer", "model"]))
    blocks: dict[int, tuple[int, str, bool]] = {}
    if scope != "head":
        at, pinned = sinks, 0
        while at < total and draw(st.booleans()):
            start = at + draw(st.integers(0, 9))
            length = draw(st.integers(1, 12))
            pin = draw(st.booleans()) and pinned + length + sinks + 24 <= budget
            if sinks + pinned + length > budget:
                break
            blocks[start] = (start + length, f"b{start}", pin)
            pinned += length if pin else 0
            at = start + length
    return {
        "seed": draw(st.integers(0, 2**16)),
        "scope": scope,
        "blocks": blocks,
        "total": total,
        "slices": slicing(draw, total),
        "on_host": draw(st.booleans()),
        "options": {
            "chunkkv_budget": budget,
            "chunkkv_chunk_size": chunk,
            "chunkkv_n_sink": sinks,
            "chunkkv_recent": recent,
            "chunkkv_stride": stride,
            "chunkkv_scope": scope,
            "chunkkv_score": draw(st.sampled_from(["attn_mass", "key_norm"])),
            "chunkkv_pool": draw(st.sampled_from(["mean", "max"])),
            "chunkkv_decay": draw(st.sampled_from([1.0, 0.98, 0.8])),
        },
    }


def oracles(case: dict[str, Any], keys: np.ndarray) -> list[list[int]]:
    """Positions that survive, for each decision: heads of layers, layers, or the model."""
    o = case["options"]

    def run(lanes: np.ndarray) -> list[int]:
        layer = OracleLayer(
            budget=o["chunkkv_budget"],
            chunk=o["chunkkv_chunk_size"],
            sinks=o["chunkkv_n_sink"],
            recent=o["chunkkv_recent"],
            stride=o["chunkkv_stride"],
            decay=o["chunkkv_decay"],
            score=o["chunkkv_score"],
            pool=o["chunkkv_pool"],
            blocks=case["blocks"],
        )
        for i in range(case["total"]):
            layer.push(lanes[:, i].astype(np.float64))
        return layer.positions

    layers, heads = keys.shape[:2]
    if case["scope"] == "head":
        return [run(keys[i, h : h + 1]) for i in range(layers) for h in range(heads)]
    if case["scope"] == "layer":
        return [run(keys[i]) for i in range(layers)]
    return [run(keys.reshape(layers * heads, *keys.shape[2:]))]


@settings(max_examples=120, deadline=None)
@given(cases())
def test_survivors_equal_the_oracle_however_the_stream_is_sliced(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    keys = rng.normal(size=(LAYERS, HEADS, case["total"], WIDTH)).astype(np.float32)
    values = named_values(keys.shape)
    evicted: list[Evicted] = []
    on_evict = evicted.append if case["on_host"] else None
    caches = KVCacheBuilder.for_model(FakeLayers(LAYERS), KVCacheConfig(**case["options"]), on_evict=on_evict)
    if case["blocks"]:
        for group in {id(c.group): c.group for c in caches}.values():
            for start, (end, name, pinned) in case["blocks"].items():
                group.declare(start, end, name, pinned=pinned)
    feed(caches, keys, values, case["slices"])

    found = []
    for layer, cache in enumerate(caches):
        assert cache.tokens_kept <= case["options"]["chunkkv_budget"]
        assert cache.offset == cache.tokens_seen == case["total"]
        held_keys = np.array(cache.keys[0, :, : cache.tokens_kept])
        held = np.array(cache.values[0, :, : cache.tokens_kept, 0]).astype(int)
        for head in range(HEADS):
            np.testing.assert_array_equal(held_keys[head], keys[layer, head][held[head]])
            found.append(held[head].tolist())
    expected = oracles(case, keys)
    per_decision = len(found) // len(expected)
    for index, positions in enumerate(expected):
        for same in found[index * per_decision : (index + 1) * per_decision]:
            assert same == positions

    for start, (end, name, pinned) in case["blocks"].items():
        for held_positions in found:
            inside = [p for p in held_positions if start <= p < end]
            whole = list(range(start, min(end, case["total"])))
            assert inside in ([], whole), f"block {name} was cut"
            assert not pinned or inside == whole
    for event in evicted:
        if event.block is not None:
            assert event.tokens == case["blocks"][event.start][0] - event.start


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
@pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
@pytest.mark.parametrize("slices", [[60], [1] * 60, [7, 1, 1, 31, 20], [59, 1]])
def test_a_budget_that_never_fills_equals_the_full_cache(tiny: Any, scope: str, score: str, slices: list[int]) -> None:
    tokens = np.random.default_rng(1).integers(0, 200, 60)
    config = KVCacheConfig(head_dim=WIDTH, chunkkv_budget=64, chunkkv_scope=scope, chunkkv_score=score)
    caches = KVCacheBuilder.for_model(tiny, config)
    full = make_prompt_cache(tiny)
    at = 0
    for size in slices:
        part = mx.array(tokens[at : at + size])[None]
        ours, stock = tiny(part, cache=caches), tiny(part, cache=full)
        np.testing.assert_allclose(np.array(ours), np.array(stock), atol=1e-5)
        at += size


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_attention_after_evictions_equals_full_attention_masked_to_the_survivors(tiny: Any, scope: str) -> None:
    """The oracle is one pass without a cache, where each query may only see what was kept when it came."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 200, 90)
    slices = [20, 13, 1, 1, 24, 1, 30]
    config = KVCacheConfig(
        chunkkv_budget=24, chunkkv_chunk_size=4, chunkkv_n_sink=2, chunkkv_recent=4, chunkkv_scope=scope
    )
    caches = KVCacheBuilder.for_model(tiny, config)
    visible = np.zeros((LAYERS, 90, 90), dtype=bool)
    outputs, at = [], 0
    for size in slices:
        for layer, cache in enumerate(caches):
            kept = cache.group.positions()[0]
            for query in range(at, at + size):
                visible[layer, query, kept] = True
                visible[layer, query, at : query + 1] = True
        outputs.append(np.array(tiny(mx.array(tokens[at : at + size])[None], cache=caches)))
        at += size
    assert caches[0].tokens_kept < 30

    hidden = tiny.model.embed_tokens(mx.array(tokens)[None])
    for layer, block in enumerate(tiny.layers):
        hidden = block(hidden, mx.array(visible[layer]), cache=None)
    expected = tiny.model.embed_tokens.as_linear(tiny.model.norm(hidden))
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), np.array(expected), atol=2e-5)


def test_positions_stay_true_through_thousands_of_evictions(tiny: Any) -> None:
    evicted: list[Evicted] = []
    config = KVCacheConfig(method="h2o", h2o_budget=32, h2o_scope="model", h2o_stride=1)
    watched = KVCacheBuilder.for_model(tiny, config, on_evict=evicted.append)
    unwatched = KVCacheBuilder.for_model(tiny, config)
    for start in range(0, 3000, 10):
        tokens = mx.array([[i % 200 for i in range(start, start + 10)]])
        mx.eval(tiny(tokens, cache=watched), tiny(tokens, cache=unwatched))
    assert len(evicted) == 3000 - 32
    for caches in (watched, unwatched):
        assert {cache.offset for cache in caches} == {3000}
        assert {cache.tokens_kept for cache in caches} == {32}
        assert caches[0].compression_ratio == 3000 / 32
    # Decided on the host or on the device: the same.
    assert watched[0].group.positions() == unwatched[0].group.positions()
    left = {unit.start for unit in evicted}
    assert left | set(watched[0].group.positions()[0]) == set(range(3000))


def test_held_bytes_never_pass_the_budget_and_one_pass() -> None:
    caches = KVCacheBuilder.for_model(FakeLayers(1), KVCacheConfig(chunkkv_budget=100, chunkkv_chunk_size=8))
    row = HEADS * WIDTH * 4
    for _ in range(40):
        k = mx.random.normal((1, HEADS, 30, WIDTH))
        all_keys, _ = caches[0].update_and_fetch(k, k)
        mx.eval(caches[0].state)
        assert all_keys.nbytes <= row * (100 + 30)
        assert caches[0].keys.nbytes <= row * 100
        assert caches[0].nbytes == caches[0].keys.nbytes * 2 + caches[0].scores.nbytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_models_dtype_and_differing_widths_are_kept(dtype: mx.Dtype) -> None:
    (cache,) = KVCacheBuilder.for_model(FakeLayers(1), KVCacheConfig(chunkkv_budget=32))
    for _ in range(5):
        keys, values = cache.update_and_fetch(
            mx.full((1, 2, 10, 16), 1e4, dtype=dtype), mx.ones((1, 2, 10, 8), dtype=dtype)
        )
        assert keys.dtype == values.dtype == dtype
        assert not mx.isinf(keys).any()
    assert values.shape[-1] == 8


def test_factory_gives_every_request_its_own_caches(tiny: Any) -> None:
    make_cache = KVCacheBuilder.factory(tiny, KVCacheConfig(chunkkv_budget=64))
    first, second = make_cache(), make_cache()
    tiny(mx.array([[1, 2, 3]]), cache=first)
    assert first[0].tokens_seen == 3
    assert second[0].tokens_seen == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nope"}, "method: 'nope'"),
        ({"chunkkv_budget": 0}, "chunkkv_budget: 0"),
        ({"chunkkv_budget": -5}, "chunkkv_budget: -5"),
        ({"chunkkv_budget": 2.5}, "chunkkv_budget: 2.5"),
        ({"chunkkv_chunk_size": 0}, "chunkkv_chunk_size: 0"),
        ({"chunkkv_n_sink": -1}, "chunkkv_n_sink: -1"),
        ({"chunkkv_n_sink": 512}, "chunkkv_n_sink: 512"),
        ({"chunkkv_budget": 10, "chunkkv_chunk_size": 8}, "chunkkv_chunk_size: 8"),
        ({"chunkkv_score": "magic"}, "chunkkv_score: 'magic'"),
        ({"chunkkv_scope": "galaxy"}, "chunkkv_scope: 'galaxy'"),
        ({"chunkkv_pool": "sum"}, "chunkkv_pool: 'sum'"),
        ({"chunkkv_decay": 0}, "chunkkv_decay: 0"),
        ({"chunkkv_recent": 501}, "chunkkv_recent: 501"),
        ({"h2o_budget": 4}, "h2o_budget: no option"),
        ({"head_dim": 0}, "head_dim: 0"),
    ],
)
def test_bad_configuration_names_the_option_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        KVCacheConfig(**options)


def test_wrong_head_dim_for_the_model_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="head_dim: 64 given, but layer 0 of the model has 16"):
        KVCacheBuilder.for_model(tiny, KVCacheConfig(head_dim=64))


def test_input_that_does_not_belong_to_the_stream_is_refused_and_changes_nothing() -> None:
    (cache,) = KVCacheBuilder.for_model(FakeLayers(1), KVCacheConfig(head_dim=16, chunkkv_budget=32))
    good = mx.zeros((1, 2, 5, 16))
    cache.update_and_fetch(good, good)
    for keys, values, message in [
        (mx.zeros((1, 2, 5, 8)), good, "head_dim: keys are 8 wide"),
        (good, mx.zeros((1, 2, 4, 16)), "differ in batch, heads or tokens"),
        (good.astype(mx.float16), good, "keys: dtype"),
        (mx.zeros((1, 3, 5, 16)), mx.zeros((1, 3, 5, 16)), "does not continue"),
        (mx.zeros((2, 2, 5, 16)), mx.zeros((2, 2, 5, 16)), "batch of 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.update_and_fetch(keys, values)
    assert cache.tokens_kept == cache.offset == 5


def test_declared_blocks_are_refused_where_heads_decide_alone() -> None:
    (cache,) = KVCacheBuilder.for_model(FakeLayers(1), KVCacheConfig(chunkkv_scope="head"))
    with pytest.raises(ValueError, match="declared blocks need"):
        cache.group.declare(0, 5, "a")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3_text", {"head_dim": 16, "sliding_window_pattern": 2, "sliding_window": 8}),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("mamba", None),
    ],
)
def test_models_whose_layers_do_not_look_back_over_everything_are_refused(family: str, options: Any) -> None:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    if options is None:
        arguments = module.ModelArgs(
            model_type=family, vocab_size=100, hidden_size=32, intermediate_size=64, state_size=8, num_hidden_layers=2,
            conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4,
        )  # fmt: skip
    else:
        common = {
            "model_type": family, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 100,
        }  # fmt: skip
        arguments = module.ModelArgs(**common, **options)
    with pytest.raises(ValueError, match=r"full attention|no self_attn|sliding"):
        KVCacheBuilder.for_model(module.Model(arguments), KVCacheConfig())


def test_a_late_token_that_matters_lives_long_enough_to_show_it() -> None:
    total, budget, late = 1024, 128, 600
    keys = np.random.default_rng(9).normal(size=(1, HEADS, total, WIDTH)).astype(np.float32)
    # Every key looks a little for what the late one says.
    keys[..., 0] = 2.0
    keys[:, :, late, 0] = 8.0

    def survives(**options: Any) -> bool:
        caches = build(1, "h2o", budget=budget, **options)
        feed(caches, keys, named_values(keys.shape), [total])
        return late in survivors(caches[0])[0]

    assert survives()
    # Without a time of grace it leaves before anyone could look, as it does in the literal preset.
    assert not survives(recent=0, stride=1)
    assert not survives(literal=True)


def test_sliding_windows_and_foreign_states_are_refused_loudly(tiny: Any) -> None:
    (cache,) = KVCacheBuilder.for_model(FakeLayers(1), KVCacheConfig())
    with pytest.raises(ValueError, match="window_size"):
        cache.make_mask(5, window_size=3)
    with pytest.raises(ValueError, match="not a state"):
        EvictingCache.from_state((None, None, None, None, "{}"))
    assert not cache.is_trimmable()
