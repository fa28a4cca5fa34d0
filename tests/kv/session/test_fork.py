"""Sessions that begin as copies of others, and the logits that come with the last pass, against stock mlx-lm."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kv import LoadedModel, Session
from kv.caches.policy import Score
from kv.session.session import NewBlock
from tests.kv.feeding import tiny_llama
from tests.kv.streams import SYSTEM, WORDS, loaded, words

TEXT = 300


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded(tiny_llama(width=16, words=WORDS))


def stock(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    return np.array(model.model(mx.array(tokens)[None], cache=make_prompt_cache(model.model))[0, -1])


def read(session: Session, *blocks: NewBlock, answer: NewBlock | None = None) -> list[int]:
    return list(session.prefill(blocks, answer=answer, logits=answer is not None))


def filled(model: LoadedModel, score: Score = "attn_mass") -> tuple[Session, list[int]]:
    session = Session(model, budget=512, prefill_step=64, score=score)
    system, text = words(1, SYSTEM), words(2, TEXT)
    read(session, NewBlock("system", system, pinned=True), NewBlock("text", text))
    return session, [*system, *text]


@pytest.mark.parametrize("score", ["attn_mass", "key_norm", "observed"])
def test_a_fork_and_its_origin_go_their_own_ways(llama: LoadedModel, score: Score) -> None:
    origin, told = filled(llama, score)
    fork = origin.fork({"system": "s", "text": "t"})
    assert (origin.block_ids, fork.block_ids) == (["system", "text"], ["s", "t"])
    for session, seed in ((origin, 3), (fork, 4), (origin, 5), (fork, 6)):
        more = words(seed, 20)
        before = told if seed < 5 else [*told, *words(seed - 2, 20)]
        if seed < 5:
            read(session, NewBlock(f"b{seed}", more))
        else:
            read(session, answer=NewBlock("answer", more))
            assert session.next_logits is not None
            np.testing.assert_allclose(np.array(session.next_logits), stock(llama, [*before, *more]), atol=1e-4)
    # What one evicts the other still has, and their scores are those of their own streams.
    fork.evict("t")
    assert [block.id for block in origin.blocks()] == ["system", "text", "b3", "answer"]
    assert [block.id for block in fork.blocks()] == ["s", "b4", "answer"]
    twin, _ = filled(llama, score)
    read(twin, NewBlock("b3", words(3, 20)))
    read(twin, answer=NewBlock("answer", words(5, 20)))
    np.testing.assert_allclose(
        [block.score for block in origin.blocks()], [block.score for block in twin.blocks()], rtol=1e-4
    )


def test_k_v_is_shared_until_one_of_the_two_stores_something(llama: LoadedModel) -> None:
    origin, _ = filled(llama)
    mx.eval([cache.arrays for cache in origin._caches])
    gc.collect()
    before = mx.get_active_memory()
    forks = [origin.fork({"system": "s", "text": "t"}) for _ in range(5)]
    mx.eval([cache.arrays for fork in forks for cache in fork._caches])
    assert mx.get_active_memory() - before < origin.nbytes / 10
    read(forks[0], NewBlock("more", words(9, 5)))
    assert mx.get_active_memory() - before >= origin.nbytes / 2


def test_a_block_without_a_name_is_refused_and_nothing_changes(llama: LoadedModel) -> None:
    origin, told = filled(llama)
    with pytest.raises(KeyError, match="text"):
        origin.fork({"system": "s"})
    assert origin.block_ids == ["system", "text"]
    read(origin, answer=NewBlock("answer", [7, 8]))
    np.testing.assert_allclose(np.array(origin.next_logits), stock(llama, [*told, 7, 8]), atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("step", [1, 48, 256])
def test_the_logits_come_with_the_last_pass(llama: LoadedModel, length: int, step: int) -> None:
    session = Session(llama, budget=512, prefill_step=step)
    text, prompt = words(1, length), words(2, 3)
    done = read(session, NewBlock("text", text), answer=NewBlock("answer", prompt))
    np.testing.assert_allclose(np.array(session.next_logits), stock(llama, [*text, *prompt]), atol=1e-4)
    passes = np.diff([0, *done])
    assert done[-1] == length + 3 == session.tokens_kept
    assert passes.max() <= step
    # Logits are made for every token of the pass that has them.
    assert passes[-1] <= 64
    # They are of that moment: the next stream has none until it is read.
    session.close_answer(3, [])
    read(session, NewBlock("more", words(3, 2)))
    assert session.next_logits is None
