"""Batches in mlx-lm's own batch generator: each stream comes out as if it had run alone."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from kv import KVCacheBuilder, KVCacheConfig
from kv.batch import BatchEvictingCache
from tests.kv.test_mlx_lm import SMALL, WORDS, tiny

UNEVEN = ["pyramidkv", "squeezeattention"]
METHODS = [name for name in SMALL if name not in (*UNEVEN, "kivi")]
LENGTHS = [70, 3, 41, 90, 1]


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, WORDS, length).tolist() for length in LENGTHS]


def alone(model: Any, caches: list[Any], prompt: list[int], tokens: int) -> list[int]:
    stream = generate_step(mx.array(prompt), model, max_tokens=tokens, prompt_cache=caches, prefill_step_size=16)
    return [int(token) for token, _ in stream]


def together(model: Any, caches: list[list[Any]], asked: list[list[int]], tokens: list[int]) -> list[list[int]]:
    generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=3, prefill_step_size=16)
    ids = generator.insert(asked, tokens, caches=caches)
    answers: dict[int, list[int]] = {id: [] for id in ids}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
    generator.close()
    return [answers[id] for id in ids]


def build(model: Any, method: str, **options: Any) -> list[Any]:
    named = {f"{method}_{name}": value for name, value in options.items()}
    return KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **{**SMALL[method], **named}))


@pytest.mark.parametrize("method", METHODS)
def test_each_stream_answers_as_it_does_alone(method: str) -> None:
    model = tiny()
    tokens = [12, 30, 5, 20, 40]
    first, second = prompts(1), prompts(2)
    expected = [alone(model, build(model, method), p, n) for p, n in zip(first, tokens, strict=True)]
    batched = [build(model, method) for _ in LENGTHS]
    assert together(model, batched, first, tokens) == expected
    for caches in batched:
        for cache in caches:
            if method not in ("full", "snapkv"):
                assert cache.tokens_kept <= cache.layer_budget
    # What a batch leaves in the caches goes on alone, and in another batch.
    copies = copy.deepcopy(batched)
    more = [alone(model, c, p, 8) for c, p in zip(copies, second, strict=True)]
    assert together(model, batched, second, [8] * 5) == more


@pytest.mark.parametrize("scope", ["head", "model"])
@pytest.mark.parametrize("score", ["attn_mass", "observed"])
def test_every_scope_and_observed_attention_in_a_batch(scope: str, score: str) -> None:
    model = tiny()
    asked = prompts(3)
    expected = [alone(model, build(model, "chunkkv", scope=scope, score=score), p, 20) for p in asked]
    assert (
        together(model, [build(model, "chunkkv", scope=scope, score=score) for _ in asked], asked, [20] * 5) == expected
    )


def test_with_room_for_everything_a_batch_is_stock_mlx_lms() -> None:
    model = tiny()
    asked = prompts(4)
    ours = together(model, [build(model, "chunkkv", budget=512) for _ in asked], asked, [15] * 5)
    assert ours == together(model, [make_prompt_cache(model) for _ in asked], asked, [15] * 5)


@pytest.mark.parametrize("method", UNEVEN)
def test_layers_of_different_length_are_refused(method: str) -> None:
    model = tiny()
    asked = prompts(5)
    with pytest.raises(ValueError, match="does not yet support batching"):
        together(model, [build(model, method) for _ in asked], asked, [5] * 5)


def test_padding_on_the_left_is_refused() -> None:
    batch = BatchEvictingCache(build(tiny(), "chunkkv"))
    with pytest.raises(ValueError, match=r"left_padding: \[1, 0\]"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(ValueError, match="lengths"):
        batch.prepare(right_padding=[1, 0, 0])
    with pytest.raises(ValueError, match="window_size"):
        batch.make_mask(3, window_size=2)
