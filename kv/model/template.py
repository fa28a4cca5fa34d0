"""A chat template taken apart, so that messages can enter and leave a stream one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kv.model.text import TextCodec

# Stands for a message's text; templates may strip or trim around text, so it has no white space.
_MARK = "\u2402keepwhole\u2403"


@dataclass(frozen=True)
class Wrapper:
    """The tokens that a template puts before and after a message's text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.before) + len(self.after)


class ChatTemplate:
    """What a model's chat template writes around each role's text.

    tokenizer: an object with `apply_chat_template`, as mlx-lm and transformers have it.

    system: opens the stream. user, assistant: the messages of a turn; `assistant.before` is the generation prompt.
    passage: a retrieved passage, as a message of its own: a system message where the template takes one anywhere,
    else a user message. Removing a message leaves a well-formed conversation.

    Raises ValueError if the template does not write a message's text verbatim between fixed text.
    """

    def __init__(self, tokenizer: Any, codec: TextCodec) -> None:
        self._tokenizer = tokenizer
        self._codec = codec
        self.system = self._first_message()
        self.user = self._message("user")
        self.assistant = self._answer()
        try:
            self.passage = self._message("system")
        except ValueError:
            self.passage = self.user

    def wrap(self, wrapper: Wrapper, text: str) -> list[int]:
        """The tokens of a whole message. The text is encoded as ordinary text."""
        return [*wrapper.before, *self._codec.encode(text), *wrapper.after]

    def unwrap(self, wrapper: Wrapper, tokens: Sequence[int]) -> str:
        """The text of a whole message: the inverse of `wrap`."""
        return self._codec.decode(tokens[len(wrapper.before) : len(tokens) - len(wrapper.after)])

    # The differences between two renderings show what one message adds.

    def _first_message(self) -> Wrapper:
        for role in ("system", "user"):
            try:
                return self._split(self._render([{"role": role, "content": _MARK}]))
            except ValueError:
                continue
        raise ValueError("the chat template takes neither a system nor a user message first")

    def _message(self, role: str) -> Wrapper:
        for start in (["system", "user", "assistant"], ["system"], ["user", "assistant"]):
            base = [{"role": r, "content": "x"} for r in start]
            try:
                return self._split(self._added(base, {"role": role, "content": _MARK}))
            except ValueError:
                continue
        raise ValueError(f"the chat template takes no {role} message after others")

    def _answer(self) -> Wrapper:
        base = [{"role": "user", "content": "x"}]
        asked = self._render(base)
        prompted = self._render(base, add_generation_prompt=True)
        wrapper = self._split(self._added(base, {"role": "assistant", "content": _MARK}))
        if not prompted.startswith(asked):
            raise ValueError("the chat template's generation prompt does not follow the question")
        return Wrapper(tuple(self._codec.encode_markup(prompted[len(asked) :])), wrapper.after)

    def _added(self, base: list[dict[str, str]], message: dict[str, str]) -> str:
        before, after = self._render(base), self._render([*base, message])
        if not after.startswith(before):
            raise ValueError("the chat template rewrites earlier messages")
        return after[len(before) :]

    def _split(self, text: str) -> Wrapper:
        if text.count(_MARK) != 1:
            raise ValueError("the chat template does not write a message's text verbatim")
        before, after = text.split(_MARK)
        return Wrapper(tuple(self._codec.encode_markup(before)), tuple(self._codec.encode_markup(after)))

    def _render(self, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # jinja2 templates raise what they like
            raise ValueError(f"the chat template refused {[m['role'] for m in messages]}: {error}") from error
        return text
