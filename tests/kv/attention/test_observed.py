"""Observed attention on tiny random models of several families, against NumPy on what their attention was given."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from kv import KVCacheBuilder, KVCacheConfig

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "head_dim": 16},
    "qwen2": {**COMMON, "rope_theta": 10000.0, "tie_word_embeddings": True},
    "qwen3": {**COMMON, "head_dim": 16, "rope_theta": 10000.0, "tie_word_embeddings": True,
              "max_position_embeddings": 512},
    "gemma": {**COMMON, "head_dim": 16, "rope_theta": 10000.0},
    "mistral": {**COMMON, "head_dim": 16},
    "phi": {"max_position_embeddings": 512, "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "intermediate_size": 96,
            "layer_norm_eps": 1e-5, "rope_theta": 10000.0},
    "phi3": {**COMMON, "max_position_embeddings": 512, "original_max_position_embeddings": 512, "rope_theta": 10000.0},
}  # fmt: skip
BUDGET, SINKS, RECENT, WINDOW = 24, 2, 4, 8


def tiny(family: str) -> tuple[Any, Any]:
    # Mistral's models are served by mlx-lm's Llama.
    module = importlib.import_module(f"mlx_lm.models.{'llama' if family == 'mistral' else family}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs(model_type=family, **FAMILIES[family]))
    mx.eval(model.parameters())
    return model, module


class Recorder:
    """Stands before a model's attention function and keeps what it was given, by cache."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.passes: dict[int, list[tuple[np.ndarray, np.ndarray, float]]] = {}

    def __call__(self, queries: Any, keys: Any, values: Any, cache: Any = None, **options: Any) -> Any:
        seen = (np.array(queries[0]), np.array(keys[0]), options["scale"])
        self.passes.setdefault(id(cache), []).append(seen)
        return self.attention(queries, keys, values, cache=cache, **options)


