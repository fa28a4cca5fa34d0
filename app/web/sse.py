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
from app.turns.feed import Place

_KEEP_ALIVE_SECONDS = 15.0
# After which a browser that has lost the line comes back, in milliseconds.
_RETRY = 1000

# Clients split lines at these too, though only CR and LF end one; inside JSON they can be written otherwise.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


async def frames(events: AsyncIterator[tuple[Place, Event]]) -> AsyncIterator[ServerSentEventMessage]:
    """Each event with its place as its id, and a comment whenever the line was silent for 15 seconds."""
    yield ServerSentEventMessage(data=None, retry=_RETRY, sep="\n")
    async for message in kept_alive(_frames(events)):
        yield message


async def _frames(events: AsyncIterator[tuple[Place, Event]]) -> AsyncIterator[ServerSentEventMessage]:
    async for place, event in events:
        yield ServerSentEventMessage(event=event.event, id=str(place), data=as_data(event), sep="\n")


def as_data(value: object) -> str:
    """A value as JSON on one line, whatever a client takes for the end of one."""
    return msgspec.json.encode(value).decode().translate(_LINE_ENDS)


async def kept_alive(
    messages: AsyncIterator[ServerSentEventMessage], silence: float = _KEEP_ALIVE_SECONDS
) -> AsyncIterator[ServerSentEventMessage]:
    """`messages`, and a comment whenever the line was silent for so many seconds."""
    while True:
        following = asyncio.ensure_future(anext(messages))
        try:
            while not (await asyncio.wait({following}, timeout=silence))[0]:
                yield ServerSentEventMessage(data=None, comment="keep-alive", sep="\n")
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

    def __init__(
        self, content: AsyncIterator[ServerSentEventMessage], *, release: Callable[[], None] = lambda: None
    ) -> None:
        # Proxies neither keep nor compress it; X-Accel-Buffering, which Litestar sets, is nginx's word for the same.
        super().__init__(content, headers={"Cache-Control": "no-cache, no-transform"})
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
