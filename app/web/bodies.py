"""Request bodies. Each checks its own limits; a message names the field, the value and the limit."""

from __future__ import annotations

from typing import Any

import msgspec

from app.chat import NewSession
from app.turns.request import Question
from ingest.records import Filter
from kv.model.sampling import Sampling

_MAX_TOP_K = 20
_MAX_STOPS = 4
_MAX_STOP_CHARS = 64
_MAX_TITLE_CHARS = 200


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class DocumentBody(_Body):
    """A document as JSON. media_type: guessed from the name when absent. metadata: a flat JSON object."""

    name: str
    text: str
    media_type: str | None = None
    metadata: dict[str, Any] | None = None


class FilterBody(_Body):
    """Which passages are searched; every condition given must hold. metadata: equal values.

    path: of the document's name. With * (any characters, / too) or ? (any one) all of the name, as in docs/*.md;
    without, a file or a folder with all that is in it, as in docs.
    """

    document_id: str | list[str] | None = None
    name: str | None = None
    path: str | None = None
    kind: str | None = None
    metadata: dict[str, Any] = {}

    def to_filter(self) -> Filter:
        """The library's own filter."""
        return Filter(
            document_id=self.document_id, name=self.name, path=self.path, kind=self.kind, metadata=self.metadata
        )


class SearchBody(_Body):
    """A search. top_k: most passages returned, 1 to 50."""

    query: str
    top_k: int = 5
    filter: FilterBody | None = None


class SessionBody(_Body):
    """A new session; every field has a default.

    budget_tokens: most tokens its KV cache keeps per layer. method: "chunkkv". score: "attn_mass" or "key_norm".
    """

    title: str = ""
    system_prompt: str | None = None
    budget_tokens: int | None = None
    method: str = "chunkkv"
    score: str = "attn_mass"

    def __post_init__(self) -> None:
        _check_title(self.title)
        _one_of("method", self.method, ("chunkkv",))
        _one_of("score", self.score, ("attn_mass", "key_norm"))
        if self.budget_tokens is not None:
            _between("budget_tokens", self.budget_tokens, 1, 1_000_000)

    def to_session(self) -> NewSession:
        """What is asked of the chat service."""
        return NewSession(self.title, self.system_prompt, self.budget_tokens, self.method, self.score)


class ForkBody(_Body):
    """A session that begins as a copy of another. title: the other's, if absent.

    before_turn: id of a turn of the other, of which nothing is taken over, nor of what came later.
    """

    title: str | None = None
    before_turn: str | None = None

    def __post_init__(self) -> None:
        if self.title is not None:
            _check_title(self.title)


class RenameBody(_Body):
    """A session's new title."""

    title: str

    def __post_init__(self) -> None:
        _check_title(self.title)


class AskBody(_Body):
    """A message to a session.

    top_k: passages to retrieve, 0 to 20. max_tokens: of the answer; absent, 256 or what fits beside the passages.
    stop: a string or up to 4; the answer ends before one. stream: SSE, else JSON.
    temperature (0, greedy, to 2), top_p, min_p, sample_top_k (of how many tokens one is drawn; 0: all),
    repetition_penalty, presence_penalty, frequency_penalty, seed, logit_bias, logprobs: how tokens are chosen, see
    `kv.model.sampling.Sampling`; what is absent is as the model's own configuration has it.
    allow_repetition: an answer that only repeats itself is ended ("repetition"), unless this is true.
    on_disconnect: a client that leaves, or is lost, ends its turn ("cancel") or can come back for it ("finish").
    """

    content: str
    top_k: int = 4
    filter: FilterBody | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    sample_top_k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    allow_repetition: bool = False
    stop: str | list[str] | None = None
    stream: bool = True
    on_disconnect: str = "cancel"

    def __post_init__(self) -> None:
        if not any(character.isprintable() and not character.isspace() for character in self.content):
            raise ValueError(f"content: {self.content[:20]!r} has no text; it needs at least one visible character")
        _one_of("on_disconnect", self.on_disconnect, ("cancel", "finish"))
        _between("top_k", self.top_k, 0, _MAX_TOP_K)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 1, 1_000_000)
        if self.sample_top_k is not None:
            _between("sample_top_k", self.sample_top_k, 0, 1_000_000)
        Sampling(**self.sampling)
        check_stops(self.stop_strings)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> dict[str, Any]:
        """What is given of how tokens are chosen."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "top_k": self.sample_top_k,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "logit_bias": self.logit_bias,
            "logprobs": self.logprobs,
        }
        return {name: value for name, value in given.items() if value is not None}

    def to_question(self) -> Question:
        """What is asked of the chat service."""
        return Question(
            content=self.content,
            top_k=self.top_k,
            filter=self.filter.to_filter() if self.filter else None,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=tuple(self.stop_strings),
            allow_repetition=self.allow_repetition,
        )


def check_stops(stops: list[str]) -> None:
    """Raise ValueError unless these can be stop strings."""
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"stop: {len(stops)} strings, the limit is {_MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= _MAX_STOP_CHARS:
            raise ValueError(f"stop: a string of {len(stop)} characters is not between 1 and {_MAX_STOP_CHARS}")


def _check_title(title: str) -> None:
    if len(title) > _MAX_TITLE_CHARS:
        raise ValueError(f"title: {len(title)} characters, the limit is {_MAX_TITLE_CHARS}")


def _between(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{field}: {value} is not between {least} and {most}")


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field}: {value[:40]!r} is not one of {', '.join(allowed)}")
