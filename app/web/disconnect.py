"""Clients that leave before a whole answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from litestar.types import Receive


@asynccontextmanager
async def until_left(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call `leave` if the client goes away inside."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
