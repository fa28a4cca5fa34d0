"""A turn as it is handed over: events come out of the MLX thread, cancellation goes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import structlog

from app.problems import as_problem
from app.turns.events import Done, Event, Failed
from app.turns.request import TurnRequest

log = structlog.get_logger()


class TurnHandle:
    """A turn as the event loop sees it: its events, and the means to cancel it.

    request: what was asked. on_finish: called on the event loop when the MLX thread is done with the turn.
    """

    def __init__(self, request: TurnRequest, on_finish: Callable[[], None]) -> None:
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Event | Exception, Future[Any] | None]] = asyncio.Queue()
        self._on_finish = on_finish
        self._finished = asyncio.Event()
        self.cancelled = False

    def cancel(self) -> None:
        """Ask the MLX thread to stop at its next step. Safe from any thread, and after the end."""
        self.cancelled = True

    async def wait(self) -> None:
        """Return when the MLX thread is done with the turn."""
        await self._finished.wait()

    async def events(self) -> AsyncIterator[Event]:
        """The events, each after what it reports is committed. Ends after `Done` or `Failed`.

        Raises DoesNotFit, as the first thing, if the turn was refused.
        """
        while True:
            item, written = await self._events.get()
            if written is not None:
                try:
                    await asyncio.wrap_future(written)
                except Exception as error:
                    log.error("audit write failed", turn_id=self.request.turn_id, exc_info=error)
                    self.cancel()
                    item = Failed(problem=as_problem(error).body())
            last = isinstance(item, Exception | Done | Failed)
            if last:
                # Who hears that it is over may ask the next thing at once.
                await self.wait()
            if isinstance(item, Exception):
                raise item
            yield item
            if last:
                return

    # Called on the MLX thread.

    def put(self, item: Event | Exception, written: Future[Any] | None = None) -> None:
        """Hand an event over to the event loop."""
        self._call(self._events.put_nowait, (item, written))

    def finish(self) -> None:
        """Say that the turn is over."""
        self._call(self._finish)

    def _finish(self) -> None:
        self._finished.set()
        self._on_finish()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed: the server is gone, and so is whoever listened.
            log.debug("event loop closed", turn_id=self.request.turn_id)
