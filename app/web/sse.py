"""Server-sent events: a turn's events as frames, and a response that always lets go of its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from litestar.response import ServerSentEvent
from litestar.response.sse import ServerSentEventMessage
from litestar.types import ASGIApp, Receive, Scope, Send

from app.turns.events import Event

_KEEP_ALIVE_SECONDS = 15.0


async def frames(turn_id: str, first: Event, events: AsyncIterator[Event]) -> AsyncIterator[ServerSentEventMessage]:
    """Frames with ids `<turn>.<n>`, and a comment whenever the line was silent for 15 seconds."""
    number = 1
    yield _frame(turn_id, number, first)
    async for message in kept_alive(_frames(turn_id, number, events)):
        yield message


async def _frames(turn_id: str, number: int, events: AsyncIterator[Event]) -> AsyncIterator[ServerSentEventMessage]:
    async for event in events:
        number += 1
        yield _frame(turn_id, number, event)


def _frame(turn_id: str, number: int, event: Event) -> ServerSentEventMessage:
    return ServerSentEventMessage(event=event.event, id=f"{turn_id}.{number}", data=msgspec.json.encode(event).decode())


async def kept_alive(
    messages: AsyncIterator[ServerSentEventMessage], silence: float = _KEEP_ALIVE_SECONDS
) -> AsyncIterator[ServerSentEventMessage]:
    """`messages`, and a comment whenever the line was silent for so many seconds."""
    while True:
        following = asyncio.ensure_future(anext(messages))
        try:
            while not (await asyncio.wait({following}, timeout=silence))[0]:
                yield ServerSentEventMessage(data=None, comment="keep-alive")
            message = await following
        except StopAsyncIteration:
            return
        finally:
            # A client that left: what made the message is told so where it waits.
            following.cancel()
        yield message


class EventStream(ServerSentEvent):
    """An SSE response. release: called when the response is over, even if the client left before its first byte.

    A generator's own `finally` does not run if it was never started, so it cannot be what frees the turn.
    """

    def __init__(self, content: AsyncIterator[ServerSentEventMessage], *, release: Callable[[], None]) -> None:
        super().__init__(content)
        self._release = release

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        """The response as an ASGI app that releases at its end."""
        inner = super().to_asgi_response(*args, **kwargs)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await inner(scope, receive, send)
            finally:
                self._release()

        return respond
