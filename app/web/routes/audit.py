"""The audit log across sessions, and the conditions that every listing of evictions takes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, QueryParameter
from litestar.response import Stream

from app.audit.reading import EvictionFilter
from app.audit.records import Eviction, Move
from app.problems import invalid
from app.services import Services
from app.web.tables import as_file
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
        form: Annotated[str | None, QueryParameter(name="format")] = None,
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
    ) -> Page[Eviction] | Stream:
        """Every block that left any session, in the order they left; all conditions given must hold.

        With `format` (`json`, `jsonl` or `csv`) all of them, as a file.
        """
        where = msgspec.structs.replace(where, session_id=session_id)
        if form is not None:
            if cursor is not None:
                raise invalid("cursor", "does not go with format, which gives all rows")
            return await asyncio.to_thread(self._as_file, services, where, form)
        return await asyncio.to_thread(services.store.evictions, where, cursor, limit)

    @staticmethod
    def _as_file(services: Services, where: EvictionFilter, form: str) -> Stream:
        # What is wrong with the conditions is said before a file begins.
        services.store.evictions(where, None, 1)
        return as_file(Eviction, form, "evictions", partial(services.store.evictions, where))

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
