"""Blocks that leave a stream and come back without a pass: against stock mlx-lm with a cache put together in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kv import KVCacheBuilder, KVCacheConfig, LoadedModel, Session
from kv.caches.blockkv import BlockKV
from kv.session.session import NewBlock
from tests.kv.feeding import tiny_llama
from tests.kv.streams import loaded, words

LAYERS, WIDTH, WORDS = 3, 16, 100
SYSTEM, PASSAGE, OTHER, QUESTION = list(range(8)), list(range(10, 30)), list(range(40, 75)), list(range(80, 90))


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_llama(width=WIDTH, layers=LAYERS, words=WORDS)


def fresh(model: Any, budget: int = 128, score: str = "attn_mass") -> list[Any]:
    config = KVCacheConfig(chunkkv_budget=budget, chunkkv_scope="model", chunkkv_score=score)
    return KVCacheBuilder.for_model(model, config)


def run(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array(tokens)[None], cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def ropes(model: Any) -> list[Any]:
    return [layer.self_attn.rope for layer in model.layers]


def lifted(model: Any) -> BlockKV:
    """The passage's K/V, computed right behind the system prompt."""
    caches = fresh(model)
    group = caches[0].group
    group.declare(8, 28, "passage")
    run(model, caches, SYSTEM + PASSAGE)
    return group.lift("passage")


def rotate(keys: np.ndarray, delta: int, theta: float = 10000.0) -> np.ndarray:
    """RoPE by `delta` positions, in NumPy: the two halves of each key are pairs' first and second coordinates."""
    half = keys.shape[-1] // 2
    angle = delta * theta ** (-np.arange(half) / half)
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)], axis=-1
    )


def put_together(model: Any, recompute: int, after: list[int]) -> np.ndarray:
    """Logits of stock mlx-lm after [system][other][passage][question], the passage's rows moved in from elsewhere."""
    alone = make_prompt_cache(model)
    run(model, alone, SYSTEM + PASSAGE)
    cache = make_prompt_cache(model)
    run(model, cache, SYSTEM + OTHER + PASSAGE[:recompute])
    for layer, source in zip(cache, alone, strict=True):
        begin = len(SYSTEM) + recompute
        keys, values = (np.array(a)[:, :, begin:28] for a in source.state[:2])
        layer.update_and_fetch(mx.array(rotate(keys, len(OTHER)).astype(np.float32)), mx.array(values))
    return np.array(run(model, cache, after))


@pytest.mark.parametrize("score", ["attn_mass", "key_norm", "observed"])
@pytest.mark.parametrize("recompute", [0, 3])
def test_an_inserted_block_is_what_numpy_would_have_put_there(tiny: Any, recompute: int, score: str) -> None:
    kv = lifted(tiny)
    caches = fresh(tiny, score=score)
    group = caches[0].group
    run(tiny, caches, SYSTEM + OTHER)
    position = group.position
    group.declare(position, position + 20, "passage")
    if recompute:
        run(tiny, caches, PASSAGE[:recompute])
    rest = kv.after(recompute)
    assert rest is not None
    group.insert([rest], ropes(tiny))
    assert group.find("passage").complete
    assert {cache.offset for cache in caches} == {63}
    logits = np.array(run(tiny, caches, QUESTION))
    np.testing.assert_allclose(logits, put_together(tiny, recompute, QUESTION), atol=1e-5)
    assert len(group.scores()) == len(group.units())


def test_a_block_moves_backwards_too(tiny: Any) -> None:
    """Lifted late in one stream, put in early in another."""
    caches = fresh(tiny)
    group = caches[0].group
    group.declare(8, 43, "other")
    group.declare(43, 63, "passage")
    run(tiny, caches, SYSTEM + OTHER + PASSAGE)
    late = group.lift("passage")
    again = fresh(tiny)
    run(tiny, again, SYSTEM)
    again[0].group.declare(8, 28, "passage")
    again[0].group.insert([late], ropes(tiny))
    # What is left when the other block goes sits where it was, and sees the same from there: positions are relative.
    group.evict("other")
    group.rebase(ropes(tiny))
    ours, theirs = (np.array(run(tiny, held, QUESTION)) for held in (again, caches))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_blocks_that_come_and_go_keep_the_books_straight(tiny: Any) -> None:
    kv = lifted(tiny)
    caches = fresh(tiny, budget=80)
    group = caches[0].group
    run(tiny, caches, SYSTEM)
    for turn in range(40):
        position = group.position
        group.declare(position, position + 20, f"passage {turn}")
        group.insert([kv], ropes(tiny))
        group.declare(position + 20, position + 30, f"question {turn}")
        run(tiny, caches, QUESTION)
        while group.rows > 50:
            group.evict(next(unit.block for unit in group.units() if unit.block))
    kept = group.lift(group.units()[-2].block)
    np.testing.assert_allclose(np.array(kept.values[1]), np.array(kv.values[1]), atol=0)
    np.testing.assert_allclose(np.array(kept.keys[1]), rotate(np.array(kv.keys[1]), kept.start - kv.start), atol=1e-4)


