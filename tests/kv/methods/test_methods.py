"""Every method against NumPy, against the others where they must be equal, and against the peer where it is literal."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from veloxquant_mlx.quantizers.chunkkv import chunkkv_trim_to, chunkkv_update, init_chunkkv_state

from kv import KVCacheConfig
from kv.caches.scoring import AttentionMass
from kv.methods import METHODS
from tests.kv.feeding import build, feed, named_values, survivors
from tests.kv.oracle import OracleLayer

LAYERS, HEADS, WIDTH = 3, 2, 16
BUDGETED = ["chunkkv", "h2o", "streaming_llm", "tova", "l2norm", "pyramidkv", "squeezeattention", "cam"]


def random_keys(seed: int, total: int, *, heads: int = HEADS, layers: int = LAYERS) -> np.ndarray:
    keys: np.ndarray = np.random.default_rng(seed).normal(size=(layers, heads, total, WIDTH)).astype(np.float32)
    return keys


def held(caches: list[Any]) -> list[Any]:
    return [
        (np.array(c.keys[0, :, : c.tokens_kept]).tolist(), np.array(c.values[0, :, : c.tokens_kept]).tolist())
        for c in caches
    ]


def run(method: str, keys: np.ndarray, slices: list[int], **options: Any) -> list[Any]:
    caches = build(len(keys), method, **options)
    feed(caches, keys, named_values(keys.shape), slices)
    return caches


@st.composite
def streams(draw: Any) -> tuple[np.ndarray, list[int]]:
    total = draw(st.integers(1, 120))
    slices = []
    while sum(slices) < total:
        slices.append(min(draw(st.integers(1, 40)), total - sum(slices)))
    return random_keys(draw(st.integers(0, 2**16)), total), slices


# Equal where they must be


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("chunkkv", {"chunk_size": 1}),
        ("chunkkv", {"chunk_size": 1, "literal": True}),
        ("h2o", {"literal": True}),
        ("pyramidkv", {"slope": 0}),
        ("squeezeattention", {"strength": 0}),
        ("cam", {"merge": False}),
    ],
)
@pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
@pytest.mark.parametrize("budget", [24, 9])
def test_reduces_to_h2o_bit_for_bit(method: str, options: dict[str, Any], score: str, budget: int) -> None:
    keys = random_keys(3, 150)
    slices = [40, 1, 1, 60, 20, *[1] * 28]
    literal = {"literal": True} if options.get("literal") else {}
    ours = run(method, keys, slices, budget=budget, score=score, **options)
    h2o = run("h2o", keys, slices, budget=budget, score=score, **literal)
    assert held(ours) == held(h2o)
    assert all(cache.tokens_kept <= budget for cache in ours)


@pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
def test_layers_that_follow_keep_what_their_leader_keeps(score: str) -> None:
    # Large keys, so that attention has its favourites.
    keys = 3 * random_keys(13, 150, layers=5)
    slices = [40, 1, 1, 60, 20, *[1] * 28]
    options = {"budget": 40, "chunk_size": 4, "score": score}
    alone = run("chunkkv", keys, slices, **options)
    reused = run("chunkkv", keys, slices, layer_reuse=2, **options)
    for layer, cache in enumerate(reused):
        assert survivors(cache) == survivors(alone[layer // 2 * 2])
    assert survivors(alone[0]) != survivors(alone[1])
    # Only leaders score.
    assert [cache.scores.shape[-1] > 0 for cache in reused] == [True, False, True, False, True]


# Survivors, by NumPy


@settings(max_examples=40, deadline=None)
@given(streams(), st.integers(8, 40), st.integers(0, 4), st.integers(1, 3))
def test_streaming_llm_keeps_the_sinks_and_the_newest(
    stream: tuple[np.ndarray, list[int]], budget: int, sinks: int, stride: int
) -> None:
    keys, slices = stream
    total = keys.shape[2]
    caches = run("streaming_llm", keys, slices, budget=budget, n_sink=sinks, stride=stride)
    for cache in caches:
        kept = cache.tokens_kept
        first = min(sinks, total)
        assert survivors(cache) == [[*range(first), *range(total - kept + first, total)]] * HEADS
        # No more has left than a stride.
        assert min(total, budget - stride + 1) <= kept <= budget


@settings(max_examples=40, deadline=None)
@given(streams(), st.sampled_from(["tova", "l2norm"]), st.sampled_from(["head", "layer", "model"]), st.integers(12, 40))
def test_tova_and_l2norm_keep_what_numpy_keeps(
    stream: tuple[np.ndarray, list[int]], method: str, scope: str, budget: int
) -> None:
    keys, slices = stream
    caches = run(method, keys, slices, budget=budget, n_sink=2, stride=3, scope=scope)
    policy = caches[0].policy
    lanes = {
        "head": [keys[i, h : h + 1] for i in range(LAYERS) for h in range(HEADS)],
        "layer": list(keys),
        "model": [keys.reshape(-1, *keys.shape[2:])],
    }[scope]
    expected = []
    for lane in lanes:
        layer = OracleLayer(
            budget=budget, chunk=1, sinks=2, recent=policy.recent, stride=3, decay=1.0, pool="mean",
            score={"tova": "current", "l2norm": "low_norm"}[method],
        )  # fmt: skip
        for i in range(keys.shape[2]):
            layer.push(lane[:, i].astype(np.float64))
        expected.append(layer.positions)
    found = [head for cache in caches for head in survivors(cache)]
    each = len(found) // len(expected)
    assert found == [positions for positions in expected for _ in range(each)]


def test_pyramidkv_gives_early_layers_more_in_the_same_total() -> None:
    keys = random_keys(5, 300, layers=5)
    caches = run("pyramidkv", keys, [200, 100], budget=40, slope=0.5, recent=4, stride=1)
    budgets = [cache.layer_budget for cache in caches]
    assert budgets == [60, 50, 40, 30, 20]
    for layer, cache in zip(keys, caches, strict=True):
        oracle = OracleLayer(
            budget=cache.layer_budget, chunk=1, sinks=4, recent=4, stride=1, decay=0.98, score="attn_mass", pool="mean"
        )
        for i in range(300):
            oracle.push(layer[:, i].astype(np.float64))
        assert survivors(cache) == [oracle.positions] * HEADS


def test_squeezeattention_moves_budget_from_concentrated_layers() -> None:
    keys = random_keys(6, 200, layers=4)
    # One direction of layer 2 draws all attention to a few tokens.
    keys[2, :, :, 0] = 3.0
    keys[2, :, ::20, 0] = 12.0
    caches = build(4, "squeezeattention", budget=40, strength=0.5, recent=4)
    values = named_values(keys.shape)
    feed(caches, keys, values, [120])
    budgets = [cache.layer_budget for cache in caches]
    assert sum(budgets) == 4 * 40
    assert budgets[2] == min(budgets) == 20
    assert all(cache.tokens_kept <= cache.layer_budget for cache in caches)
    feed(caches, keys, values, [1, 40, 39])
    assert [cache.layer_budget for cache in caches] == budgets
    assert all(cache.layer_budget - 8 <= cache.tokens_kept <= cache.layer_budget for cache in caches)


@pytest.mark.parametrize("slices", [[2, 118], [1] * 60, [10, 1, 1, 50]])
def test_squeezeattention_moves_budgets_however_short_the_first_pass(slices: list[int]) -> None:
    keys = random_keys(6, 200, layers=4)
    keys[2, :, ::20, 0] = 12.0
    caches = build(4, "squeezeattention", budget=40, strength=0.5, recent=4)
    feed(caches, keys, named_values(keys.shape), slices)
    budgets = [cache.layer_budget for cache in caches]
    assert sum(budgets) == 160
    assert len(set(budgets)) > 1


def test_a_copy_of_squeezeattention_moves_its_own_budgets() -> None:
    first, second = random_keys(8, 80, layers=4), random_keys(9, 80, layers=4)
    first[1, :, ::20, 0] = second[2, :, ::20, 0] = 12.0
    caches = build(4, "squeezeattention", budget=40, recent=4)
    copied = copy.deepcopy(caches)
    alone = build(4, "squeezeattention", budget=40, recent=4)
    values = named_values(first.shape)
    feed(caches, first, values, [80])
    feed(copied, second, values, [80])
    feed(alone, second, values, [80])
    assert [cache.layer_budget for cache in copied] == [cache.layer_budget for cache in alone]
    assert held(copied) == held(alone)
    assert [cache.layer_budget for cache in caches] != [cache.layer_budget for cache in alone]


def test_squeezeattention_saved_before_its_budgets_moved_is_not_loaded_without() -> None:
    caches = build(2, "squeezeattention", budget=40, recent=4)
    feed(caches, random_keys(9, 5, layers=2), np.zeros((2, HEADS, 5, WIDTH), dtype=np.float32), [5])
    type(caches[0]).from_state(caches[0].state)
    with pytest.raises(ValueError, match="before its layers' budgets were settled"):
        type(caches[1]).from_state(caches[1].state)


@pytest.mark.parametrize("window", [1, 7, 30, 100, None])
def test_of_what_comes_at_once_only_a_window_gives_scores(window: int | None) -> None:
    keys = random_keys(11, 60, layers=1)[0].astype(np.float64)
    expected = np.zeros((HEADS, 60))
    for start, stop in ((0, 30), (30, 60)):
        for query in range(start, stop):
            expected *= 0.9
            if query == 0:
                expected[:, 0] = 1
            elif window is None or query >= stop - window:
                logits = np.einsum("hnd,hd->hn", keys[:, :query], keys[:, query]) / np.sqrt(WIDTH)
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                expected[:, :query] += weights / weights.sum(-1, keepdims=True)
    scorer = AttentionMass(0.9, window)
    scores = mx.zeros((1, HEADS, 0))
    for stop in (30, 60):
        scores = scorer.score(scores, mx.array(keys[None, :, :stop].astype(np.float32)), 30)
    np.testing.assert_allclose(np.array(scores[0]), expected, atol=1e-5)


def test_cam_has_nothing_to_fold_into_when_all_leave() -> None:
    keys = random_keys(10, 20, layers=1)
    caches = build(1, "cam", budget=4, n_sink=0, recent=0, stride=4)
    feed(caches, keys, keys, [5, 1, 14])
    assert 0 < caches[0].tokens_kept <= 4


def snapkv_numpy(keys: np.ndarray, budget: int, sinks: int, window: int, kernel: int) -> list[int]:
    """keys: [H, n, D] of a prompt. What is kept of it, the heads pooled."""
    total = keys.shape[1]
    mass = np.zeros(total)
    for query in range(total - window, total):
        logits = np.einsum("hnd,hd->hn", keys[:, :query], keys[:, query]) / np.sqrt(keys.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        mass[:query] += (weights / weights.sum(-1, keepdims=True)).mean(0)
    padded = np.pad(mass, kernel // 2)
    smooth = np.array([padded[i : i + kernel].mean() for i in range(total)])
    middle = sorted(range(sinks, total - window), key=lambda i: (smooth[i], i))
    leaving = set(middle[: total + 1 - budget])
    return [i for i in range(total) if i not in leaving]


@pytest.mark.parametrize("slices", [[100], [60, 40], [10] * 10])
def test_snapkv_compresses_a_prompt_once_it_is_read(slices: list[int]) -> None:
    keys = random_keys(7, 160)
    values = named_values(keys.shape)
    caches = build(LAYERS, "snapkv", budget=40, n_sink=2, window=8, kernel=5)
    feed(caches, keys, values, slices)
    assert [cache.tokens_kept for cache in caches] == [100] * LAYERS
    feed(caches, keys, values, [1])
    for layer, cache in zip(keys, caches, strict=True):
        kept = snapkv_numpy(layer[:, :100].astype(np.float64), 40, 2, 8, 5)
        assert survivors(cache) == [[*kept, 100]] * HEADS
    # The answer only grows; a second prompt is compressed in its turn.
    feed(caches, keys, values, [1] * 9)
    assert caches[0].tokens_kept == 49
    feed(caches, keys, values, [30, 1])
    assert [cache.tokens_kept for cache in caches] == [40] * LAYERS
    assert caches[0].offset == 141


def test_cam_folds_values_as_numpy_does() -> None:
    total, budget = 40, 16
    keys = random_keys(8, total, layers=1)
    values = np.random.default_rng(9).normal(size=keys.shape).astype(np.float32)
    caches = build(1, "cam", budget=budget, n_sink=2, recent=3, stride=2)
    feed(caches, keys, values, [25, 1, 14])

    k, v = keys[0].astype(np.float64), values[0].astype(np.float64)
    rows: list[int] = []
    scores = np.zeros((HEADS, 0))
    kept = np.zeros((HEADS, 0, WIDTH))
    for i in range(total):
        if len(rows) + (2 if i % 2 == 0 else 1) > budget:
            room = 2 - i % 2
            middle = [r for r in range(len(rows)) if rows[r] >= 2 and rows[r] < i - 3]
            middle.sort(key=lambda r: (scores[:, r].mean(), r))
            lost = sorted(middle[: len(rows) + room - budget])
            stay = [r for r in range(len(rows)) if r not in lost]
            for h in range(HEADS):
                unit = k[h, rows] / np.linalg.norm(k[h, rows], axis=-1, keepdims=True)
                added, weight = kept[h, stay].copy(), np.ones(len(stay))
                for r in lost:
                    near = int(np.argmax(unit[stay] @ unit[r]))
                    share = min(1.0, scores[h, r] / max(scores[h, stay[near]], 1e-9))
                    added[near] += share * kept[h, r]
                    weight[near] += share
                kept[h, stay] = added / weight[:, None]
            rows, scores, kept = [rows[r] for r in stay], scores[:, stay], kept[:, stay]
        scores = scores * 0.98
        if rows:
            logits = np.einsum("hnd,hd->hn", k[:, rows], k[:, i]) / np.sqrt(WIDTH)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            scores = scores + weights / weights.sum(-1, keepdims=True)
        scores = np.concatenate([scores, np.full((HEADS, 1), 0.0 if rows else 1.0)], axis=1)
        kept = np.concatenate([kept, v[:, i : i + 1]], axis=1)
        rows.append(i)
    cache = caches[0]
    np.testing.assert_array_equal(np.array(cache.keys[0, :, : cache.tokens_kept]), keys[0][:, rows])
    np.testing.assert_allclose(np.array(cache.values[0, :, : cache.tokens_kept]), kept, atol=1e-5)
    assert not np.allclose(kept, v[:, rows], atol=1e-3)


@pytest.mark.parametrize(("bits", "tolerance"), [(2, 1 / 3), (4, 1 / 15), (8, 1 / 255)])
def test_kivi_is_exact_for_the_newest_and_within_a_step_for_the_rest(bits: int, tolerance: float) -> None:
    rng = np.random.default_rng(10)
    keys, values = (rng.normal(size=(1, HEADS, 200, 64)).astype(np.float32) for _ in range(2))
    # An outlier channel, as real keys have: a scale of its own keeps it from drowning the others.
    keys[..., 3] *= 50
    caches = build(1, "kivi", bits=bits, group_size=32, residual=32)
    feed(caches, keys, values, [100, 1, 60, 1, 38])
    fetched_keys, fetched_values = (
        np.array(x)[0] for x in caches[0].update_and_fetch(mx.zeros((1, HEADS, 1, 64)), mx.zeros((1, HEADS, 1, 64)))
    )
    # 200 tokens, of which the newest 32 are exact and whole groups of 32 are packed: 160.
    assert caches[0].keys.shape[2] == 41
    np.testing.assert_array_equal(fetched_keys[:, 160:200], keys[0, :, 160:])
    np.testing.assert_array_equal(fetched_values[:, 160:200], values[0, :, 160:])
    for start in range(0, 160, 32):
        group = keys[0, :, start : start + 32]
        step = (group.max(axis=1) - group.min(axis=1)) * tolerance
        error = np.abs(fetched_keys[:, start : start + 32] - group).max(axis=1)
        assert (error <= step + 1e-3).all()
    assert caches[0].compression_ratio > (3 if bits == 2 else 1.2)
    assert caches[0].tokens_kept == caches[0].offset == 201


def test_full_keeps_everything() -> None:
    keys = random_keys(11, 300)
    (cache, *_) = run("full", keys, [100, 1, 199])
    assert survivors(cache) == [list(range(300))] * HEADS
    assert cache.compression_ratio == 1.0


# The literal preset, against the peer


@pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
@pytest.mark.parametrize(("budget", "chunk", "sinks"), [(16, 1, 2), (20, 4, 4), (21, 8, 0), (40, 7, 3)])
def test_the_literal_preset_keeps_what_the_peers_primitives_keep(
    score: str, budget: int, chunk: int, sinks: int
) -> None:
    # Half precision, which the peer stores; both score in single.
    keys = random_keys(12, 90, layers=2).astype(np.float16).astype(np.float32)
    values = named_values(keys.shape)
    slices = [30, 1, 1, 25, 33]
    caches = build(2, "chunkkv", budget=budget, chunk_size=chunk, n_sink=sinks, score=score, literal=True)
    feed(caches, keys, values, slices)
    for layer, cache in enumerate(caches):
        states = [init_chunkkv_state(sinks, budget, WIDTH, chunk, score) for _ in range(HEADS)]
        at = 0
        for size in slices:
            for head in range(HEADS):
                part = slice(at, at + size)
                states[head] = chunkkv_update(
                    states[head], mx.array(keys[layer, head, part]), mx.array(values[layer, head, part])
                )
            shortest = min(state.keys.shape[0] for state in states)
            states = [chunkkv_trim_to(state, shortest) for state in states]
            at += size
        assert survivors(cache) == [np.array(state.values[:, 0]).astype(int).tolist() for state in states]


# What holds of all


@pytest.mark.parametrize("method", BUDGETED)
@settings(max_examples=15, deadline=None)
@given(streams(), st.integers(26, 60), st.integers(0, 4), st.sampled_from(["head", "layer", "model"]))
def test_budget_sinks_order_and_repeatability(
    method: str, stream: tuple[np.ndarray, list[int]], budget: int, sinks: int, scope: str
) -> None:
    keys, slices = stream
    if method in ("pyramidkv", "squeezeattention") and scope == "model":
        scope = "layer"
    options: dict[str, Any] = {"budget": budget, "n_sink": sinks, "scope": scope}
    if method in ("pyramidkv", "squeezeattention"):
        options |= {"recent": 4}
    caches = build(LAYERS, method, **options)
    values = keys if method == "cam" else named_values(keys.shape)

    def check() -> None:
        for cache in caches:
            assert cache.tokens_kept <= cache.layer_budget

    feed(caches, keys, values, slices, after=check)
    again = build(LAYERS, method, **options)
    feed(again, keys, values, [keys.shape[2]] if method != "squeezeattention" else slices)
    if method == "cam":
        for one, other in zip(caches, again, strict=True):
            np.testing.assert_array_equal(
                np.array(one.keys[0, :, : one.tokens_kept]), np.array(other.keys[0, :, : other.tokens_kept])
            )
        return
    assert held(caches) == held(again)
    for cache in caches:
        for head in survivors(cache):
            assert head == sorted(set(head))
            assert head[: min(sinks, len(head))] == list(range(min(sinks, len(head))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "pyramidkv", "pyramidkv_slope": 1.5}, "pyramidkv_slope: 1.5"),
        ({"method": "pyramidkv", "pyramidkv_scope": "model"}, 'pyramidkv_scope: "model"'),
        ({"method": "squeezeattention", "squeezeattention_strength": -1}, "squeezeattention_strength: -1"),
        ({"method": "squeezeattention", "squeezeattention_strength": 1}, "squeezeattention_strength: 1"),
        ({"method": "snapkv", "snapkv_window": 600}, "snapkv_window: 600"),
        ({"method": "snapkv", "snapkv_kernel": 4}, "snapkv_kernel: 4"),
        ({"method": "snapkv", "snapkv_stride": 5}, "snapkv_stride: 5 has no meaning"),
        ({"method": "kivi", "kivi_bits": 5}, "kivi_bits: 5"),
        ({"method": "kivi", "kivi_bits": 8.0}, "kivi_bits: 8.0"),
        ({"method": "kivi", "kivi_group_size": 32.0}, "kivi_group_size: 32.0"),
        ({"method": ["h2o"]}, r"method: \['h2o'\]"),
        ({"method": "cam", "cam_merge": "no"}, "cam_merge: 'no'"),
        ({"method": "h2o", "h2o_literal": "False"}, "h2o_literal: 'False'"),
        ({"chunkkv_score": ["attn_mass"]}, r"chunkkv_score: \['attn_mass'\]"),
        ({"chunkkv_score": "key_norm", "chunkkv_decay": 0.9}, "chunkkv_decay: 0.9 has no meaning"),
        ({"chunkkv_score": "key_norm", "chunkkv_window": 8}, "chunkkv_window: 8 has no meaning"),
        ({"chunkkv_score": "observed", "chunkkv_stride": 8}, "chunkkv_stride: 8 has no meaning"),
        ({"method": "h2o", "h2o_budget": 64, "h2o_stride": 55, "h2o_recent": 40}, "h2o_stride: 55 .* = 20"),
        (
            {"method": "squeezeattention", "squeezeattention_budget": 64, "squeezeattention_stride": 30},
            "squeezeattention_stride: 30 .* = 12",
        ),
        ({"method": "kivi", "kivi_group_size": 16}, "kivi_group_size: 16"),
        ({"method": "kivi", "kivi_residual": -1}, "kivi_residual: -1"),
        ({"chunkkv_layer_reuse": 0}, "chunkkv_layer_reuse: 0"),
        ({"chunkkv_layer_reuse": 2, "chunkkv_scope": "model"}, "chunkkv_layer_reuse: 2"),
        ({"chunkkv_window": 0}, "chunkkv_window: 0"),
        ({"method": "full", "full_budget": 3}, "full_budget: no option"),
        ({"method": "h2o", "h2o_chunk_size": 3}, "h2o_chunk_size: no option"),
        ({"method": "h2o", "h2o_stride": 600}, "h2o_stride: 600"),
        ({"method": "tova", "tova_budget": True}, "tova_budget: True"),
        ({"method": "l2norm", "l2norm_recent": 512}, "l2norm_recent: 512"),
        ({"method": "streaming_llm", "streaming_llm_n_sink": 512}, "streaming_llm_n_sink: 512"),
    ],
)
def test_bad_options_name_the_option_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**options)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="pyramidkv_slope: 1"):
        build(3, "pyramidkv", slope=1.0)
    with pytest.raises(ValueError, match="pyramidkv_stride: 55 is larger than a layer's budget of 32"):
        build(3, "pyramidkv", budget=64, stride=55, recent=4)
    with pytest.raises(ValueError, match="h2o_recent: 4 has no meaning"):
        build(3, "h2o", literal=True, recent=4)
    config = KVCacheConfig(method="kivi", head_dim=48)
    with pytest.raises(ValueError, match="group_size: 32 does not divide head_dim 48"):
        config.build(1)


def test_every_method_says_where_it_stands() -> None:
    for name, options in METHODS.items():
        axes = options.axes
        assert all((axes.granularity, axes.trigger, axes.score, axes.budget)), name
        assert options.__module__ == f"kv.methods.{name}"
