"""Chat sessions: messages over SSE, history, cache, evictions and compression."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.types import Receive

from app.audit.reading import EvictionFilter, Message
from app.audit.records import BlockRecord, CompressionPoint, Eviction, Recall, SessionRecord
from app.problems import Problem
from app.services import Services
from app.turns.events import Done, Event, Failed, Retrieval
from app.turns.handle import TurnHandle
from app.web.bodies import AskBody, ForkBody, SessionBody
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
        self, services: NamedDependency[Services], cursor: FromQuery[str | None] = None, limit: FromQuery[int] = 50
    ) -> Page[SessionRecord]:
        """Sessions, newest first."""
        return await asyncio.to_thread(services.store.sessions, cursor, limit)

    @get("/{session_id:str}")
    async def session(self, services: NamedDependency[Services], session_id: FromPath[str]) -> SessionRecord:
        """One session."""
        return await asyncio.to_thread(services.store.session, session_id)

    @post("/{session_id:str}/fork")
    async def fork(
        self, services: NamedDependency[Services], session_id: FromPath[str], data: JSONBody[ForkBody]
    ) -> SessionRecord:
        """Create a session that begins as a copy: history, blocks and cache. `{}` keeps the title.

        It shares the other's K/V until either goes on. Evictions stay in the log of the session they happened in.
        """
        return await services.chat.fork(session_id, data.title)

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
        events; with `stream: false`, answers once with JSON. Leaving early cancels the turn.
        """
        handle = await services.chat.ask(session_id, data.to_question())
        try:
            events = handle.events()
            # A turn that is refused becomes a problem before any byte of a stream is sent.
            first = await anext(events)
            if not data.stream:
                return Response(await _collect(handle, events, first, request.receive))
        except BaseException:
            handle.cancel()
            raise
        return EventStream(frames(handle.request.turn_id, first, events), release=handle.cancel)

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

    @get("/{session_id:str}/cache")
    async def cache(
        self,
        services: NamedDependency[Services],
        session_id: FromPath[str],
        block_state: Annotated[str | None, QueryParameter(name="state")] = None,
        kind: FromQuery[str | None] = None,
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 200,
    ) -> Page[BlockRecord]:
        """Every block the session ever held, in stream order, with its state."""
        return await asyncio.to_thread(services.store.blocks, session_id, cursor, limit, block_state, kind)

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


async def _collect(handle: TurnHandle, events: AsyncIterator[Event], first: Event, receive: Receive) -> dict[str, Any]:
    """The turn as one value. A client that leaves cancels it."""
    leaving = asyncio.create_task(_cancel_on_disconnect(handle, receive))
    sources: list[Any] = []
    evictions: list[Eviction] = []
    recalls: list[Recall] = []
    try:
        event = first
        while not isinstance(event, Done | Failed):
            if isinstance(event, Retrieval):
                sources = list(event.sources)
            elif isinstance(event, Eviction):
                evictions.append(event)
            elif isinstance(event, Recall):
                recalls.append(event)
            event = await anext(events)
    finally:
        leaving.cancel()
    if isinstance(event, Failed):
        raise Problem(HTTPStatus(event.problem["status"]), event.problem["detail"])
    return {**msgspec.structs.asdict(event), "sources": sources, "recalls": recalls, "evictions": evictions}


async def _cancel_on_disconnect(handle: TurnHandle, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    handle.cancel()
