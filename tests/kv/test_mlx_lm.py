"""The caches in mlx-lm's own loops, as its users run them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import batch_generate, generate_step, stream_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from kv import KVCacheBuilder, KVCacheConfig
from kv.methods import METHODS
from kv.model.loading import load_model
from tests.kv.feeding import tiny_llama

LAYERS, WIDTH, WORDS = 3, 32, 200
BUDGET = 48
SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "chunkkv": {"chunkkv_budget": BUDGET},
    "h2o": {"h2o_budget": BUDGET},
    "snapkv": {"snapkv_budget": BUDGET, "snapkv_window": 8},
    "streaming_llm": {"streaming_llm_budget": BUDGET},
    "tova": {"tova_budget": BUDGET},
    "pyramidkv": {"pyramidkv_budget": BUDGET, "pyramidkv_recent": 4},
    "squeezeattention": {"squeezeattention_budget": BUDGET, "squeezeattention_recent": 4},
    "l2norm": {"l2norm_budget": BUDGET},
    "cam": {"cam_budget": BUDGET},
    "kivi": {"kivi_bits": 8},
}


def tiny(kv_heads: int = 2) -> Any:
    return tiny_llama(width=WIDTH, kv_heads=kv_heads, layers=LAYERS, words=WORDS)


def turn(model: Any, caches: list[Any], prompt: list[int], *, step: int = 16, tokens: int = 5) -> list[int]:
    stream = generate_step(mx.array(prompt), model, max_tokens=tokens, prompt_cache=caches, prefill_step_size=step)
    return [int(token) for token, _ in stream]


def test_every_method_is_tried() -> None:
    assert SMALL.keys() == METHODS.keys()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("method", SMALL)
def test_ten_turns_of_many_tokens_in_stock_generation(method: str, kv_heads: int) -> None:
    model = tiny(kv_heads)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, head_dim=WIDTH, **SMALL[method]))
    rng = np.random.default_rng(4)
    seen = 0
    for _ in range(10):
        prompt = rng.integers(0, WORDS, 37).tolist()
        answer = turn(model, caches, prompt)
        assert len(answer) == 5
        # mlx-lm works one token ahead: the last one it gives out has been fed too.
        seen += len(prompt) + len(answer)
        assert {cache.offset for cache in caches} == {cache.tokens_seen for cache in caches} == {seen}
        if method not in ("full", "kivi"):
            grown = len(answer) if method == "snapkv" else 0
            assert all(cache.tokens_kept <= cache.layer_budget + grown for cache in caches)


@pytest.mark.parametrize("method", [name for name in SMALL if name != "kivi"])
def test_with_room_for_everything_generation_is_the_full_caches(method: str) -> None:
    model = tiny()
    options = {name: 512 if name.endswith("_budget") else value for name, value in SMALL[method].items()}
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **options))
    stock = make_prompt_cache(model)
    rng = np.random.default_rng(5)
    for _ in range(4):
        prompt = rng.integers(0, WORDS, 37).tolist()
        assert turn(model, caches, prompt, step=11) == turn(model, stock, prompt, step=64)


def test_kivi_of_8_bits_stays_close_to_the_full_cache() -> None:
    model = tiny()
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", kivi_bits=8))
    stock = make_prompt_cache(model)
    tokens = mx.array(np.random.default_rng(6).integers(0, WORDS, 150))[None]
    for start, stop in ((0, 100), (100, 149), (149, 150)):
        ours, theirs = (np.array(model(tokens[:, start:stop], cache=cache)) for cache in (caches, stock))
    np.testing.assert_allclose(ours, theirs, atol=0.02)
    assert not np.array_equal(ours, theirs)


@pytest.mark.parametrize("method", SMALL)
def test_a_copied_prompt_cache_goes_its_own_way(method: str) -> None:
    """mlx_lm.server copies a prompt's caches for each request."""
    model = tiny()
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **SMALL[method]))
    rng = np.random.default_rng(7)
    turn(model, caches, rng.integers(0, WORDS, 60).tolist())
    copies = copy.deepcopy(caches)
    prompt = rng.integers(0, WORDS, 30).tolist()
    first = turn(model, copies, prompt)
    turn(model, copies, rng.integers(0, WORDS, 90).tolist())
    assert turn(model, caches, prompt) == first


@pytest.mark.parametrize(
    ("method", "scope"),
    [
        (method, scope)
        for method in SMALL
        if method not in ("full", "kivi")
        for scope in ("head", "layer", "model")
        # Their layers keep different budgets, and are refused with scope "model".
        if scope != "model" or method not in ("pyramidkv", "squeezeattention")
    ],
)
def test_a_saved_prompt_cache_goes_on_where_it_was(tmp_path: Path, method: str, scope: str) -> None:
    model = tiny()
    options = {**SMALL[method], f"{method}_scope": scope}
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **options))
    rng = np.random.default_rng(8)
    for _ in range(3):
        turn(model, caches, rng.integers(0, WORDS, 41).tolist())
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches, {"for": "a test"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"for": "a test"}
    for ours, theirs in zip(caches, loaded, strict=True):
        for name in ("offset", "tokens_seen", "tokens_kept", "layer_budget", "method", "policy"):
            assert getattr(ours, name) == getattr(theirs, name)
    for _ in range(3):
        prompt = rng.integers(0, WORDS, 41).tolist()
        assert turn(model, caches, prompt) == turn(model, loaded, prompt)
    assert [cache.group.positions() for cache in caches] == [cache.group.positions() for cache in loaded]


