"""Ingestion jobs over HTTP: progress as events, resuming them, cancelling, versions, and one owner of the data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from litestar.response.sse import ServerSentEventMessage

from app.web.sse import kept_alive
from tests.app.cli.test_cli import run
from tests.app.service import Service
from tests.app.web.test_errors import problem

pytestmark = [pytest.mark.service, pytest.mark.model]


def long(bird: str) -> str:
    """Takes seconds to cut, but where these bytes were cut before."""
    return f"A {bird} waits beside the reeds until a fish comes by.\n\n" * 40_000


def post(service: Service, *files: tuple[str, str]) -> dict[str, Any]:
    form = [("files", (name, text.encode(), "application/octet-stream")) for name, text in files]
    answer = service.http.post("/v1/documents", files=form)
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events(service: Service, job_id: str, last: str | None = None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(event, id, data) as they come."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            if not line and "data" in fields:
                yield fields["event"], fields["id"], json.loads(fields["data"])
                fields = {}
            name, _, value = line.partition(": ")
            fields[name] = value


def test_progress_comes_as_events_that_resume_after_any_of_them(service: Service) -> None:
    job = post(service, ("small.txt", "A small heron."), ("long.txt", long("heron")), ("last.txt", "The last heron."),
               ("bad.bin", "x"))["job_id"]  # fmt: skip
    stream = events(service, job)
    live = [next(stream)]
    while live[-1][2].get("status") != "running" or live[-1][2]["name"] != "long.txt":
        live.append(next(stream))
    # It came while the job was at work, and not at its end.
    assert service.http.get(f"/v1/jobs/{job}").json()["status"] == "running"
    live += list(stream)
    assert [event for event, _, _ in live] == ["document"] * (len(live) - 1) + ["done"]
    states = {data["name"]: data["status"] for event, _, data in live if event == "document"}
    assert states == {"small.txt": "done", "long.txt": "done", "last.txt": "done", "bad.bin": "failed"}
    assert live[-1][2]["counts"] == {"done": 3, "failed": 1}
    assert len({id for _, id, _ in live}) == len(live)
    polled = service.http.get(f"/v1/jobs/{job}").json()
    assert live[-1][2]["finished_at"] == polled["finished_at"]

    # The whole job from its end, and from after each event only what came later.
    again = list(events(service, job))
    assert {data["id"]: data for event, _, data in again if event == "document"} == {
        document["id"]: document for document in polled["documents"]
    }
    for number, (_, id, _) in enumerate(again[:-1]):
        assert list(events(service, job, id)) == again[number + 1 :]
    over = service.http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": again[-1][1]})
    assert over.status_code == 204


def test_bad_questions_about_jobs(service: Service) -> None:
    job = post(service, ("a.txt", "A heron."))["job_id"]
    service.finish(job)
    for last in ("nonsense", f"{job}.x", "job_other.1", f"{job}.-1", f"{job}."):
        answer = service.http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": last})
        assert problem(answer, 422)["field"] == "Last-Event-ID"
    problem(service.http.get("/v1/jobs/job_none/events"), 404)
    problem(service.http.post("/v1/jobs/job_none/cancel"), 404)


def test_a_job_is_cancelled(service: Service) -> None:
    body = post(
        service, ("egret one.txt", "An egret."), ("egret two.txt", long("egret")), ("egret three.txt", "Egret.")
    )
    job, ids = body["job_id"], [document["id"] for document in body["documents"]]
    for event, _, data in events(service, job):
        if event == "document" and (data["id"], data["status"]) == (ids[1], "running"):
            break
    cancelled = service.http.post(f"/v1/jobs/{job}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json()["status"] == "cancelled"
    assert [d["status"] for d in cancelled.json()["documents"]] == ["done", "cancelled", "cancelled"]
    assert list(events(service, job))[-1][2]["counts"] == {"done": 1, "cancelled": 2}
    found = service.http.post("/v1/search", json={"query": "egret heron", "filter": {"document_id": ids}}).json()
    assert {passage["document_id"] for passage in found["items"]} == {ids[0]}
    # It is out of the way at once.
    started = time.monotonic()
    service.ingest(("egret four.txt", "An egret."))
    assert time.monotonic() - started < 2


def test_a_new_version_takes_the_place_of_the_old_in_search_and_in_sessions(service: Service) -> None:
    name, question = "ibis.md", "How many eggs does the ibis of Tonga lay?"
    (first,) = service.ingest((name, "# Ibis\n\nThe ibis of Tonga lays 5 eggs.\n"))
    again = post(service, (name, "# Ibis\n\nThe ibis of Tonga lays 5 eggs.\n"))
    # One came as text and one as bytes, and they are the same.
    assert [(d["id"], d["status"]) for d in again["documents"]] == [(first, "unchanged")]
    session = service.session()
    assert first in {s["document_id"] for s in service.tell(session, question, top_k=1, max_tokens=4).json()["sources"]}
    body = post(service, (name, "# Ibis\n\nThe ibis of Tonga lays 9 eggs.\n"))
    (queued,) = body["documents"]
    assert (queued["version"], queued["replaces"], queued["status"]) == (2, first, "queued")
    service.finish(body["job_id"])
    record = service.http.get(f"/v1/documents/{queued['id']}").json()
    assert (record["version"], record["replaces"]) == (2, first)
    problem(service.http.get(f"/v1/documents/{first}"), 404)
    end = service.tell(session, question, top_k=1, max_tokens=8).json()
    assert [source["document_id"] for source in end["sources"]] == [queued["id"]]
    # At once, or by this message if that was quicker.
    evictions = service.items(f"/v1/sessions/{session}/evictions")
    assert [(row["document_id"], row["reason"]) for row in evictions] == [(first, "document_deleted")]


def test_when_no_file_can_be_read_every_reason_is_told(service: Service) -> None:
    form = [("files", ("a.zip", b"PK\x03\x04")), ("files", ("b.txt", b"")), ("files", ("c.pdf", b"text"))]
    answer = problem(service.http.post("/v1/documents", files=form), 415)
    assert [file["name"] for file in answer["files"]] == ["a.zip", "b.txt", "c.pdf"]
    assert ["zip" in answer["files"][0]["error"], "blank" in answer["files"][1]["error"]] == [True, True]


def test_a_large_file_waits_on_disk_while_the_server_answers(service: Service) -> None:
    folder = service.folder / "library.db-uploads"
    blocker = post(service, ("blocker.txt", long("bittern")))["job_id"]
    body = post(service, ("stork.txt", "A stork nests.\n\n" * 200_000))
    assert body["documents"][0]["id"] in {path.name for path in folder.iterdir()}
    started = time.monotonic()
    assert service.http.get("/health").status_code == 200
    assert time.monotonic() - started < 1
    for job in (body["job_id"], blocker):
        service.http.post(f"/v1/jobs/{job}/cancel")
    assert not folder.exists()


def test_a_data_folder_has_one_owner(service: Service) -> None:
    second = run("serve", "--port", "0", KEEPWHOLE_DATA_DIR=str(service.folder))
    assert second.returncode == 1
    assert f"is in use by process {service.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_silent_line_is_kept_alive() -> None:
    async def slow() -> AsyncIterator[ServerSentEventMessage]:
        yield ServerSentEventMessage(data="one")
        await asyncio.sleep(0.25)
        yield ServerSentEventMessage(data="two")

    async def collect() -> list[str | None]:
        return [m.comment or str(m.data) async for m in kept_alive(slow(), 0.1)]

    assert asyncio.run(collect()) == ["one", "keep-alive", "keep-alive", "two"]


def test_leaving_a_stream_ends_what_feeds_it() -> None:
    ended = []

    async def endless() -> AsyncIterator[ServerSentEventMessage]:
        try:
            yield ServerSentEventMessage(data="one")
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def leave() -> None:
        stream = kept_alive(endless())
        assert (await anext(stream)).data == "one"
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.01)
        assert ended

    asyncio.run(leave())


def test_a_client_of_the_events_that_leaves_is_no_error(service: Service) -> None:
    before = service.log_path.read_text()
    job = post(service, ("leaving.txt", long("grebe")))["job_id"]
    stream = events(service, job)
    next(stream)
    stream.close()
    service.http.post(f"/v1/jobs/{job}/cancel")
    time.sleep(0.2)
    assert service.log_path.read_text() == before
    assert httpx.get(f"{service.url}/health").status_code == 200
