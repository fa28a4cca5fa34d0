"""A turn's events for whoever listens: from any event on, while the turn runs and after it has ended."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import msgspec

from app.audit.records import Eviction, Recall, TurnRecord
from app.turns.events import CacheFigures, Done, Event, Failed, FinishReason, Retrieval, Source, Timings, Token, Usage
from app.turns.handle import TurnHandle

_END = "end"


@dataclass(frozen=True)
class Place:
    """Where in a turn's stream somebody is: what the id of an event says.

    number: events so far. characters: of the answer so far, by which a stream goes on after a restart, when what is
    left of the turn is what SQLite has of it. finished: whether the last event was the turn's last.
    """

    turn_id: str
    number: int = 0
    characters: int = 0
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.turn_id}.{self.number}.{_END if self.finished else self.characters}"

    def after(self, event: Event) -> Place:
        """The place behind one more event."""
        more = len(event.text) if isinstance(event, Token) else 0
        return Place(self.turn_id, self.number + 1, self.characters + more, isinstance(event, Done | Failed))

    @classmethod
    def parse(cls, text: str) -> Place:
        """The inverse of `str`. Raises ValueError."""
        found = re.fullmatch(rf"(\w+)\.([0-9]{{1,15}})\.([0-9]{{1,15}}|{_END})", text, re.ASCII)
        if found is None:
            raise ValueError(f"{text[:80]!r} is not the id of an event")
        finished = found[3] == _END
        return cls(found[1], int(found[2]), 0 if finished else int(found[3]), finished)


class TurnFeed:
    """One turn's events, kept as they are committed. Made on the event loop. over: whether nothing more will come."""

    def __init__(self, handle: TurnHandle) -> None:
        self.turn_id = handle.request.turn_id
        self._handle = handle
        self._events: list[tuple[Place, Event]] = []
        self._refusal: Exception | None = None
        self.over = False
        self._changed = asyncio.Event()
        # Nobody who leaves takes the events from others.
        self._task = asyncio.create_task(self._take_in())

    @property
    def sent(self) -> int:
        """Events so far."""
        return len(self._events)

    def cancel(self) -> None:
        """Ask the turn to stop at its next step."""
        self._handle.cancel()

    async def follow(self, after: int = 0) -> AsyncIterator[tuple[Place, Event]]:
        """The events behind the first `after`, each with the place behind it, until the last.

        Raises what the turn was refused with, if it was.
        """
        while True:
            changed = self._changed
            while after < len(self._events):
                after += 1
                yield self._events[after - 1]
            if self.over:
                break
            await changed.wait()
        if self._refusal is not None:
            raise self._refusal

    async def _take_in(self) -> None:
        place = Place(self.turn_id)
        try:
            async for event in self._handle.events():
                place = place.after(event)
                self._events.append((place, event))
                self._tell()
        except Exception as refusal:
            self._refusal = refusal
        self.over = True
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def replay(turn: TurnRecord, rows: Iterable[Eviction | Recall], place: Place) -> Iterable[tuple[Place, Event]]:
    """What is to be said of a turn that has ended to somebody who is at `place`, by what SQLite has of it.

    rows: its evictions and recalls, in order. They are told again: each has an id to know it by. What had been said of
    the answer is not.
    """
    events: list[Event] = []
    if place.number == 0:
        events.append(Retrieval(turn_id=turn.id, sources=msgspec.convert(turn.sources or [], list[Source])))
    events.extend(rows)
    if turn.answer is not None and (rest := turn.answer[place.characters :]):
        events.append(Token(text=rest))
    if turn.status == "failed" or turn.usage is None or turn.timings is None or turn.cache is None:
        events.append(Failed(problem=turn.problem or {}))
    else:
        events.append(
            Done(
                turn_id=turn.id,
                finish_reason=msgspec.convert(turn.finish_reason, FinishReason),
                content=turn.answer or "",
                committed=turn.status == "done",
                usage=msgspec.convert(turn.usage, Usage),
                timings=msgspec.convert(turn.timings, Timings),
                cache=msgspec.convert(turn.cache, CacheFigures),
            )
        )
    for event in events:
        place = place.after(event)
        yield place, event


async def as_stream(told: Iterable[tuple[Place, Event]]) -> AsyncIterator[tuple[Place, Event]]:
    """The same as if it came piece by piece."""
    for item in told:
        yield item
