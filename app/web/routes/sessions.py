"""Chat sessions: messages over SSE, history, cache, evictions and compression."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter

from app.audit.reading import EvictionFilter, Message
from app.audit.records import BlockRecord, BlockStory, CompressionPoint, Eviction, Recall, SessionRecord, TurnRecord
from app.problems import Problem, invalid
from app.services import Services
from app.turns.events import Failed, Retrieval, Token, TokenLogprob
from app.turns.feed import Place, TurnFeed
from app.web.bodies import AskBody, ForkBody, RenameBody, SessionBody
from app.web.disconnect import until_left
from app.web.routes.audit import eviction_filter
from app.web.sse import EventStream, frames
from ingest.database import Page


class SessionController(Controller):
    """Sessions and what can be asked of them."""

    path = "/v1/sessions"
    tags = ("sessions",)

    @post("/")
    async def create(self, services: NamedDependency[Services], data: JSONBody[SessionBody]) -> SessionRecord:
        """Create a session. `{}` takes every default."""
        return await services.chat.create(data.to_session())

    @get("/")
    async def sessions(
        self,
        services: NamedDependency[Services],
        words: Annotated[str | None, QueryParameter(name="query")] = None,
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 50,
    ) -> Page[SessionRecord]:
        """Sessions, newest first; with `query`, those whose title or messages have its words."""
        return await asyncio.to_thread(services.store.sessions, cursor, limit, words)

    @get("/{session_id:str}")
    async def session(self, services: NamedDependency[Services], session_id: FromPath[str]) -> SessionRecord:
        """One session."""
        return await asyncio.to_thread(services.store.session, session_id)

    @post("/{session_id:str}/fork")
    async def fork(
        self, services: NamedDependency[Services], session_id: FromPath[str], data: JSONBody[ForkBody]
    ) -> SessionRecord:
        """Create a session that begins as a copy: history, blocks and cache. `{}` keeps the title and all turns.

        With `before_turn` it goes on from before that turn. It shares the other's K/V until either goes on. Evictions
        stay in the log of the session they happened in.
        """
        before = None
        if data.before_turn is not None:
            before = (await asyncio.to_thread(services.store.turn, session_id, data.before_turn)).number
        return await services.chat.fork(session_id, data.title, before)

    @patch("/{session_id:str}")
    async def rename(
        self, services: NamedDependency[Services], session_id: FromPath[str], data: JSONBody[RenameBody]
    ) -> SessionRecord:
        """Give a session another title."""
        return await services.chat.rename(session_id, data.title)

    @delete("/{session_id:str}")
    async def remove(self, services: NamedDependency[Services], session_id: FromPath[str]) -> None:
        """Delete a session, its history and its cache. Its audit rows stay; they hold no text."""
        await services.chat.delete(session_id)

    @post("/{session_id:str}/messages", status_code=HTTPStatus.OK)
    async def ask(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        session_id: FromPath[str],
        data: JSONBody[AskBody],
    ) -> Response[Any]:
        """Ask. Streams `retrieval`, `eviction`, `recall`, `prefill`, `token` and `done` (or `error`) as server-sent
        events; with `stream: false`, answers once with JSON. Leaving early cancels the turn, unless `on_disconnect` is
        "finish": then `/events` tells the rest.
        """
        feed = await services.chat.ask(session_id, data.to_question())
        leave = feed.cancel if data.on_disconnect == "cancel" else _nothing
        try:
            # A turn that is refused becomes a problem before any byte of a stream is sent.
            await anext(feed.follow())
            if not data.stream:
                async with until_left(request.receive, leave):
                    return Response(await _collect(feed))
        except BaseException:
            leave()
            raise
        return EventStream(frames(feed.follow()), release=leave)

    @get("/{session_id:str}/events")
    async def events(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        after: FromQuery[str | None] = None,
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
    ) -> Response[Any]:
        """The events of the turn that runs, or of the last one, as when it was asked; behind `Last-Event-ID`, or
        `after`, the rest of that turn's. Leaving cancels nothing. 204, at which browsers stop asking, if none is left.

        After a restart a finished turn is told by what the log has of it: sources, what entered and left, the answer.
        """
        field, given = ("Last-Event-ID", last_event_id) if last_event_id is not None else ("after", after)
        place = None
        if given is not None:
            try:
                place = Place.parse(given)
            except ValueError as error:
                raise invalid(field, str(error)) from error
        stream = await services.chat.events(session_id, place)
        return Response(None, status_code=HTTPStatus.NO_CONTENT) if stream is None else EventStream(frames(stream))

    @post("/{session_id:str}/cancel", status_code=HTTPStatus.OK)
    async def cancel(self, services: NamedDependency[Services], session_id: FromPath[str]) -> dict[str, bool]:
        """Stop the answer being written. Returns once the model has stopped; `cancelled` is false if there was none."""
        return {"cancelled": await services.chat.cancel(session_id)}

    @get("/{session_id:str}/messages")
    async def messages(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 50,
    ) -> Page[Message]:
        """The history, oldest first. `limit` counts turns of two messages."""
        return await asyncio.to_thread(services.store.messages, session_id, cursor, limit)

    @get("/{session_id:str}/turns")
    async def turns(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 50,
    ) -> Page[TurnRecord]:
        """Every turn, oldest first, with its timings and cache figures; those that failed or were cancelled too."""
        return await asyncio.to_thread(services.store.turns, session_id, cursor, limit)

    @get("/{session_id:str}/cache")
    async def cache(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        turn: FromQuery[str | None] = None,
        block_state: Annotated[str | None, QueryParameter(name="state")] = None,
        kind: FromQuery[str | None] = None,
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 200,
    ) -> Page[BlockRecord]:
        """Every block the session ever held, in stream order, with its state; with `turn`, a turn's id, those that were
        resident when it ended, in the order the model saw them.
        """
        if turn is not None:
            for name, given in (("state", block_state), ("kind", kind), ("cursor", cursor)):
                if given is not None:
                    raise invalid(name, f"{given[:40]!r} does not go with turn, which gives all that was resident")
            return await asyncio.to_thread(services.store.moment, session_id, turn)
        return await asyncio.to_thread(services.store.blocks, session_id, cursor, limit, block_state, kind)

    @get("/{session_id:str}/cache/{block_id:str}")
    async def block(
        self, services: NamedDependency[Services], session_id: FromPath[str], block_id: FromPath[str]
    ) -> BlockStory:
        """One block: its text, and when it came, left and came back, with the rows of the log that say why."""
        return await asyncio.to_thread(services.chat.story, session_id, block_id)

    @get("/{session_id:str}/evictions", dependencies={"where": Provide(eviction_filter)})
    async def evictions(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        where: NamedDependency[EvictionFilter],
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
    ) -> Page[Eviction]:
        """The session's audit log: every block that left, in the order they left."""
        where = msgspec.structs.replace(where, session_id=session_id)
        await asyncio.to_thread(services.store.session, session_id)
        return await asyncio.to_thread(services.store.evictions, where, cursor, limit)

    @get("/{session_id:str}/recalls")
    async def recalls(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
    ) -> Page[Recall]:
        """Every block that came into the session's cache without being read, in the order they came."""
        return await asyncio.to_thread(services.store.recalls, session_id, cursor, limit)

    @get("/{session_id:str}/compression")
    async def compression(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 200,
    ) -> Page[CompressionPoint]:
        """Tokens seen against tokens kept, at every eviction and at the end of every turn."""
        return await asyncio.to_thread(services.store.compression, session_id, cursor, limit)


def _nothing() -> None:
    pass


async def _collect(feed: TurnFeed) -> dict[str, Any]:
    """The turn as one value."""
    sources: list[Any] = []
    evictions: list[Eviction] = []
    recalls: list[Recall] = []
    logprobs: list[TokenLogprob] = []
    async for _, event in feed.follow():
        if isinstance(event, Retrieval):
            sources = list(event.sources)
        elif isinstance(event, Eviction):
            evictions.append(event)
        elif isinstance(event, Recall):
            recalls.append(event)
        elif isinstance(event, Token):
            logprobs += event.logprobs or []
    if isinstance(event, Failed):
        raise Problem(HTTPStatus(event.problem["status"]), event.problem["detail"])
    told = {"sources": sources, "recalls": recalls, "evictions": evictions}
    return {**msgspec.structs.asdict(event), **told, **({"logprobs": logprobs} if logprobs else {})}
