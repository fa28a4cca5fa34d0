"""Answers in OpenAI's shape, whole and in pieces."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from app.turns.events import Done, Source, Token, TokenLogprob, Usage


class ChatAnswer:
    """One chat completion. url: of the page, which shows what sources are.

    Beside OpenAI's own fields it has `keepwhole`: the session, the turn, the sources, and in the end timings and the
    state of the cache.
    """

    def __init__(self, *, session_id: str, turn_id: str, model: str, url: str, logprobs: bool) -> None:
        self._session_id = session_id
        self._turn_id = turn_id
        self._model = model
        self._url = url
        self._wants_logprobs = logprobs
        self._created = int(time.time())
        self.sources: list[Source] = []

    def whole(self, text: str, logprobs: list[TokenLogprob], done: Done) -> dict[str, Any]:
        """The answer once it is there."""
        message = {"role": "assistant", "content": text, "refusal": None, "annotations": self._annotations(text)}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(logprobs) if self._wants_logprobs else None,
            "finish_reason": _finish_reason(done),
        }
        about = {**self._about(), **_end(done)}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage(done.usage), "keepwhole": about}

    def opening(self) -> dict[str, Any]:
        """The first piece: whose answer it is, and from what."""
        return {**self._piece({"role": "assistant", "content": "", "refusal": None}), "keepwhole": self._about()}

    def piece(self, token: Token) -> dict[str, Any]:
        """A piece of the text."""
        return self._piece({"content": token.text}, logprobs=_logprobs(token.logprobs) if token.logprobs else None)

    def ending(self, text: str, done: Done) -> dict[str, Any]:
        """The piece that says why it ended."""
        delta = {"annotations": self._annotations(text)} if self.sources else {}
        return {**self._piece(delta, _finish_reason(done)), "keepwhole": _end(done)}

    def usage(self, done: Done) -> dict[str, Any]:
        """The piece that says how many tokens there were."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(done.usage)}

    def _piece(self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._turn_id}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }

    def _about(self) -> dict[str, Any]:
        sources = [msgspec.to_builtins(source) for source in self.sources]
        return {"session_id": self._session_id, "turn_id": self._turn_id, "sources": sources}

    def _annotations(self, text: str) -> list[dict[str, Any]]:
        """Sources as OpenAI has them: places on the web, here the page's address of the passage."""
        return [
            {
                "type": "url_citation",
                "url_citation": {
                    "start_index": 0,
                    "end_index": len(text),
                    "title": " > ".join(part for part in (source.name, source.heading) if part),
                    "url": f"{self._url}#/documents/{source.document_id}?passage={source.passage_id}",
                },
            }
            for source in self.sources
            if source.state != "skipped"
        ]


def usage(used: Usage) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }


def models(names: Iterable[str], created: int) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    """One model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "keepwhole"}


def embeddings(
    vectors: np.ndarray[Any, np.dtype[np.float32]], name: str, tokens: int, *, packed: bool
) -> dict[str, Any]:
    """Vectors, [texts, dimension]. packed: as base64 of little-endian float32."""

    def written(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str | list[float]:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist()

    data = [{"object": "embedding", "index": i, "embedding": written(vector)} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _finish_reason(done: Done) -> str:
    # OpenAI has no word for an answer that went in circles, or was stopped from elsewhere; `keepwhole` says which.
    return "length" if done.finish_reason == "length" else "stop"


def _end(done: Done) -> dict[str, Any]:
    return {
        "finish_reason": done.finish_reason,
        "timings": msgspec.to_builtins(done.timings),
        "cache": msgspec.to_builtins(done.cache),
    }


def _logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    def entry(token: str, logprob: float) -> dict[str, Any]:
        # A token that is part of a character has no text of its own.
        raw = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": logprob, "bytes": raw}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(other.token, other.logprob) for other in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}
