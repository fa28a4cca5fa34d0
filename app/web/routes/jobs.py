"""Ingestion jobs: progress, polled or as a stream of events, and cancelling."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any

from litestar import Controller, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, HeaderParameter
from litestar.response import ServerSentEvent
from litestar.response.sse import ServerSentEventMessage

from app.problems import invalid
from app.services import Services
from app.web.sse import as_data, kept_alive
from ingest.database import Page
from ingest.records import Job, JobChanges

# How often a stream without news looks whether the server is to stop.
_LOOK_SECONDS = 1.0


class JobController(Controller):
    """The jobs that ingest documents."""

    path = "/v1/jobs"
    tags = ("documents",)

    @get("/")
    async def jobs(
        self, services: NamedDependency[Services], cursor: FromQuery[str | None] = None, limit: FromQuery[int] = 50
    ) -> Page[Job]:
        """Ingestion jobs, newest first."""
        return await asyncio.to_thread(services.library.jobs, cursor, limit)

    @get("/{job_id:str}")
    async def job(self, services: NamedDependency[Services], job_id: FromPath[str]) -> Job:
        """One ingestion job and the state of each of its documents."""
        return await asyncio.to_thread(services.library.job, job_id)

    @post("/{job_id:str}/cancel", status_code=HTTPStatus.OK)
    async def cancel(self, services: NamedDependency[Services], job_id: FromPath[str]) -> Job:
        """Cancel a job. Documents that are done stay, the others are `cancelled`. A finished job stays as it is."""
        return await asyncio.to_thread(services.library.cancel, job_id)

    @get("/{job_id:str}/events")
    async def events(
        self,
        services: NamedDependency[Services],
        job_id: FromPath[str],
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID")] = None,
    ) -> Response[Any]:
        """Progress as server-sent events: `document`, a document's state now and whenever it changes, then `done`.

        With `Last-Event-ID`, only what changed since that event; after `done` there is nothing, and the answer is 204,
        at which browsers stop asking.
        """
        after = 0 if last_event_id is None else _change(job_id, last_event_id)
        changes = await asyncio.to_thread(services.library.changes, job_id, after)
        if changes.finished_at is not None and after > changes.last:
            return Response(None, status_code=HTTPStatus.NO_CONTENT)
        return ServerSentEvent(kept_alive(_events(services, job_id, after)))


async def _events(services: Services, job_id: str, after: int) -> AsyncIterator[ServerSentEventMessage]:
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    unsubscribe = services.library.subscribe(lambda: loop.call_soon_threadsafe(changed.set))
    try:
        # When the server stops, the stream ends without `done`; the client comes back with its last id.
        while not services.chat.closing:
            changed.clear()
            changes = await asyncio.to_thread(services.library.changes, job_id, after)
            for number, document in changes.documents:
                yield _message("document", f"{job_id}.{number}", document)
            after = changes.last
            if changes.finished_at is not None:
                yield _message("done", f"{job_id}.{after + 1}", _summary(job_id, changes))
                return
            try:
                await asyncio.wait_for(changed.wait(), _LOOK_SECONDS)
            except TimeoutError:
                continue
    finally:
        unsubscribe()


def _summary(job_id: str, changes: JobChanges) -> dict[str, Any]:
    return {"id": job_id, "status": changes.status, "finished_at": changes.finished_at, "counts": changes.counts}


def _message(event: str, id: str, data: object) -> ServerSentEventMessage:
    return ServerSentEventMessage(event=event, id=id, data=as_data(data), sep="\n")


def _change(job_id: str, last_event_id: str) -> int:
    given, _, number = last_event_id.rpartition(".")
    if given != job_id or not re.fullmatch(r"[0-9]{1,15}", number):
        raise invalid("Last-Event-ID", f"{last_event_id[:80]!r} is not the id of an event of job {job_id}")
    return int(number)
