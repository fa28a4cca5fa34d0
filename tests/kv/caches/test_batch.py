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
from kv.caches.batch import BatchEvictingCache
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


def together(
    model: Any,
    caches: list[list[Any]],
    asked: list[list[int]],
    tokens: list[int],
    left: dict[int, list[Any]] | None = None,
) -> list[list[int]]:
    """The answers. left: takes the caches that each stream leaves, by its number."""
    generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=3, prefill_step_size=16)
    ids = generator.insert(asked, tokens, caches=caches)
    answers: dict[int, list[int]] = {id: [] for id in ids}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
            if left is not None and response.prompt_cache is not None:
                left[ids.index(response.uid)] = response.prompt_cache
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
    left: dict[int, list[Any]] = {}
    assert together(model, [build(model, method) for _ in LENGTHS], first, tokens, left) == expected
    batched = [left[number] for number in range(len(LENGTHS))]
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


@pytest.mark.parametrize("method", METHODS)
def test_a_caches_owner_keeps_it_as_it_was(method: str) -> None:
    """As with stock caches: a prefix may be lent to many streams at once, and taken out while its stream goes on."""
    model = tiny()
    prefix = build(model, method)
    alone(model, prefix, list(range(30)), 4)
    before = copy.deepcopy(prefix)
    asked = prompts(6)
    expected = [alone(model, copy.deepcopy(prefix), p, 8) for p in asked]
    assert together(model, [prefix] * len(asked), asked, [8] * 5) == expected
    assert [cache.offset for cache in prefix] == [cache.offset for cache in before]
    for ours, theirs in zip(prefix, before, strict=True):
        assert mx.array_equal(ours.state[0], theirs.state[0])
    assert alone(model, prefix, asked[0], 8) == expected[0]


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_system_prompt_that_the_server_keeps_stays_what_it_is(scope: str) -> None:
    """mlx_lm.server takes the cache out at the end of a segment, and stores it for the next request."""
    model = tiny()
    rng = np.random.default_rng(7)
    system, first, second = (rng.integers(0, WORDS, n).tolist() for n in (40, 25, 33))
    generator = BatchGenerator(model, prefill_step_size=16)
    (uid,) = generator.insert_segments([[system, first]], max_tokens=[6], caches=[build(model, "chunkkv", scope=scope)])
    kept: list[Any] = []
    finished = False
    while not finished:
        read, made = generator.next()
        for response in read:
            if response.end_of_segment and not kept:
                kept = generator.extract_cache([uid])[uid][0]
        finished = any(response.finish_reason for response in made)
    generator.close()
    assert [cache.offset for cache in kept] == [40] * len(kept)
    expected = build(model, "chunkkv", scope=scope)
    for start in range(0, 40, 16):
        model(mx.array(system[start : min(start + 16, 40)])[None], cache=expected)
    assert alone(model, kept, second, 8) == alone(model, expected, second, 8)


@pytest.mark.parametrize("method", [*UNEVEN, "literal", "declared"])
def test_layers_of_different_length_are_refused(method: str) -> None:
    model = tiny()
    asked = prompts(5)

    def make() -> list[Any]:
        if method in UNEVEN:
            return build(model, method)
        caches = build(model, "chunkkv", literal=method == "literal")
        if method == "declared":
            caches[1].group.declare(3, 9, "a")
        return caches

    with pytest.raises(ValueError, match="does not yet support batching"):
        together(model, [make() for _ in asked], asked, [5] * 5)


def test_streams_may_leave_while_prompts_are_read() -> None:
    caches = [build(tiny(), "chunkkv")[0] for _ in range(3)]
    batch = BatchEvictingCache(caches)
    batch.prepare(lengths=[3, 5, 4], right_padding=[2, 0, 1])
    batch.filter([0, 2])
    keys = mx.random.normal((2, 2, 5, 32))
    batch.update_and_fetch(keys, keys)
    assert [cache.tokens_kept for cache in batch.caches] == [3, 4]
    with pytest.raises(ValueError, match="batch of 3: 2 streams"):
        batch.update_and_fetch(mx.zeros((3, 2, 1, 32)), mx.zeros((3, 2, 1, 32)))


def test_padding_on_the_left_is_refused() -> None:
    batch = BatchEvictingCache(build(tiny(), "chunkkv"))
    with pytest.raises(ValueError, match=r"left_padding: \[1, 0\]"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(ValueError, match="lengths"):
        batch.prepare(right_padding=[1, 0, 0])
    with pytest.raises(ValueError, match="window_size"):
        batch.make_mask(3, window_size=2)