def survivors(passes: list[tuple[np.ndarray, np.ndarray, float]], decay: float) -> list[int]:
    positions: list[int] = []
    scores = np.zeros(0)
    for queries, keys, scale in passes:
        count, rows = queries.shape[1], keys.shape[1]
        assert rows == len(positions) + count
        scores = np.concatenate([scores * decay**count, np.zeros(count)])
        for i in range(max(0, count - WINDOW), count):
            sees = rows - count + i + 1
            grouped = np.repeat(keys[:, :sees], len(queries) // len(keys), axis=0).astype(np.float64)
            logits = np.einsum("hrd,hd->hr", grouped, queries[:, i].astype(np.float64)) * scale
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            scores[:sees] += weights.mean(0) * decay ** (count - 1 - i)
        start = positions[-1] + 1 if positions else 0
        positions = [*positions, *range(start, start + count)]
        newest = positions[-1]
        free = [r for r, p in enumerate(positions) if p >= SINKS and p <= newest - RECENT]
        leaving = sorted(free, key=lambda r: (scores[r], r))[: max(0, rows - BUDGET)]
        stay = [r for r in range(rows) if r not in leaving]
        positions, scores = [positions[r] for r in stay], scores[stay]
    return positions


@pytest.mark.parametrize("family", FAMILIES)
def test_real_queries_decide(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, module = tiny(family)
    config = KVCacheConfig(
        method="h2o", h2o_budget=BUDGET, h2o_n_sink=SINKS, h2o_recent=RECENT, h2o_window=WINDOW, h2o_score="observed"
    )
    caches = KVCacheBuilder.for_model(model, config)
    recorder = Recorder(module.scaled_dot_product_attention)
    monkeypatch.setattr(module, "scaled_dot_product_attention", recorder)
    tokens = np.random.default_rng(3).integers(0, 100, 90)
    at = 0
    for size in (20, 13, 1, 1, 25, 1, 1, 28):
        mx.eval(model(mx.array(tokens[at : at + size])[None], cache=caches))
        at += size
        assert all(cache.tokens_kept <= BUDGET for cache in caches)
        assert {cache.offset for cache in caches} == {at}
    for cache in caches:
        assert cache.group.positions() == [survivors(recorder.passes[id(cache)], 0.98)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hook_changes_no_attention(family: str) -> None:
    model, _ = tiny(family)
    tokens = mx.array(np.random.default_rng(4).integers(0, 100, 40))[None]
    before = np.array(model(tokens, cache=make_prompt_cache(model)))
    options = {"h2o_budget": 64, "h2o_score": "observed"}
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="h2o", **options))
    KVCacheBuilder.for_model(model, KVCacheConfig(method="h2o", **options))
    np.testing.assert_array_equal(np.array(model(tokens, cache=make_prompt_cache(model))), before)
    np.testing.assert_allclose(np.array(model(tokens, cache=caches)), before, atol=1e-5)


@pytest.mark.parametrize("score", ["attn_mass", "key_norm", "observed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_turns_of_every_family(family: str, score: str) -> None:
    model, _ = tiny(family)
    config = KVCacheConfig(chunkkv_budget=64, chunkkv_chunk_size=4, chunkkv_score=score)
    caches, stock = KVCacheBuilder.for_model(model, config), make_prompt_cache(model)
    rng = np.random.default_rng(8)
    for turn in range(10):
        prompt = mx.array(rng.integers(0, 100, 30))
        options = {"max_tokens": 4, "prefill_step_size": 16}
        answer = [int(t) for t, _ in generate_step(prompt, model, prompt_cache=caches, **options)]
        full = [int(t) for t, _ in generate_step(prompt, model, prompt_cache=stock, **options)]
        if turn == 0:
            # Nothing has had to leave yet.
            assert answer == full
        assert {cache.offset for cache in caches} == {34 * (turn + 1)}
        assert all(cache.tokens_kept <= 64 for cache in caches)


@pytest.mark.parametrize(
    ("method", "scope"),
    [
        *((method, scope) for method in ("chunkkv", "h2o", "cam") for scope in ("head", "layer", "model")),
        # Their layers keep different budgets, and are refused with scope "model".
        *((method, scope) for method in ("pyramidkv", "squeezeattention") for scope in ("head", "layer")),
    ],
)
def test_every_method_that_collects_a_score_can_observe(method: str, scope: str) -> None:
    model, _ = tiny("llama")
    options = {"budget": 40, "score": "observed", "scope": scope, "recent": 4}
    config = KVCacheConfig(method=method, **{f"{method}_{name}": value for name, value in options.items()})
    caches = KVCacheBuilder.for_model(model, config)
    tokens = np.random.default_rng(5).integers(0, 100, 200)
    for start, stop in ((0, 90), (90, 91), (91, 92), (92, 150), (150, 151), (151, 200)):
        mx.eval(model(mx.array(tokens[start:stop])[None], cache=caches))
        assert all(cache.tokens_kept <= cache.layer_budget for cache in caches)
    assert {cache.offset for cache in caches} == {200}
    assert sum(cache.tokens_kept for cache in caches) >= 60


def test_layers_that_follow_a_leader_keep_what_it_observed() -> None:
    model, _ = tiny("llama")
    config = KVCacheConfig(chunkkv_budget=40, chunkkv_layer_reuse=2, chunkkv_score="observed")
    caches = KVCacheBuilder.for_model(model, config)
    tokens = np.random.default_rng(7).integers(0, 100, 120)
    for start in range(0, 120, 30):
        mx.eval(model(mx.array(tokens[start : start + 30])[None], cache=caches))
    assert caches[0].group is caches[1].group
    assert caches[0].tokens_kept == caches[1].tokens_kept <= 40


def test_declared_blocks_are_kept_whole_by_observed_attention() -> None:
    model, _ = tiny("qwen3")
    config = KVCacheConfig(chunkkv_budget=48, chunkkv_scope="model", chunkkv_score="observed")
    caches = KVCacheBuilder.for_model(model, config)
    group = caches[0].group
    blocks = {"a": (4, 20), "b": (20, 33), "c": (40, 62), "d": (70, 85)}
    for name, (start, end) in blocks.items():
        group.declare(start, end, name, pinned=name == "b")
    tokens = np.random.default_rng(6).integers(0, 100, 120)
    for start in range(0, 120, 15):
        mx.eval(model(mx.array(tokens[start : start + 15])[None], cache=caches))
        kept = set(group.positions()[0])
        for start_, end in blocks.values():
            inside = {p for p in range(start_, end) if p < start + 15}
            assert kept >= inside or not kept & inside
    assert set(range(20, 33)) <= kept


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    module = importlib.import_module("mlx_lm.models.gemma2")
    model = module.Model(module.ModelArgs(model_type="gemma2", head_dim=16, **{**COMMON, "rope_theta": 10000.0}))
    with pytest.raises(ValueError, match="gemma2 does not use"):
        KVCacheBuilder.for_model(model, KVCacheConfig(chunkkv_score="observed"))


def test_a_cache_that_is_not_shown_the_queries_says_so() -> None:
    model, _ = tiny("llama")
    (cache, _) = KVCacheBuilder.for_model(model, KVCacheConfig(chunkkv_score="observed"))
    rows = mx.zeros((1, 2, 5, 16))
    cache.update_and_fetch(rows, rows)
    with pytest.raises(RuntimeError, match=r"kv\.observed\.install"):
        cache.update_and_fetch(rows, rows)
