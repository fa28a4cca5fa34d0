"""Probes."""

from __future__ import annotations

import dataclasses
from typing import Any

from litestar import HttpMethod, Request, route

from app.errors import Unavailable


@route("/health", http_method=[HttpMethod.GET, HttpMethod.HEAD], tags=["probes"])
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@route("/ready", http_method=[HttpMethod.GET, HttpMethod.HEAD], tags=["probes"])
async def ready(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """The model is loaded and the databases are open; 503 until then. Says how busy it is, and the K/V in memory."""
    services = request.app.state.boot.services
    if services.chat.closing:
        raise Unavailable("the server is stopping")
    if not services.chat.alive:
        raise Unavailable("the MLX thread has ended; the log says why. Restart the server")
    figures = dataclasses.asdict(services.chat.figures)
    return {"status": "ready", "model": services.model.name, "turns": services.chat.active_turns, **figures}
