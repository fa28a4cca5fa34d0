"""How tokens are chosen, against mlx-lm's own samplers and processors."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from kv.model.sampling import Sampler, Sampling, candidates, log_softmax


def logits(seed: int, size: int = 400) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).normal(size=size) * 3).astype(np.float32)


def oracle(row: np.ndarray[Any, Any], sampling: Sampling) -> list[int]:
    """The tokens that mlx-lm's chain leaves."""
    left = mx.array(log_softmax(row))[None]
    if sampling.top_p < 1:
        left = apply_top_p(left, sampling.top_p)
    if sampling.min_p:
        left = apply_min_p(left, sampling.min_p)
    if sampling.top_k:
        left = apply_top_k(left, sampling.top_k)
    return np.flatnonzero(np.isfinite(np.array(left[0]))).tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 399]),
)
def test_the_tokens_that_may_come_are_those_of_mlx_lm(seed: int, top_p: float, min_p: float, top_k: int) -> None:
    row, sampling = logits(seed), Sampling(top_p=top_p, min_p=min_p, top_k=top_k)
    assert sorted(candidates(row, sampling)[0].tolist()) == oracle(row, sampling)


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.9},
    ],
)
def test_penalties_are_those_of_mlx_lm_over_the_whole_answer(penalties: dict[str, float]) -> None:
    bias = {3: 4.0, 7: -100.0}
    contexts = {name.replace("penalty", "context_size"): 10_000 for name in penalties}
    processors = make_logits_processors(bias, **penalties, **contexts)
    sampler = Sampler(Sampling(logit_bias=bias, logprobs=0, **penalties))
    said: list[int] = []
    for step in range(60):
        row = logits(step % 5, 40)
        expected = mx.array(row)[None]
        for processor in processors:
            expected = processor(mx.array(said, dtype=mx.int32), expected)
        chosen = sampler.choose(mx.array(row))
        assert chosen.token == int(mx.argmax(expected).item())
        reference = np.array(expected[0] - mx.logsumexp(expected[0]))
        assert chosen.logprob == pytest.approx(reference[chosen.token], abs=1e-4)
        said.append(chosen.token)
    assert len(set(said)) > 3


def test_draws_follow_the_probabilities_at_the_temperature() -> None:
    row = np.array([2.0, 1.0, 0.0, -1.0, -30.0], dtype=np.float32)
    sampler = Sampler(Sampling(temperature=0.7, seed=5))
    # Of one token each: an answer of its own, without penalties.
    counts = np.bincount([sampler.choose(mx.array(row)).token for _ in range(20_000)], minlength=5) / 20_000
    weights = np.exp(row / 0.7)
    np.testing.assert_allclose(counts, weights / weights.sum(), atol=0.012)


def test_a_seed_gives_the_same_answer_whoever_else_draws() -> None:
    def answer(seed: int | None, others: int) -> list[int]:
        sampler, other = Sampler(Sampling(temperature=1.5, seed=seed)), Sampler(Sampling(temperature=1))
        said = []
        for step in range(50):
            for _ in range(others):
                other.choose(mx.array(logits(step)))
            said.append(sampler.choose(mx.array(logits(step))).token)
        return said

    assert answer(7, 0) == answer(7, 3)
    assert answer(7, 0) != answer(8, 0)
    assert answer(None, 0) != answer(None, 0)


def test_log_probabilities_come_with_the_likeliest() -> None:
    row = logits(1)
    chosen = Sampler(Sampling(logprobs=5)).choose(mx.array(row))
    order = np.argsort(-row)[:5]
    assert [token for token, _ in chosen.top] == order.tolist()
    expected = np.array(mx.array(row) - mx.logsumexp(mx.array(row)))[order]
    np.testing.assert_allclose([logprob for _, logprob in chosen.top], expected, atol=1e-5)
    assert Sampler(Sampling()).choose(mx.array(row)).logprob is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 2.1}, "temperature: 2.1 is not between 0 and 2"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0}, "top_p: 0 is not more than 0"),
        ({"top_p": 1.01}, "top_p: 1.01"),
        ({"top_k": -1}, "top_k: -1"),
        ({"min_p": 1.5}, "min_p: 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: 1e-300 is not between 0.01 and 2"),
        ({"presence_penalty": 3}, "presence_penalty: 3"),
        ({"frequency_penalty": -2.5}, "frequency_penalty: -2.5"),
        ({"logit_bias": {5: 101}}, "logit_bias: 101 for token 5"),
        ({"logit_bias": {-5: 1}}, "logit_bias: -5 is not a token id"),
        ({"logprobs": 21}, "logprobs: 21"),
        ({"seed": 2**63}, "seed: 9223372036854775808"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        Sampling(**given)


def test_a_models_own_configuration_is_what_it_asks_for() -> None:
    asked = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "eos_token_id": 2,
    }
    assert Sampling.of_generation_config(asked) == Sampling(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1
    )
    assert Sampling.of_generation_config({**asked, "do_sample": False}) == Sampling(repetition_penalty=1.1)
    assert Sampling.of_generation_config({"bos_token_id": 1}) == Sampling()
    assert Sampling.of_generation_config({"do_sample": True}) == Sampling(temperature=1.0)
    with pytest.raises(ValueError, match="top_p"):
        Sampling.of_generation_config({**asked, "top_p": 7})
