"""The audit log across sessions, and the conditions that every listing of evictions takes."""

from __future__ import annotations

import asyncio

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery

from app.audit.reading import EvictionFilter
from app.audit.records import Eviction, Move
from app.services import Services
from ingest.database import Page


async def eviction_filter(
    turn_id: FromQuery[str | None] = None,
    kind: FromQuery[str | None] = None,
    reason: FromQuery[str | None] = None,
    document_id: FromQuery[str | None] = None,
    passage_id: FromQuery[str | None] = None,
    since: FromQuery[str | None] = None,
    until: FromQuery[str | None] = None,
) -> EvictionFilter:
    """The conditions of the query string, of any session."""
    return EvictionFilter(
        turn_id=turn_id,
        kind=kind,
        reason=reason,
        document_id=document_id,
        passage_id=passage_id,
        since=since,
        until=until,
    )


class AuditController(Controller):
    """Evictions of all sessions, deleted ones included."""

    path = "/v1/audit"
    tags = ("audit",)

    @get("/evictions", dependencies={"where": Provide(eviction_filter)})
    async def evictions(
        self,
        services: NamedDependency[Services],
        where: NamedDependency[EvictionFilter],
        session_id: FromQuery[str | None] = None,
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
    ) -> Page[Eviction]:
        """Every block that left any session, in the order they left; all conditions given must hold."""
        where = msgspec.structs.replace(where, session_id=session_id)
        return await asyncio.to_thread(services.store.evictions, where, cursor, limit)

    @get("/moves")
    async def moves(
        self,
        services: NamedDependency[Services],
        document_id: FromQuery[str | None] = None,
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
    ) -> Page[Move]:
        """K/V that went down a tier in the passage bank, in the order it went."""
        return await asyncio.to_thread(services.store.moves, document_id, cursor, limit)
