"""Sessions that decode together, against the same sessions alone and against stock mlx-lm."""

from __future__ import annotations

import dataclasses
import importlib
import tracemalloc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Attention

from kv import LoadedModel, Session
from kv.caches.policy import Pool, Score
from kv.cpu import attention as cpu_attention
from kv.session.session import NewBlock
from kv.session.together import run_together, step_together
from tests.kv.attention.test_observed import COMMON, FAMILIES, tiny
from tests.kv.feeding import tiny_llama
from tests.kv.streams import SYSTEM, WORDS, Stream, draft, likeliest, loaded, step, words

SCORES: list[Score] = ["attn_mass", "key_norm", "observed"]
POOLS: list[Pool] = ["mean", "max"]
PROMPT = NewBlock("answer", (3, 4, 5))


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded(tiny_llama(width=16, words=WORDS))


@pytest.fixture(params=["numpy", "mlx"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How each stream attends: as on the CPU, or as on a GPU and with other dtypes."""
    if request.param == "mlx":
        monkeypatch.setattr(cpu_attention, "serves", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("attention")
def test_sessions_of_very_different_lengths_get_the_logits_of_stock_mlx_lm(llama: LoadedModel) -> None:
    lengths = [60, 1000, 1, 333]
    sessions, texts = [], []
    for seed, length in enumerate(lengths):
        session = Session(llama, budget=1100, prefill_step=256)
        texts.append([*words(seed, length), *PROMPT.tokens])
        for _ in session.prefill([NewBlock("text", words(seed, length))], answer=PROMPT):
            pass
        sessions.append(session)
    tokens = [PROMPT.tokens[-1]] * len(sessions)
    stock = [make_prompt_cache(llama.model) for _ in sessions]
    for text, cache in zip(texts, stock, strict=True):
        llama.model(mx.array(text[:-1])[None], cache=cache)
    for _ in range(8):
        rows = step_together(sessions, tokens)
        for i, (token, cache) in enumerate(zip(tokens, stock, strict=True)):
            want = np.array(llama.model(mx.array([[token]]), cache=cache)[0, -1])
            np.testing.assert_allclose(np.array(rows[i]), want, atol=1e-4)
            tokens[i] = int(want.argmax())


def test_a_step_is_one_forward_pass(llama: LoadedModel) -> None:
    shapes: list[tuple[int, ...]] = []

    class Counting:
        layers = llama.model.layers

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            shapes.append(tokens.shape)
            logits: mx.array = llama.model(tokens, cache=cache)
            return logits

    model = dataclasses.replace(llama, model=Counting())
    streams = [Stream(model, seed, [20 + seed]) for seed in range(5)]
    tokens = [stream.token for stream in streams]
    sessions = [stream.batched for stream in streams]
    assert model.decodes_together
    shapes.clear()
    step_together(sessions, tokens)
    assert shapes == [(5, 1)]


@pytest.mark.usefixtures("attention")
def test_no_keys_or_values_are_copied(llama: LoadedModel) -> None:
    """A step over four long streams takes less memory, beyond that of short ones, than one layer's rows of one."""

    def extra(rows: int) -> int:
        streams = [Stream(llama, seed, [rows], budget=rows + 96, prefill_step=512) for seed in range(4)]
        sessions, tokens = [s.batched for s in streams], [s.token for s in streams]
        step_together(sessions, tokens)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        tracemalloc.start()
        step_together(sessions, tokens)
        _, numpy_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return mx.get_peak_memory() - before + numpy_peak

    one_layer = 2 * 2000 * 2 * 16 * 4
    assert extra(2000) - extra(20) < one_layer


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_drafts_leave_what_single_steps_leave(family: str) -> None:
    """Right, half right and wrong ones, beside a stream without: the same logits, books, rows and scores."""
    model = loaded(tiny(family)[0])
    streams = [Stream(model, seed, [30 + seed, 20]) for seed in range(3)]
    for right, wrong in (((3, 0, 0), (0, 2, 0)), ((2, 0, 1), (1, 0, 4)), ((0, 7, 0), (5, 0, 0))):
        draft(streams, right, wrong)
        for stream in streams:
            stream.check()
    step(streams)
    for stream in streams:
        stream.close(2, [1, 2])
        stream.evict("b0")
        stream.check()


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_drafts_leave_what_single_steps_leave(llama: LoadedModel, data: st.DataObject) -> None:
    streams = [Stream(llama, seed, [9, 4]) for seed in range(data.draw(st.integers(1, 3)))]
    counts = st.lists(st.integers(0, 3), min_size=len(streams), max_size=len(streams))
    for _ in range(data.draw(st.integers(1, 3))):
        draft(streams, data.draw(counts), data.draw(counts))
        if data.draw(st.booleans()) and "b0" in streams[0].batched.block_ids:
            streams[0].evict("b0")
    for stream in streams:
        stream.check()
        assert stream.batched.resident_tokens == stream.alone.resident_tokens
        assert len(stream.batched.resident_tokens) == stream.batched.tokens_kept


def test_drafts_wait_for_no_eviction_and_no_renumbering() -> None:
    model = loaded(tiny_llama(width=16, words=WORDS), context=64)
    stream = Stream(model, 1, [20, 10], budget=48)
    session = stream.batched
    assert session.room_for_draft == session.room - 1
    session.evict("b0")
    # There is room for more than there are positions.
    assert session.room_for_draft == 64 - session.position - 1 < session.room - 1
    with pytest.raises(ValueError, match=f"no room for {session.room + 1} more tokens in budget 48"):
        run_together([session], [[1] * (session.room + 1)])


def test_what_has_given_scores_is_not_rejected(llama: LoadedModel) -> None:
    stream = Stream(llama, 1, [20])
    run_together([stream.batched], [[1, 2, 3]])
    stream.batched.blocks()
    with pytest.raises(ValueError, match="the last 2 tokens have given scores"):
        stream.batched.reject(2)


def test_a_session_scored_by_observed_attention_takes_no_drafts(llama: LoadedModel) -> None:
    stream = Stream(llama, 1, [20], score="observed")
    kept = stream.batched.tokens_kept
    (rows,) = run_together([stream.batched], [[1, 2, 3]])
    assert len(rows) == 1
    assert stream.batched.tokens_kept == kept + 1
    assert stream.batched.lookup(7).draft(7) == []


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_joining_and_leaving_changes_no_other_answer(score: Score, kv_heads: int) -> None:
    model = loaded(tiny_llama(width=16, kv_heads=kv_heads, words=WORDS))
    first, second = Stream(model, 1, [30, 40], score=score), Stream(model, 20, [150], score=score, budget=200)
    step([first], 2)
    step([second, first], 3)
    third = Stream(model, 40, [9, 9, 9], score=score, pool="max")
    step([third, first, second], 3)
    first.evict("b0")
    step([second, third, first], 3)
    second.close(2, words(7, 4))
    step([first, third], 3)
    second.evict("b0")
    second.read([NewBlock("question", words(9, 12))])
    step([first, second, third], 3)
    for stream in (first, second, third):
        stream.check()


@pytest.mark.usefixtures("attention")
def test_sessions_of_different_scores_share_a_pass(llama: LoadedModel) -> None:
    streams = [
        Stream(llama, 10 * i, [30 + i, 20], score=score, pool=pool, budget=80 + i)
        for i, (score, pool) in enumerate((score, pool) for score in SCORES for pool in POOLS)
    ]
    step(streams, 5)
    for stream in streams:
        stream.check()


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = loaded(tiny(family)[0])
    assert model.decodes_together
    streams = []
    for seed, length in enumerate([40, 7, 90]):
        streams.append(Stream(model, 10 * seed, [length], score=SCORES[seed]))
    step(streams, 4)
    for stream in streams:
        stream.check()


@pytest.mark.parametrize("first", ["together", "observed"])
def test_observed_attention_is_seen_whichever_was_hooked_first(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_module = importlib.import_module("mlx_lm.models.llama")
    monkeypatch.setattr(llama_module, "scaled_dot_product_attention", scaled_dot_product_attention)
    monkeypatch.setattr(cpu_attention, "serves", lambda *_: False)
    model = loaded(tiny_llama(width=16, words=WORDS))
    if first == "together":
        assert model.decodes_together
    streams = [Stream(model, 10 * seed, [30 + seed], score="observed") for seed in range(3)]
    step(streams, 3)
    for stream in streams:
        stream.check()


def test_half_precision_is_left_to_mlx() -> None:
    half = tiny_llama(width=16, words=WORDS)
    half.set_dtype(mx.float16)
    streams = [Stream(loaded(half), seed, [30 + seed]) for seed in range(2)]
    rows = step_together([stream.batched for stream in streams], [5, 5])
    for logits, twin in zip(rows, [stream.alone for stream in streams], strict=True):
        assert logits.dtype == mx.float16
        np.testing.assert_allclose(np.array(logits), np.array(twin.step(5)), atol=2e-3)


def test_a_model_that_attends_in_its_own_way_is_stepped_one_after_another() -> None:
    module = importlib.import_module("mlx_lm.models.gemma2")
    args = module.ModelArgs(model_type="gemma2", head_dim=16, **{**COMMON, "vocab_size": WORDS, "rope_theta": 10000.0})
    model = loaded(module.Model(args))
    assert not model.decodes_together
    streams = [Stream(model, seed, [10 + seed]) for seed in range(3)]
    step(streams, 3)
    for stream in streams:
        stream.check()


class ScalingAttention(Attention):  # type: ignore[misc]
    """Attends to something else than what its cache returns."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        keys = self.rope(self.k_proj(x).reshape(*x.shape[:2], self.n_kv_heads, -1).swapaxes(1, 2), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, keys)
        output = scaled_dot_product_attention(keys, 2 * keys, values, cache=cache, scale=self.scale, mask=mask)
        return x + output.sum()


def test_a_model_that_attends_to_other_keys_than_it_caches_is_stepped_one_after_another() -> None:
    tiny_model = tiny_llama(width=16, words=WORDS)
    tiny_model.layers[1].self_attn = ScalingAttention(tiny_model.args)
    model = loaded(tiny_model)
    assert not model.decodes_together
    streams = [Stream(model, seed, [10 + seed]) for seed in range(3)]
    step(streams, 3)
    for stream in streams:
        stream.check()


def test_streams_longer_than_the_trained_context_are_renumbered_each_at_its_time() -> None:
    model = loaded(tiny_llama(width=16, words=WORDS), context=90)
    streams = [Stream(model, 10 * i, [20, 15 + i, 10], budget=80, score=SCORES[i]) for i in range(3)]
    renumbered = set()
    for round_ in range(12):
        for _ in range(6):
            before = [stream.batched.position for stream in streams]
            step(streams)
            renumbered |= {(i, round_) for i in range(3) if streams[i].batched.position < before[i]}
        stream = streams[round_ % 3]
        stream.close(stream.fed, [])
        stream.evict(stream.answer.id)
        stream.read([])
    for stream in streams:
        stream.check()
    assert len({i for i, _ in renumbered}) == 3
    assert len({round_ for _, round_ in renumbered}) > 1


def held(session: Session) -> list[Any]:
    caches = [[None if a is None else np.array(a).tolist() for a in cache.arrays] for cache in session._caches]
    return [session.tokens_seen, session.position, session._group.positions(), caches]


def test_what_cannot_be_done_is_refused_before_anything_is_changed(llama: LoadedModel) -> None:
    other = loaded(tiny_llama(width=16, words=WORDS))
    a, b, c = (Stream(model, seed, [30]).batched for seed, model in enumerate([llama, llama, other]))
    full = Stream(llama, 5, [30], budget=36).batched
    # The first would have to be renumbered.
    near = Stream(dataclasses.replace(llama, context_length=38), 6, [10, 20], budget=38)
    near.evict("b0")
    near.batched.step(1)
    near.batched.step(1)
    assert near.batched.position == near.batched.model.context_length
    sessions = [near.batched, a, b, c, full]
    before = [held(session) for session in sessions]
    for batch, tokens, message in [
        ([near.batched, a, full], [1, 1, 1], "no room for 1 more tokens in budget 36"),
        ([full], [1], "no room"),
        ([near.batched, a, a], [1, 1, 1], "a session comes twice"),
        ([near.batched, c], [1, 1], "different models"),
        ([near.batched, a, b], [1, 1], "2 tokens for 3 sessions"),
    ]:
        with pytest.raises(ValueError, match=message):
            step_together(batch, tokens)
    assert [held(session) for session in sessions] == before
    step_together([near.batched, a, b], [1, 1, 1])
    assert near.batched.position < near.batched.model.context_length


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("score", SCORES)
def test_sessions_go_on_once_rewound_after_a_pass_that_failed(score: Score) -> None:
    model = loaded(tiny_llama(width=16, words=WORDS))
    streams = [Stream(model, 10 * seed, [30 + seed], score=score) for seed in range(2)]
    step(streams, 2)
    mlp = model.model.layers[1].mlp

    def fails(_: mx.array) -> mx.array:
        raise RuntimeError("out of memory")

    model.model.layers[1].mlp = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        step_together([stream.batched for stream in streams], [1, 1])
    model.model.layers[1].mlp = mlp
    for stream in streams:
        for session in (stream.batched, stream.alone):
            session.rewind(stream.answer.id)
        stream.read([])
    step(streams, 3)
    for stream in streams:
        # Scores may differ by what the failed tokens had given to others, as after any `truncate`.
        got, want = stream.batched, stream.alone
        assert (got.tokens_seen, got.position, got.nbytes) == (want.tokens_seen, want.position, want.nbytes)
        assert got._group.positions() == want._group.positions()


def test_no_session_is_no_work() -> None:
    assert step_together([], []) == []


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_joins_leaves_and_is_evicted_each_answer_is_as_alone(data: st.DataObject) -> None:
    model = loaded(tiny_llama(width=8, layers=2, words=WORDS), context=data.draw(st.sampled_from([120, 4096])))
    streams: list[Stream] = []
    idle: list[Stream] = []
    seed = 0
    for _ in range(data.draw(st.integers(3, 12))):
        choices = ["join"] * (len(streams) < 4) + ["step"] * 3 * bool(streams)
        choices += ["evict", "leave"] * bool(streams) + ["return"] * bool(idle)
        match data.draw(st.sampled_from(choices)):
            case "join":
                seed += 1000
                blocks = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3))
                options = {
                    "budget": data.draw(st.integers(SYSTEM + sum(blocks) + 10, 120)),
                    "score": data.draw(st.sampled_from(SCORES)),
                    "pool": data.draw(st.sampled_from(POOLS)),
                    "prefill_step": data.draw(st.integers(1, 40)),
                }
                streams.append(Stream(model, seed, blocks, **options))
            case "step":
                some = data.draw(st.permutations(streams))[: data.draw(st.integers(1, len(streams)))]
                for _ in range(data.draw(st.integers(1, 4))):
                    step([stream for stream in some if stream.batched.room])
            case "evict":
                stream = data.draw(st.sampled_from(streams))
                free = [b.id for b in stream.alone.blocks() if not b.pinned and b.start >= 4]
                if free:
                    stream.evict(data.draw(st.sampled_from(free)))
            case "leave":
                stream = data.draw(st.sampled_from(streams))
                kept = data.draw(st.integers(-1, stream.fed))
                rest = words(seed, data.draw(st.integers(0, 3)))
                if len(rest) <= stream.batched.room:
                    stream.close(kept, rest)
                    idle.append(stream)
                    streams.remove(stream)
            case "return":
                stream = data.draw(st.sampled_from(idle))
                question = [NewBlock(f"q{stream.answers}", words(seed, data.draw(st.integers(1, 9))))]
                if stream.batched.room >= len(question[0].tokens) + 2:
                    stream.read(question)
                    streams.append(stream)
                    idle.remove(stream)
    for stream in [*streams, *idle]:
        stream.check()


@pytest.mark.model
@pytest.mark.slow
def test_eight_answers_of_the_real_model_are_those_alone(smollm2: LoadedModel) -> None:
    template, pick = smollm2.template, likeliest
    questions = ["Name a river.", "What is the capital of Norway?", "Count to five.", "What is rain?",
                 "Name three colours.", "Who wrote Hamlet?", "What is 2 + 2?", "Where do penguins live?"]  # fmt: skip

    def opened(i: int) -> Session:
        session = Session(smollm2, budget=900, prefill_step=128, score=SCORES[i % 2 * 2])
        text = "The ferry leaves the pier at noon and returns at six, unless the wind is from the west. " * (1 + 3 * i)
        parts = [
            NewBlock("system", template.wrap(template.system, "Answer in one sentence."), pinned=True),
            NewBlock("passage", template.wrap(template.passage, text)),
            NewBlock("question", template.wrap(template.user, questions[i]), pinned=True),
        ]
        for _ in session.prefill(parts, answer=NewBlock("answer", template.assistant.before)):
            pass
        return session

    # Each answers 12 tokens; session i joins at step i, and its passage is evicted after its sixth token.
    def feed(session: Session, given: list[int]) -> None:
        if len(given) == 6:
            session.evict("passage")

    start = template.assistant.before[-1]
    alone: list[list[int]] = []
    for i in range(8):
        session, given = opened(i), [start]
        while len(given) < 13:
            given.append(pick(session.step(given[-1])))
            feed(session, given)
        alone.append(given)
    sessions: list[Session] = []
    answers: list[list[int]] = []
    while len(sessions) < 8 or any(len(given) < 13 for given in answers):
        if len(sessions) < 8:
            sessions.append(opened(len(sessions)))
            answers.append([start])
        at_work = [i for i, given in enumerate(answers) if len(given) < 13]
        rows = step_together([sessions[i] for i in at_work], [answers[i][-1] for i in at_work])
        for i, logits in zip(at_work, rows, strict=True):
            answers[i].append(pick(logits))
            feed(sessions[i], answers[i])
    assert answers == alone


@pytest.mark.parametrize("score", SCORES)
def test_what_one_session_is_told_never_changes_anothers_logits(llama: LoadedModel, score: Score) -> None:
    """Bit for bit while they share passes, and as alone but for rounding."""

    def logits(secret: int | None) -> list[np.ndarray]:
        victim = Session(llama, budget=512, prefill_step=64, score=score)
        told = [NewBlock("system", words(1, SYSTEM), pinned=True), NewBlock("text", words(2, 90))]
        for _ in victim.prefill(told, answer=PROMPT):
            pass
        others: list[Session] = []
        if secret is not None:
            other = Session(llama, budget=512, prefill_step=64, score=score)
            for _ in other.prefill([NewBlock("secret", words(secret, 70))], answer=PROMPT):
                pass
            others.append(other)
        rows = []
        for number, token in enumerate(words(3, 12)):
            given = [token] * (1 + len(others))
            if others and number % 2:
                # On either side of the victim.
                rows.append(np.array(step_together([*others, victim], given)[-1]))
            else:
                rows.append(np.array(step_together([victim, *others], given)[0]))
        rows.append(np.array([block.score for block in victim.blocks()]))
        return rows

    alone, one, another = logits(None), logits(50), logits(60)
    for want, got, other in zip(alone, one, another, strict=True):
        np.testing.assert_array_equal(got, other)
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