def test_declared_blocks_are_saved_with_the_prompt_cache(tmp_path: Path) -> None:
    model = tiny()
    config = KVCacheConfig(chunkkv_budget=64, chunkkv_scope="model")
    caches = KVCacheBuilder.for_model(model, config)
    caches[0].group.declare(5, 25, "passage", pinned=True)
    caches[0].group.declare(30, 55, "code", relevance=0.5)
    turn(model, caches, list(range(40)))
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert len({id(cache.group) for cache in loaded}) == 1
    prompt = list(range(100, 190))
    assert turn(model, caches, prompt) == turn(model, loaded, prompt)
    assert caches[0].group.units() == loaded[0].group.units()
    assert "passage" in [unit.block for unit in loaded[0].group.units()]
    for cache in (caches[0], loaded[0]):
        cache.group.pin("passage", False)
    assert caches[0].group.evict("passage") == loaded[0].group.evict("passage")


@pytest.mark.parametrize(
    "options",
    [
        {"method": "kivi", "kivi_bits": 4},
        {"chunkkv_budget": 32, "chunkkv_literal": True},
        {"method": "h2o", "h2o_budget": 32, "h2o_literal": True, "h2o_score": "key_norm"},
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_methods_with_books_of_their_own_go_on_where_they_were(
    tmp_path: Path, options: dict[str, Any], copied: bool
) -> None:
    model = tiny()
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(**options))
    turn(model, caches, list(range(80)))
    if copied:
        loaded = copy.deepcopy(caches)
    else:
        file = str(tmp_path / "prompt.safetensors")
        save_prompt_cache(file, caches)
        loaded = load_prompt_cache(file)
    for start in (20, 100):
        prompt = list(range(start, start + 50))
        assert turn(model, caches, prompt) == turn(model, loaded, prompt)
    for ours, theirs in zip(caches, loaded, strict=True):
        for first, second in zip(ours.state[:2], theirs.state[:2], strict=True):
            assert mx.array_equal(first, second)
        for name in ("offset", "tokens_seen", "tokens_kept", "nbytes"):
            assert getattr(ours, name) == getattr(theirs, name)


def test_make_cache_serves_every_request_anew() -> None:
    model = tiny()
    model.make_cache = KVCacheBuilder.factory(model, KVCacheConfig(chunkkv_budget=32))
    prompt = list(range(100))
    answers = [turn(model, None, prompt) for _ in range(2)]  # type: ignore[arg-type]
    assert answers[0] == answers[1]


@pytest.mark.model
def test_the_readmes_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "kv" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) <= 20
    exec(compile(code, "kv/README.md", "exec"), {})
    shown = capsys.readouterr().out
    seen, kept = re.findall(r"(\d+) tokens seen, (\d+) kept", shown)[-1]
    assert int(seen) > 60
    assert int(kept) <= 256


TEN_TURNS = {
    **{method: {} if method in ("full", "kivi") else {f"{method}_budget": 192} for method in METHODS},
    "chunkkv, observed": {"chunkkv_budget": 192, "chunkkv_score": "observed"},
    "chunkkv, model": {"chunkkv_budget": 192, "chunkkv_scope": "model"},
    "chunkkv, literal": {"chunkkv_budget": 192, "chunkkv_literal": True},
}


# What does with keys what another case does, waits for `pytest -m slow`.
LIKE_OTHERS = (
    "chunkkv, model",
    "chunkkv, observed",
    "full",
    "h2o",
    "snapkv",
    "streaming_llm",
    "tova",
    "l2norm",
    "pyramidkv",
    "squeezeattention",
    "cam",
    "kivi",
)


@pytest.mark.model
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LIKE_OTHERS else []) for case in TEN_TURNS]
)
def test_the_real_model_goes_on_for_ten_turns_of_many_tokens(case: str) -> None:
    """How many each method answers rightly is for tests/benchmarks/turns.py; those that must, must here."""
    loaded = load_model()
    method = case.partition(",")[0]
    caches = KVCacheBuilder.for_model(loaded.model, KVCacheConfig(method=method, head_dim=64, **TEN_TURNS[case]))
    exact = case in ("chunkkv, observed", "streaming_llm")
    right = 0
    for number in range(10):
        told = f"Question {number}: the ferry to the island leaves at {number + 6} o'clock. "
        text = told * (4 if exact else 2) + "When does it leave?"
        prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        assert len(prompt) > 50
        tokens = 16 if exact else 2
        parts = list(stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=tokens, prompt_cache=caches))
        assert all(np.isfinite(np.array(part.logprobs)).all() for part in parts)
        if method not in ("full", "kivi", "snapkv"):
            kept = [cache.tokens_kept for cache in caches]
            assert all(cache.tokens_kept <= cache.layer_budget for cache in caches)
            assert sum(kept) <= 192 * len(caches)
        right += str(number + 6) in "".join(part.text for part in parts)
    assert caches[0].offset > 500
    if exact:
        assert right >= 8


@pytest.mark.model
def test_batch_generate_gives_the_real_model_each_its_own_answer() -> None:
    loaded = load_model()
    questions = ("What is a cat?", "Name the capital of France, and say one sentence about it.")
    prompts = [
        loaded.tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
        for q in questions
    ]

    def fresh() -> list[Any]:
        return KVCacheBuilder.for_model(loaded.model, KVCacheConfig(chunkkv_budget=48))

    alone = []
    for prompt in prompts:
        parts = stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=24, prompt_cache=fresh())
        alone.append("".join(part.text for part in parts))
    together = batch_generate(loaded.model, loaded.tokenizer, prompts, prompt_caches=[fresh(), fresh()], max_tokens=24)
    assert together.texts == alone


def test_the_readmes_table_of_methods_is_the_codes() -> None:
    readme = (Path(__file__).parents[2] / "kv" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", readme, flags=re.M)
    assert rows == list(METHODS)
