"""Text codec and chat template on the embedded tokenizer, against transformers' own calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv import LoadedModel
from kv.model.template import ChatTemplate

pytestmark = pytest.mark.model

# U+FFFD itself is left out: at the very end of a stream it cannot be told from an unfinished character. So is what
# SmolLM2's vocabulary has no bytes for: six control characters, and everything beyond U+3FFFF.
LEFT_OUT = "\ufffd\x04\x06\x13\x14\x16\x1d"
text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=LEFT_OUT, max_codepoint=0x3FFFF))
spiced = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<repo_name>", " ", "\n"]) | text
).map("".join)


@settings(max_examples=200, deadline=None)
@given(spiced)
def test_ordinary_text_never_becomes_a_control_token_and_comes_back(smollm2: LoadedModel, text: str) -> None:
    ids = smollm2.codec.encode(text)
    assert smollm2.codec.control_ids.isdisjoint(ids)
    assert smollm2.codec.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(spiced)
def test_streamed_deltas_join_to_the_text_and_tear_no_character(smollm2: LoadedModel, text: str) -> None:
    stream = smollm2.codec.stream()
    deltas = [stream.push(token) for token in smollm2.codec.encode(text)]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_is_held_back(smollm2: LoadedModel) -> None:
    ids = smollm2.codec.encode("ok \U0001f9ff")
    stream = smollm2.codec.stream()
    said = "".join(stream.push(token) for token in ids[:-1])
    assert said.rstrip() == "ok"
    assert smollm2.codec.decode(ids[: stream.complete]) == said


def test_bytes_that_never_become_text_do_not_hold_the_stream_for_ever(smollm2: LoadedModel) -> None:
    (broken,) = set(smollm2.codec.encode("\U0001f9ff")[-1:])
    stream = smollm2.codec.stream()
    said = "".join(stream.push(token) for token in [broken] * 12 + smollm2.codec.encode("then this"))
    assert said.endswith("then this")
    assert "\ufffd" not in said


def test_messages_one_by_one_are_what_the_template_writes_at_once(smollm2: LoadedModel) -> None:
    t = smollm2.template
    messages = [
        ("system", t.system, "Be brief."),
        ("system", t.passage, "Paris."),
        ("user", t.user, "Where?"),
    ]
    ids = [token for _, wrapper, content in messages for token in t.wrap(wrapper, content)]
    ids += t.assistant.before
    expected = t._tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, _, content in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ids == smollm2.codec.encode_markup(expected)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Gemma's shape: no system role, strict alternation.
ALTERNATING = (
    "{% for m in messages %}{% if m['role'] == 'system' or (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
SWALLOWING = "{% for m in messages %}hello{% endfor %}"


def with_template(model: LoadedModel, template: str) -> ChatTemplate:
    class Templated:
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
            inner = model.template._tokenizer
            return inner.apply_chat_template(messages, chat_template=template, **options)

    return ChatTemplate(Templated(), model.codec)


def test_templates_without_system_messages_carry_passages_as_user_messages(smollm2: LoadedModel) -> None:
    plain = with_template(smollm2, CHATML)
    assert plain.passage != plain.user
    strict = with_template(smollm2, ALTERNATING)
    assert strict.passage == strict.user
    assert smollm2.codec._markup.decode(list(strict.assistant.before), skip_special_tokens=False).endswith("model\n")


def test_a_template_that_hides_the_text_is_refused(smollm2: LoadedModel) -> None:
    with pytest.raises(ValueError, match="chat template"):
        with_template(smollm2, SWALLOWING)
