from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.turns.answer import AnswerText, Written
from app.turns.stop import StopText
from kv.model import smollm2
from kv.model.text import TextCodec

pytestmark = pytest.mark.model

# What SmolLM2's vocabulary cannot say, and U+FFFD, which no stream can tell from an unfinished character.
LEFT_OUT = "\ufffd\x04\x06\x13\x14\x16\x1d"
PIECES = [
    *("👩‍👩‍👧‍👦", "🇳🇴", "👍🏽", "🧿", "e\u0301", "a\u0323\u0302", "한", "漢字かな", "العربية", "ไทย", "\u200d"),
    *("hello", " world", "\n\n", "END", "###", "  ", "<|im_end|>", "12", "."),
]
texts = st.lists(
    st.sampled_from(PIECES)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters=LEFT_OUT, max_codepoint=0x3FFFF), max_size=4)
).map("".join)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """The embedded model's tokenizer, without its weights."""
    loaded: Any = mx.load(str(smollm2.gguf_path()), return_metadata=True)
    return TextCodec(smollm2._tokenizer(loaded[1]))


def nested(stops: Sequence[str]) -> bool:
    return any(inner in outer[1:-1] for inner in stops for outer in stops)


@st.composite
def stopped_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stop strings of which some are in it or begin in it. None ends before one that began earlier."""
    text = draw(texts)
    stops = draw(st.lists(st.sampled_from([*PIECES, "zz", "END OF", "👩‍👩‍👧X"]), max_size=2))
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text)))
        stops.append(text[start : start + draw(st.integers(1, 12))] + draw(st.sampled_from(["", "", "?"])))
    stops = [stop for stop in stops if stop]
    return text, stops if not nested(stops) else stops[:1]


def before_stops(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def tokens_of(codec: TextCodec, text: str, one_by_one: bool) -> list[int]:
    return [token for part in text for token in codec.encode(part)] if one_by_one else codec.encode(text)


def write(answer: AnswerText, tokens: Sequence[int]) -> tuple[str, Written]:
    """What is shown if the tokens come until the answer ends, and the answer."""
    shown = ""
    for token in tokens:
        shown += answer.push(token)
        if answer.reason is not None:
            break
    shown += answer.flush()
    return shown, answer.finish(answer.reason or "stop")


def check(codec: TextCodec, answer: AnswerText, written: Written) -> None:
    """What holds of any written answer."""
    generated = answer.token_ids
    assert codec.decode(written.token_ids) == written.text
    assert written.token_ids[: written.whole] == generated[: written.whole]
    assert all(
        not written.text.startswith(codec.decode(generated[:n])) for n in range(written.whole + 1, len(generated) + 1)
    )
    if written.whole:
        assert len(codec.decode(generated[: written.whole])) <= len(written.text)


@settings(deadline=None, max_examples=200)
@given(stopped_texts(), st.booleans())
def test_what_is_shown_is_the_text_before_the_first_stop(codec: TextCodec, case, one_by_one: bool) -> None:
    text, stops = case
    answer = AnswerText(codec, stops, max_tokens=10_000, may_loop=True)
    shown, written = write(answer, tokens_of(codec, text, one_by_one))
    assert shown == written.text == before_stops(text, stops)
    assert answer.reason == ("stop" if any(stop in text for stop in stops) else None)
    check(codec, answer, written)


@settings(deadline=None)
@given(stopped_texts(), st.booleans(), st.integers(1, 12))
def test_an_answer_of_the_most_tokens_ends_by_length_unless_a_stop_ended_it(
    codec: TextCodec, case, one_by_one: bool, most: int
) -> None:
    text, stops = case
    tokens = tokens_of(codec, text, one_by_one)
    answer = AnswerText(codec, stops, max_tokens=most, may_loop=True)
    shown, written = write(answer, tokens)
    readable = codec.decode(tokens[:most]).rstrip("\ufffd")
    assert shown == written.text == before_stops(readable, stops)
    assert len(answer.token_ids) <= most
    if any(stop in readable for stop in stops):
        assert answer.reason == "stop"
    else:
        assert answer.reason == ("length" if len(tokens) >= most else None)
    check(codec, answer, written)


def test_a_stop_split_over_tokens_is_held_back_and_never_shown(codec: TextCodec) -> None:
    tokens = [token for part in ["Yes.", "S", "T", "O", "P", " and more"] for token in codec.encode(part)]
    answer = AnswerText(codec, ["STOP"], max_tokens=100)
    pushes = [answer.push(token) for token in tokens]
    assert ("".join(pushes), answer.flush(), answer.reason) == ("Yes.", "", "stop")
    assert answer.finish("stop") == Written("Yes.", codec.encode("Yes."), 2, "stop")


def test_a_stop_that_never_completes_is_shown_once_nothing_follows(codec: TextCodec) -> None:
    tokens = [token for part in ["Yes.", "S", "T", "O"] for token in codec.encode(part)]
    answer = AnswerText(codec, ["STOP"], max_tokens=100)
    assert "".join(answer.push(token) for token in tokens) == "Yes."
    assert answer.flush() == "STO"
    assert answer.flush() == ""
    assert answer.finish("cancelled") == Written("Yes.STO", tokens, len(tokens), "cancelled")


def test_a_token_that_runs_past_the_start_of_a_stop_is_written_anew_up_to_it(codec: TextCodec) -> None:
    tokens = codec.encode("The answer is wonderful")
    assert codec.decode(tokens[-1:]) == " wonderful"
    shown, written = write(AnswerText(codec, ["derful"], max_tokens=100), tokens)
    assert shown == written.text == "The answer is won"
    assert (written.whole, written.token_ids) == (3, [*tokens[:3], *codec.encode(" won")])


def test_an_answer_cut_inside_a_character_ends_before_it(codec: TextCodec) -> None:
    tokens = codec.encode("ok🧿")
    answer = AnswerText(codec, [], max_tokens=len(tokens) - 1)
    shown, written = write(answer, tokens)
    assert (shown, answer.reason) == ("ok", "length")
    assert written == Written("ok", codec.encode("ok"), 1, "length")


@pytest.mark.parametrize(("stops", "reason"), [([], "length"), (["day"], "stop"), (["days"], "length")])
def test_a_stop_at_the_last_token_counts_as_a_stop(codec: TextCodec, stops, reason) -> None:
    tokens = codec.encode("Good day")
    answer = AnswerText(codec, stops, max_tokens=len(tokens))
    answer.push(tokens[0])
    assert answer.reason is None
    answer.push(tokens[1])
    assert answer.reason == reason


def test_an_answer_without_a_token_is_empty(codec: TextCodec) -> None:
    assert AnswerText(codec, ["x"], max_tokens=5).finish("stop") == Written("", [], 0, "stop")


def test_the_tokens_say_what_was_shown_even_if_the_model_wrote_bytes_that_are_no_text(codec: TextCodec) -> None:
    lead = codec.encode("🧿")[0]
    tokens = [*codec.encode("ok "), lead, *codec.encode("yes")]
    _, written = write(AnswerText(codec, [], max_tokens=100), tokens)
    assert codec.decode(written.token_ids) == written.text


letters = st.text("ab", max_size=4)
some_stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(letters, max_size=8), some_stops)
def test_only_what_may_still_become_a_stop_is_held_back(chunks: list[str], stops: list[str]) -> None:
    stop_text = StopText(stops)
    came = shown = ""
    for chunk in chunks:
        new = stop_text.push(chunk)
        if stop_text.hit:
            break
        came, shown = came + chunk, shown + new
        assert not any(stop in came for stop in stops)
        longest = max((n for stop in stops for n in range(len(stop)) if came.endswith(stop[:n])), default=0)
        assert shown == came[: len(came) - longest]
    assert stop_text.hit == any(stop in "".join(chunks) for stop in stops)
    if not stop_text.hit:
        assert shown + stop_text.flush() == came


@given(st.lists(letters, max_size=8), some_stops.filter(lambda stops: not nested(stops)))
def test_the_text_is_cut_at_the_first_stop_however_it_comes(chunks: list[str], stops: list[str]) -> None:
    stop_text = StopText(stops)
    shown = "".join([*(stop_text.push(chunk) for chunk in chunks), stop_text.flush()])
    assert shown == before_stops("".join(chunks), stops)


def test_nothing_comes_out_after_a_hit() -> None:
    stop_text = StopText(["ab"])
    assert stop_text.push("x ab y a") == "x "
    assert stop_text.hit
    assert [stop_text.push("more"), stop_text.push(""), stop_text.flush()] == ["", "", ""]


@pytest.mark.parametrize("stops", [[], [""]])
def test_no_stop_holds_nothing_back(stops: list[str]) -> None:
    stop_text = StopText(stops)
    assert [stop_text.push("a"), stop_text.push("b"), stop_text.flush()] == ["a", "b", ""]
    assert not stop_text.hit


def test_a_stop_inside_another_cuts_at_the_same_place_however_the_text_comes() -> None:
    def cut(*chunks: str) -> str:
        stop_text = StopText(["abcd", "c"])
        return "".join(stop_text.push(chunk) for chunk in chunks)

    assert cut("abcd") == cut("a", "b", "c", "d")
