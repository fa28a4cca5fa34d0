"""The cache against a NumPy oracle and stock mlx-lm."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from kv import EvictingCache, KVCacheBuilder, KVCacheConfig
from kv.caches.units import Evicted
from tests.kv.feeding import build, feed, named_values, survivors, tiny_llama
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
    stride = draw(st.integers(1, max(1, budget - sinks - recent - 2 * chunk + 2)))
    score = draw(st.sampled_from(["attn_mass", "key_norm"]))
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
            "chunkkv_score": score,
            "chunkkv_pool": draw(st.sampled_from(["mean", "max"])),
            "chunkkv_decay": draw(st.sampled_from([1.0, 0.98, 0.8])) if score == "attn_mass" else 0.98,
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
    caches = KVCacheConfig(**case["options"]).build(LAYERS, on_evict)
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


@pytest.mark.slow
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
    caches = KVCacheConfig(chunkkv_budget=100, chunkkv_chunk_size=8).build(1)
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
    (cache,) = KVCacheConfig(chunkkv_budget=32).build(1)
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
    (cache,) = KVCacheConfig(head_dim=16, chunkkv_budget=32).build(1)
    good = mx.zeros((1, 2, 5, 16))
    cache.update_and_fetch(good, good)
    for keys, values, message in [
        (mx.zeros((1, 2, 5, 8)), good, "head_dim: keys are 8 wide"),
        (good, mx.zeros((1, 2, 4, 16)), "differ in batch, heads or tokens"),
        (good.astype(mx.float16), good, "keys are mlx.core.float16, values mlx.core.float32"),
        (good.astype(mx.float16), good.astype(mx.float16), "keys: dtype mlx.core.float16 after mlx.core.float32"),
        (mx.zeros((1, 3, 5, 16)), mx.zeros((1, 3, 5, 16)), "does not continue"),
        (mx.zeros((2, 2, 5, 16)), mx.zeros((2, 2, 5, 16)), "batch of 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.update_and_fetch(keys, values)
    assert cache.tokens_kept == cache.offset == 5


def test_declared_blocks_are_refused_where_heads_decide_alone() -> None:
    (cache,) = KVCacheConfig(chunkkv_scope="head").build(1)
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
    with pytest.raises(ValueError, match=r"full attention|full-attention cache a layer"):
        KVCacheBuilder.for_model(module.Model(arguments), KVCacheConfig())


def tiny_family(family: str, **options: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    common = {
        "model_type": family, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    mx.random.seed(0)
    return module.Model(module.ModelArgs.from_dict({**common, **options}))


GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16.0}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "starcoder2", "cohere"])
def test_wrong_head_dim_is_found_in_every_family_before_anything_runs(family: str) -> None:
    with pytest.raises(ValueError, match="head_dim: 24 given, but layer 0 of the model has 16"):
        KVCacheBuilder.for_model(tiny_family(family), KVCacheConfig(head_dim=24))


def test_models_with_one_mask_array_for_all_layers_get_layers_of_equal_length_only() -> None:
    model = tiny_family("gemma2", **GEMMA2)
    for options in (
        {"method": "pyramidkv", "pyramidkv_budget": 48, "pyramidkv_recent": 4},
        {"method": "squeezeattention", "squeezeattention_budget": 48},
        {"chunkkv_budget": 48, "chunkkv_literal": True},
    ):
        with pytest.raises(ValueError, match=r"keep different numbers of rows.*gemma2 uses one mask array"):
            KVCacheBuilder.for_model(model, KVCacheConfig(**options))
    with pytest.raises(ValueError, match=r"gemma2 does not use"):
        KVCacheBuilder.for_model(model, KVCacheConfig(chunkkv_score="observed"))
    tokens = mx.array(np.random.default_rng(1).integers(0, 100, 90))[None]
    for scope in ("layer", "model"):
        caches = KVCacheBuilder.for_model(model, KVCacheConfig(chunkkv_budget=48, chunkkv_scope=scope))
        model(tokens[:, :60], cache=caches)
        for group in {id(cache.group): cache.group for cache in caches}.values():
            group.declare(65, 80, "a")
        if scope == "layer":
            with pytest.raises(ValueError, match='declared blocks need scope="model"'):
                model(tokens[:, 60:], cache=caches)
        else:
            mx.eval(model(tokens[:, 60:], cache=caches))
        assert {cache.offset for cache in caches} == {60 if scope == "layer" else 90}


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


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_pass_is_stored_whole_or_refused_before_anything_is(data: st.DataObject) -> None:
    """Refused exactly if sinks, pinned and unfinished units alone would pass the budget, by counting token by token."""
    draw = data.draw
    chunk, sinks = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    budget = draw(st.integers(sinks + chunk + 1, 30))
    options = {"budget": budget, "chunk_size": chunk, "n_sink": sinks, "recent": 0, "scope": "model", "stride": 1}
    caches = build(LAYERS, "chunkkv", **options)
    group = caches[0].group
    oracle = OracleLayer(budget, chunk, sinks, 0, 1, 0.98, "attn_mass", "mean")
    at = 0
    for number in range(draw(st.integers(1, 4))):
        start = at + draw(st.integers(0, 9))
        end = start + draw(st.integers(1, 12))
        pinned = draw(st.booleans())
        try:
            group.declare(start, end, f"block {number}", pinned=pinned)
        except ValueError:
            break
        oracle.blocks[start] = (end, f"block {number}", pinned)
        at = end
    keys = np.random.default_rng(0).normal(size=(LAYERS, HEADS, 90, WIDTH)).astype(np.float32)
    values = named_values(keys.shape)
    while (start := group.position) < 80:
        size = draw(st.integers(1, 10))
        fits = True
        for i in range(start, start + size):
            oracle.push(keys[:, :, i].reshape(LAYERS * HEADS, WIDTH))
            fits = fits and len(oracle.positions) <= budget
        if not fits:
            before = [np.array(cache.state[0]) if cache.tokens_kept else None for cache in caches]
            refused = [mx.array(array[0][None, :, start : start + size]) for array in (keys, values)]
            with pytest.raises(ValueError, match=f"more than budget {budget}"):
                caches[0].update_and_fetch(*refused)
            assert (caches[0].offset, group.position) == (start, start)
            for cache, stored in zip(caches, before, strict=True):
                assert stored is None or np.array_equal(np.array(cache.state[0]), stored)
            return
        feed(caches, keys, values, [size])
        assert survivors(caches[0])[0] == oracle.positions


def test_what_is_no_block_is_refused_at_once() -> None:
    (cache,) = build(1, "chunkkv", budget=32)
    group = cache.group
    for start, end, name, relevance, message in [
        (4.5, 20, "a", 0.0, "start 4.5"),
        (4, "20", "a", 0.0, "end '20'"),
        (4, None, "a", 0.0, "end None"),
        (4, 20, 7, 0.0, "7 is not a string"),
        (4, 20, "a", float("nan"), "relevance nan"),
        (4, 20, "a", "high", "relevance 'high'"),
    ]:
        with pytest.raises(ValueError, match=message):
            group.declare(start, end, name, relevance=relevance)  # type: ignore[arg-type]
    group.declare(np.int64(4), np.int64(20), "a", relevance=np.float32(0.5))
    rows = mx.zeros((1, 2, 25, 8))
    cache.update_and_fetch(rows, rows)
    again = EvictingCache.from_state(cache.state)
    assert again.group.find("a").relevance == 0.5
    with pytest.raises(ValueError, match="relevance inf"):
        group.set_relevance("a", float("inf"))


def test_what_was_truncated_was_not_seen() -> None:
    (cache,) = build(1, "chunkkv", budget=64)
    rows = mx.random.normal((1, 2, 50, 8))
    cache.update_and_fetch(rows, rows)
    for position in (-5, 51, 3.0):
        with pytest.raises(ValueError, match=f"position: {position}"):
            cache.group.truncate(position)
    cache.group.truncate(20)
    assert (cache.offset, cache.tokens_seen, cache.tokens_kept, cache.compression_ratio) == (20, 20, 20, 1.0)


@pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
def test_asking_for_scores_changes_none_of_them(score: str) -> None:
    """Tokens that are forgotten later have given theirs, whether someone asked in between or not."""
    rows = mx.random.normal((1, 2, 60, 8))
    asked, unasked = (build(1, "chunkkv", budget=64, score=score)[0] for _ in range(2))
    for cache in (asked, unasked):
        cache.update_and_fetch(rows[:, :, :50], rows[:, :, :50])
        if cache is asked:
            cache.group.scores()
        cache.group.truncate(30)
        cache.update_and_fetch(rows[:, :, 50:], rows[:, :, 50:])
    np.testing.assert_allclose(asked.group.scores(), unasked.group.scores(), rtol=1e-5)


def test_what_nobody_asks_for_does_not_pile_up(tmp_path: Path) -> None:
    """mlx-lm evaluates logits only while it decodes; the rest of a cache's state must come with them."""
    nodes = []
    cache = build(1, "chunkkv", budget=32, stride=4, chunk_size=2)[0]
    for step in range(300):
        mx.eval(cache.update_and_fetch(mx.random.normal((1, 2, 1, 8)), mx.full((1, 2, 1, 8), float(step))))
        if step % 50 == 49:
            file = tmp_path / "graph.dot"
            mx.export_to_dot(str(file), *[array for array in cache.state if isinstance(array, mx.array)])
            nodes.append(file.read_text().count("label"))
    assert max(nodes) < 100, nodes
    assert cache.group.positions()[0] == survivors(cache)[0]


def test_sliding_windows_and_foreign_states_are_refused_loudly(tiny: Any) -> None:
    (cache,) = KVCacheConfig().build(1)
    with pytest.raises(ValueError, match="window_size"):
        cache.make_mask(5, window_size=3)
    with pytest.raises(ValueError, match="not a state"):
        EvictingCache.from_state((None, None, None, None, "{}"))
    assert not cache.is_trimmable()
