"""A turn as the event loop sees it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from app.turns.events import Failed, Token
from app.turns.handle import TurnHandle


def test_the_last_event_comes_when_the_session_is_free_for_the_next_message() -> None:
    async def run() -> list[str]:
        told: list[str] = []
        request: Any = SimpleNamespace(turn_id="t")
        handle = TurnHandle(request, on_finish=lambda: told.append("free"))

        async def listen() -> None:
            async for event in handle.events():
                told.append(event.event)

        listener = asyncio.create_task(listen())
        await asyncio.to_thread(handle.put, Token(text="a"))
        await asyncio.to_thread(handle.put, Failed(problem={}))
        for _ in range(20):
            await asyncio.sleep(0)
        told.append("put")
        await asyncio.to_thread(handle.finish)
        await listener
        return told

    assert asyncio.run(run()) == ["token", "put", "free", "error"]
