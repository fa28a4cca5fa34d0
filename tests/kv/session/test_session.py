"""The session on the real model, against stock mlx-lm with a full cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from kv import LoadedModel, Session, load_model
from kv.session.session import NewBlock
from tests.kv.streams import likeliest

pytestmark = pytest.mark.model

PASSAGES = [
    "The Danube rises in Donaueschingen and flows into the Black Sea.",
    "Keepwhole was first shown in a harbour office in Tromso.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
]


def blocks(model: LoadedModel, *texts: str) -> list[NewBlock]:
    t = model.template
    system = NewBlock("system", t.wrap(t.system, "Answer in one sentence."), pinned=True)
    return [system, *(NewBlock(f"p{i}", t.wrap(t.passage, text)) for i, text in enumerate(texts))]


def flat(parts: list[NewBlock]) -> list[int]:
    return [token for part in parts for token in part.tokens]


def stock_logits(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    return np.array(model.model(mx.array(tokens)[None], cache=make_prompt_cache(model.model))[0, -1])


def run(session: Session, parts: list[NewBlock], answer: NewBlock | None = None) -> None:
    for _ in session.prefill(parts, answer=answer):
        pass


@pytest.mark.parametrize("step", [1000, 64, 7])
def test_an_unfilled_budget_gives_the_full_caches_logits(smollm2: LoadedModel, step: int) -> None:
    session = Session(smollm2, budget=512, prefill_step=step)
    parts = blocks(smollm2, *PASSAGES)
    prompt = NewBlock("answer", smollm2.template.assistant.before)
    run(session, parts[:2])
    run(session, parts[2:], prompt)
    logits = np.array(session.step(prompt.tokens[-1]))
    np.testing.assert_allclose(logits, stock_logits(smollm2, flat(parts) + list(prompt.tokens)), atol=2e-3)


def test_blocks_leave_whole_and_the_rest_stays_where_it_was(smollm2: LoadedModel) -> None:
    session = Session(smollm2, budget=512, prefill_step=64)
    parts = blocks(smollm2, *PASSAGES)
    run(session, parts)
    before = {block.id: block for block in session.blocks()}
    evicted = session.evict("p1")
    assert (evicted.block, evicted.tokens, evicted.start) == ("p1", len(parts[2].tokens), before["p1"].start)
    after = {block.id: block for block in session.blocks()}
    assert set(after) == {"system", "p0", "p2"}
    assert all(after[name].start == before[name].start for name in after)
    assert session.tokens_kept == sum(len(p.tokens) for p in parts) - len(parts[2].tokens)
    with pytest.raises(KeyError):
        session.evict("p1")
    with pytest.raises(ValueError, match="pinned"):
        session.evict("system")


def test_what_does_not_fit_is_refused_before_anything_is_streamed(smollm2: LoadedModel) -> None:
    session = Session(smollm2, budget=40, prefill_step=64)
    parts = blocks(smollm2, *PASSAGES)
    with pytest.raises(ValueError, match=r"\d+ tokens to stream, room for 40 in budget 40"):
        run(session, parts)
    assert session.tokens_kept == session.tokens_seen == 0


def test_a_stopped_prefill_leaves_whole_blocks_only(smollm2: LoadedModel) -> None:
    session = Session(smollm2, budget=512, prefill_step=8)
    parts = blocks(smollm2, *PASSAGES)
    for done in session.prefill(parts, answer=NewBlock("a", smollm2.template.assistant.before)):
        if done > len(parts[0].tokens) + 4:
            break
    session.drop_unfinished()
    assert [block.id for block in session.blocks()] == ["system"]
    rest = parts[1:]
    prompt = NewBlock("a", smollm2.template.assistant.before)
    run(session, rest, prompt)
    logits = np.array(session.step(prompt.tokens[-1]))
    np.testing.assert_allclose(logits, stock_logits(smollm2, flat(parts) + list(prompt.tokens)), atol=2e-3)


def test_an_answer_is_closed_to_exactly_the_tokens_asked_for(smollm2: LoadedModel) -> None:
    session = Session(smollm2, budget=512, prefill_step=64)
    parts = blocks(smollm2, PASSAGES[0])
    prompt = NewBlock("answer", smollm2.template.assistant.before)
    run(session, parts, prompt)
    pick = likeliest
    tokens = [prompt.tokens[-1]]
    for _ in range(6):
        tokens.append(pick(session.step(tokens[-1])))
    kept, rest = len(prompt.tokens) + 3, list(smollm2.template.assistant.after)
    session.close_answer(kept, rest)
    held = [*prompt.tokens, *tokens[1:4], *rest]
    assert {b.id: b.tokens for b in session.blocks()}["answer"] == len(held)
    question = NewBlock("q", smollm2.template.wrap(smollm2.template.user, "And then?"))
    second = NewBlock("answer2", smollm2.template.assistant.before)
    session.pin("answer", False)
    run(session, [question], second)
    logits = np.array(session.step(second.tokens[-1]))
    everything = flat(parts) + held + list(question.tokens) + list(second.tokens)
    np.testing.assert_allclose(logits, stock_logits(smollm2, everything), atol=2e-3)


def test_rewind_forgets_a_block_and_all_after_it(smollm2: LoadedModel) -> None:
    session = Session(smollm2, budget=512, prefill_step=64)
    run(session, blocks(smollm2, *PASSAGES))
    session.rewind("p1")
    assert [block.id for block in session.blocks()] == ["system", "p0"]


def test_a_stream_longer_than_the_trained_context_is_renumbered_and_answers_alike(
    smollm2: LoadedModel,
) -> None:
    """Moved keys must equal keys computed at the new place: compared through the next-token logits."""
    short = dataclasses.replace(smollm2, context_length=150)
    session = Session(short, budget=140, prefill_step=64)
    system, p0, _, p2 = blocks(smollm2, *PASSAGES)
    run(session, [system, p0])
    for i in range(8):
        run(session, [NewBlock(f"x{i}", p2.tokens)])
        session.evict(f"x{i}")
    assert session.tokens_seen > 150 >= session.position
    prompt = NewBlock("answer", smollm2.template.assistant.before)
    run(session, [], prompt)
    logits = np.array(session.step(prompt.tokens[-1]))
    expected = stock_logits(smollm2, flat([system, p0]) + list(prompt.tokens))
    # The answer's position differs by the gap that evicted blocks left, until the next renumbering: same top token,
    # and equal logits once renumbered.
    session.rewind("answer")
    session._group.rebase(short.ropes)
    run(session, [], prompt)
    np.testing.assert_allclose(np.array(session.step(prompt.tokens[-1])), expected, atol=5e-3)
    assert logits.argmax() == expected.argmax()


def test_a_budget_beyond_the_trained_context_is_refused(smollm2: LoadedModel) -> None:
    with pytest.raises(ValueError, match="budget: 9000 tokens"):
        Session(smollm2, budget=9000, prefill_step=256)


def test_quantised_weights_are_the_same_model(smollm2: LoadedModel) -> None:
    """The path of Metal and CUDA, dequantised by mlx-lm to float32, against what is served on the CPU."""
    quantised = load_model(on_gpu=True)
    assert quantised.nbytes < 110e6
    assert smollm2.nbytes < 110e6
    # First: scales of 16 bits would give weights of 16 bits, which are rounded.
    quantised.model.set_dtype(mx.float32)
    stock = dequantize_model(quantised.model)
    tokens = mx.array([smollm2.codec.encode(PASSAGES[0] * 3)])
    want = np.array(stock(tokens))
    got = np.array(smollm2.model(tokens))
    assert np.abs(got - want).max() < 1e-4 * np.ptp(want)
    for length in (1, 2, 5, 9):
        want = np.array(stock(tokens[:, :length]))
        assert np.abs(np.array(smollm2.model(tokens[:, :length])) - want).max() < 1e-4 * np.ptp(want)


def test_a_saved_session_goes_on_where_it_was(smollm2: LoadedModel, tmp_path: Path) -> None:
    session = Session(smollm2, budget=160, prefill_step=64)
    parts = blocks(smollm2, *PASSAGES)
    run(session, parts)
    session.evict("p1")
    file = tmp_path / "session.safetensors"
    digest = session.save(file, "ada")
    loaded = Session.load(smollm2, file, "ada", digest)
    assert loaded.blocks() == session.blocks()
    for name in ("tokens_kept", "tokens_seen", "position", "room", "budget", "prefill_step", "nbytes"):
        assert getattr(loaded, name) == getattr(session, name)
    question = smollm2.template.wrap(smollm2.template.user, "Where does the Danube rise?")
    prompt = NewBlock("answer", smollm2.template.assistant.before)
    logits = []
    for each in (session, loaded):
        run(each, [NewBlock("question", question, pinned=True)], prompt)
        logits.append(np.array(each.step(prompt.tokens[-1])))
        each.close_answer(len(prompt.tokens), smollm2.template.assistant.after)
    np.testing.assert_array_equal(*logits)
    assert loaded.evict("p0") == session.evict("p0")
    with pytest.raises(ValueError, match="name is 'ada', not 'ben'"):
        Session.load(smollm2, file, "ben", digest)
    other = dataclasses.replace(smollm2, name="other")
    object.__setattr__(other, "fingerprint", b"other")
    with pytest.raises(ValueError, match="model is"):
        Session.load(other, file, "ada", digest)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="checksum"):
        Session.load(smollm2, file, "ada", digest)