def test_several_blocks_go_in_at_once_as_one_by_one(tiny: Any) -> None:
    kv = lifted(tiny)
    other = fresh(tiny)
    other[0].group.declare(8, 43, "other")
    run(tiny, other, SYSTEM + OTHER)
    blocks = [kv, other[0].group.lift("other"), kv]
    together, singly = fresh(tiny), fresh(tiny)
    for caches in (together, singly):
        run(tiny, caches, SYSTEM)
    together[0].group.insert(blocks, ropes(tiny))
    for block in blocks:
        singly[0].group.insert([block], ropes(tiny))
    assert together[0].group.positions() == singly[0].group.positions()
    np.testing.assert_allclose(
        np.array(run(tiny, together, QUESTION)), np.array(run(tiny, singly, QUESTION)), atol=1e-5
    )


def test_what_cannot_be_lifted_or_inserted_says_so(tiny: Any) -> None:
    kv = lifted(tiny)
    caches = fresh(tiny, budget=30)
    group = caches[0].group
    run(tiny, caches, SYSTEM)
    group.open_block("open")
    run(tiny, caches, QUESTION)
    with pytest.raises(KeyError):
        group.lift("open")
    with pytest.raises(KeyError):
        group.lift("nobody")
    group.close_block()
    with pytest.raises(ValueError, match="20 tokens to insert, room for 12 in budget 30"):
        group.insert([kv], ropes(tiny))
    with pytest.raises(ValueError, match="K/V of 2 layers, the model has 3"):
        group.insert(
            [BlockKV(0, [k[:, :, :5] for k in kv.keys[:2]], [v[:, :, :5] for v in kv.values[:2]])], ropes(tiny)
        )
    with pytest.raises(ValueError, match="does not continue"):
        group.insert([BlockKV(0, [k[:, :1, :5] for k in kv.keys], [v[:, :1, :5] for v in kv.values])], ropes(tiny))
    assert group.rows == group.position == 18


def test_a_saved_block_comes_back_as_it_was_or_not_at_all(tiny: Any, tmp_path: Path) -> None:
    kv = lifted(tiny)
    file = tmp_path / "block.safetensors"
    digest = kv.save(file, "passage")
    loaded = BlockKV.load(file, "passage", digest)
    assert (loaded.start, loaded.tokens, loaded.nbytes) == (kv.start, kv.tokens, kv.nbytes)
    for ours, theirs in zip([*kv.keys, *kv.values], [*loaded.keys, *loaded.values], strict=True):
        assert mx.array_equal(ours, theirs)
    with pytest.raises(ValueError, match="name is 'passage', not 'another'"):
        BlockKV.load(file, "another", digest)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        BlockKV.load(file, "passage", digest)
    file.write_bytes(data[:100])
    with pytest.raises(ValueError, match="checksum"):
        BlockKV.load(file, "passage", digest)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        BlockKV.load(file, "passage", digest)


@pytest.mark.model
def test_a_session_answers_the_same_when_a_block_left_and_came_back(smollm2: LoadedModel) -> None:
    t = smollm2.template
    system = NewBlock("system", t.wrap(t.system, "Answer in one sentence."), pinned=True)
    passage = NewBlock("passage", t.wrap(t.passage, "Keepwhole was first shown in a harbour office in Tromso."))
    question = NewBlock("question", t.wrap(t.user, "Where was Keepwhole first shown?"), pinned=True)

    def answer(session: Session) -> np.ndarray:
        prompt = NewBlock("answer", t.assistant.before)
        for _ in session.prefill([question], answer=prompt):
            pass
        return np.array(session.step(prompt.tokens[-1]))

    def read(*blocks: NewBlock) -> Session:
        session = Session(smollm2, budget=512, prefill_step=64)
        for _ in session.prefill(blocks):
            pass
        return session

    session = read(system, passage)
    kv = session.lift("passage")
    session.evict("passage")
    with pytest.raises(ValueError, match="K/V of 19 tokens for 3"):
        session.insert([(NewBlock("passage", [1, 2, 3]), kv)])
    session.insert([(passage, kv)])
    again = read(system)
    again.insert([(passage, kv)], recompute=10**6)
    expected = answer(read(system, passage))
    # The first has come back further on: the gap that it left is still there, to all who look back.
    assert int(answer(session).argmax()) == int(expected.argmax())
    np.testing.assert_allclose(answer(again), expected, atol=2e-3)


def test_blocks_are_taken_out_together_or_not_at_all() -> None:
    model = loaded(tiny_llama(width=16, words=WORDS))
    one, other = (Session(model, budget=512, prefill_step=64) for _ in range(2))
    blocks = [NewBlock("system", SYSTEM, pinned=True), *(NewBlock(f"b{i}", words(i, 20)) for i in range(4))]
    for session in (one, other):
        for _ in session.prefill(blocks):
            pass
    with pytest.raises(ValueError, match="system"):
        one.take_out(["b1", "system"])
    with pytest.raises(KeyError, match="b9"):
        one.take_out(["b1", "b9"])
    assert one.block_ids == other.block_ids
    taken = one.take_out(["b2", "b0"])
    for kv, name in zip(taken, ["b2", "b0"], strict=True):
        want = other.lift(name)
        assert kv.start == want.start
        for got_, want_ in zip((*kv.keys, *kv.values), (*want.keys, *want.values), strict=True):
            np.testing.assert_array_equal(np.array(got_), np.array(want_))
    for name in ("b2", "b0"):
        other.evict(name)
    assert one.block_ids == other.block_ids == ["system", "b1", "b3"]
    for cache, same in zip(one._caches, other._caches, strict=True):
        for got_, want_ in zip(cache.arrays, same.arrays, strict=True):
            np.testing.assert_array_equal(np.array(got_), np.array(want_))
