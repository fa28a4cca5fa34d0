"""OpenAI's routes: chat completions, whole and as a stream, models, embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from litestar.response.sse import ServerSentEventMessage

from app.problems import Problem
from app.services import Services
from app.turns.events import Done, Failed, Retrieval, Token, TokenLogprob
from app.turns.feed import TurnFeed
from app.web.disconnect import until_left
from app.web.openai import answers
from app.web.openai.answers import ChatAnswer
from app.web.openai.bodies import ChatBody, EmbeddingBody
from app.web.openai.errors import as_error
from app.web.sse import EventStream, as_data, kept_alive

_NO_RETRIEVAL = ":no-retrieval"
_STARTED = int(time.time())


class OpenAIController(Controller):
    """What clients of OpenAI's API ask for."""

    path = "/v1"
    tags = ("openai",)

    @post("/chat/completions", status_code=HTTPStatus.OK)
    async def complete(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services], data: JSONBody[ChatBody]
    ) -> Response[Any]:
        """Answer the last message behind the others, as one JSON object or as a stream.

        The session that holds the history goes on; where the history has been edited, a fork of it. Passages are
        retrieved, but for models whose name ends with `:no-retrieval` and requests with `retrieval: false`.
        """
        names = _names(services)
        if data.model not in names:
            raise _no_model(data.model, names)
        try:
            history, question = data.to_conversation(retrieves=not data.model.endswith(_NO_RETRIEVAL))
        except ValueError as error:
            field = str(error).partition(": ")[0]
            raise Problem(HTTPStatus.BAD_REQUEST, str(error), field=field) from error
        session_id, feed = await services.conversations.ask(history, question)
        answer = ChatAnswer(
            session_id=session_id,
            turn_id=feed.turn_id,
            model=data.model,
            url=str(request.base_url).rstrip("/") + "/",
            logprobs=bool(data.logprobs),
        )
        try:
            # A turn that is refused becomes an error before any byte of a stream is sent.
            await anext(feed.follow())
            if not data.stream:
                async with until_left(request.receive, feed.cancel):
                    return Response(await _whole(feed, answer))
        except BaseException:
            feed.cancel()
            raise
        includes_usage = data.stream_options is not None and bool(data.stream_options.include_usage)
        return EventStream(kept_alive(_pieces(feed, answer, includes_usage=includes_usage)), release=feed.cancel)

    @get("/models")
    async def models(self, services: NamedDependency[Services]) -> dict[str, Any]:
        """The model, with retrieval and without, and the embedder."""
        return answers.models([*_names(services), *_embedders(services)], _STARTED)

    @get("/models/{name:path}")
    async def model(self, services: NamedDependency[Services], name: FromPath[str]) -> dict[str, Any]:
        """One model."""
        wanted, names = name.lstrip("/"), [*_names(services), *_embedders(services)]
        if wanted not in names:
            raise _no_model(wanted, names)
        return answers.model(wanted, _STARTED)

    @post("/embeddings", status_code=HTTPStatus.OK)
    async def embed(self, services: NamedDependency[Services], data: JSONBody[EmbeddingBody]) -> dict[str, Any]:
        """The vectors that search compares passages by."""
        embedder = services.library.embedder
        if embedder is None or data.model not in _embedders(services):
            raise _no_model(data.model, _embedders(services))
        if data.dimensions not in (None, embedder.dimension):
            raise Problem(
                HTTPStatus.BAD_REQUEST,
                f"dimensions: {data.dimensions} is not {embedder.dimension}, the embedder's own",
                field="dimensions",
            )
        vectors = await asyncio.to_thread(embedder.embed, data.texts)
        tokens = await asyncio.to_thread(lambda: sum(len(services.model.codec.encode(text)) for text in data.texts))
        return answers.embeddings(vectors, data.model, tokens, packed=data.encoding_format == "base64")


def _names(services: Services) -> list[str]:
    return [services.model.name, services.model.name + _NO_RETRIEVAL]


def _embedders(services: Services) -> list[str]:
    embedder = services.library.embedder
    return [] if embedder is None else [embedder.name]


def _no_model(name: str, names: list[str]) -> Problem:
    there = ", ".join(names) or "none"
    return Problem(HTTPStatus.NOT_FOUND, f"model: no model {name[:80]!r}; there are {there}", field="model")


async def _whole(feed: TurnFeed, answer: ChatAnswer) -> dict[str, Any]:
    logprobs: list[TokenLogprob] = []
    async for _, event in feed.follow():
        match event:
            case Retrieval():
                answer.sources = event.sources
            case Token():
                logprobs += event.logprobs or []
            case Failed():
                raise Problem(HTTPStatus(event.problem["status"]), event.problem["detail"])
            case Done():
                return answer.whole(event.content, logprobs, event)
    raise AssertionError("a turn ends with done or error")


async def _pieces(feed: TurnFeed, answer: ChatAnswer, *, includes_usage: bool) -> AsyncIterator[ServerSentEventMessage]:
    text = ""
    async for _, event in feed.follow():
        match event:
            case Retrieval():
                answer.sources = event.sources
                yield _message(answer.opening())
            case Token():
                text += event.text
                yield _message(answer.piece(event))
            case Failed():
                yield _message(as_error(event.problem["status"], event.problem["detail"], None))
            case Done():
                yield _message(answer.ending(text, event))
                if includes_usage:
                    yield _message(answer.usage(event))
    yield ServerSentEventMessage(data="[DONE]", sep="\n")


def _message(value: dict[str, Any]) -> ServerSentEventMessage:
    # Many clients split at two line feeds and know of no other end.
    return ServerSentEventMessage(data=as_data(value), sep="\n")
