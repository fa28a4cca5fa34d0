"""Request bodies in OpenAI's shape. What cannot be done is refused by name; what changes no answer is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from app.conversations import History
from app.turns.request import Question
from app.web.bodies import FilterBody, check_stops
from kv.model.sampling import Sampling

_DEFAULT_TOP_K = 4
_MAX_TOP_K = 20
_MAX_INPUTS = 2048


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class StreamOptions(_Body):
    """include_usage: whether a last piece says how many tokens there were. include_obfuscation: taken, adds nothing."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a message; only those of type "text" can be read."""

    type: str
    text: str | None = None


class ChatMessage(_Body):
    """A message. What a client sends back of an answer beside its text is not looked at."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = None


class Retrieval(_Body):
    """Which passages are looked for. top_k: how many, 0 to 20."""

    top_k: int = _DEFAULT_TOP_K
    filter: FilterBody | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.top_k <= _MAX_TOP_K:
            raise ValueError(f"retrieval.top_k: {self.top_k} is not between 0 and {_MAX_TOP_K}")


class ChatBody(_Body):
    """A chat completion. Beside OpenAI's fields:

    top_k, min_p, repetition_penalty: of sampling, as other servers have them. allow_repetition: as in
    `app.web.bodies.AskBody`. retrieval: false for none, or which passages are looked for.
    user, metadata, store, service_tier, safety_identifier, prompt_cache_key, parallel_tool_calls: change no answer.
    """

    model: str
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    allow_repetition: bool = False
    retrieval: bool | Retrieval | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        if self.n not in (None, 1):
            raise ValueError(f"n: {self.n} answers; there is one to a question")
        if self.tools:
            raise ValueError(f"tools: {len(self.tools)} given; tools are not supported")
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError(f"tool_choice: {str(self.tool_choice)[:40]!r} given; tools are not supported")
        if self.modalities not in (None, ["text"]):
            raise ValueError(f"modalities: {self.modalities} given; only text is supported")
        if self.response_format is not None and self.response_format.get("type") != "text":
            kind = str(self.response_format.get("type"))[:40]
            raise ValueError(f"response_format: {kind!r} is not supported; only text is")
        for name in ("max_tokens", "max_completion_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: {value} is not at least 1")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs: {self.top_logprobs} given; it needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: given without stream")
        check_stops(self.stop_strings)
        Sampling(**self.sampling)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> dict[str, Any]:
        """What is given of how tokens are chosen."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        given = {name: getattr(self, name) for name in (*names, "seed", "logit_bias")}
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return {name: value for name, value in given.items() if value is not None}

    def to_conversation(self, *, retrieves: bool) -> tuple[History, Question]:
        """What came before, and what is asked. retrieves: whether passages are looked for if it is not said."""
        talk = _taken_apart(self.messages)
        wanted = Retrieval() if retrieves else Retrieval(top_k=0)
        if self.retrieval is not None:
            wanted = self.retrieval if isinstance(self.retrieval, Retrieval) else Retrieval()
            if self.retrieval is False:
                wanted = Retrieval(top_k=0)
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        question = Question(
            content=talk.question,
            top_k=wanted.top_k,
            filter=wanted.filter.to_filter() if wanted.filter else None,
            max_tokens=most,
            sampling=self.sampling,
            stop=tuple(self.stop_strings),
            at_most=True,
            allow_repetition=self.allow_repetition,
        )
        return History(talk.system, talk.exchanges), question


class EmbeddingBody(_Body):
    """Texts to embed. dimensions: must be the embedder's own."""

    model: str
    input: str | list[str]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if self.encoding_format not in (None, "float", "base64"):
            raise ValueError(f"encoding_format: {self.encoding_format[:40]!r} is not one of float, base64")
        if not 1 <= len(self.texts) <= _MAX_INPUTS:
            raise ValueError(f"input: {len(self.texts)} texts are not between 1 and {_MAX_INPUTS}")
        for index, text in enumerate(self.texts):
            if not text:
                raise ValueError(f"input: text {index} is empty")

    @property
    def texts(self) -> list[str]:
        """`input` as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


@dataclass(frozen=True)
class _Talk:
    system: str | None
    exchanges: list[tuple[str, str]]
    question: str


def _taken_apart(messages: list[ChatMessage]) -> _Talk:
    """The system prompt, exchanges, and the question that is last. Messages of one role in a row are one.

    Raises ValueError naming the message for what is no such conversation.
    """
    if not messages:
        raise ValueError("messages: none; at least one of role user is needed")
    turns: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        if role not in ("system", "user", "assistant"):
            raise ValueError(
                f"messages.{index}.role: {message.role[:40]!r} is not one of system, developer, user, assistant"
            )
        if message.tool_calls:
            raise ValueError(f"messages.{index}.tool_calls: {len(message.tool_calls)} given; tools are not supported")
        text = _text(message, index)
        if turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((role, text))
    system = turns.pop(0)[1] if turns[0][0] == "system" else None
    # What is said to the model in between is no message of the user's, and nothing else in a session.
    if any(role == "system" for role, _ in turns):
        raise ValueError("messages: one of role system stands after others; only at the start is it supported")
    if not turns or turns[-1][0] != "user":
        raise ValueError(f"messages.{len(messages) - 1}.role: the last message must be the user's")
    if turns[0][0] == "assistant":
        # A greeting: said to nobody's question.
        turns.insert(0, ("user", ""))
    if not any(character.isprintable() and not character.isspace() for character in turns[-1][1]):
        raise ValueError(f"messages.{len(messages) - 1}.content: has no text; at least one visible character is needed")
    pairs = list(zip(turns[0:-1:2], turns[1:-1:2], strict=True))
    return _Talk(system, [(asked, said) for (_, asked), (_, said) in pairs], turns[-1][1])


def _text(message: ChatMessage, index: int) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise ValueError(
                f"messages.{index}.content.{number}.type: {part.type[:40]!r} is not supported; only text is"
            )
    return "".join(part.text or "" for part in message.content)
