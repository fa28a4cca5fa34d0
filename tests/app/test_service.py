"""The service as a user meets it: a real process, the real model, real SQLite."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.service, pytest.mark.model]

TOWNS = ["Bodo", "Narva", "Lecce", "Tarifa", "Galway", "Piran"]


class Service:
    """A `keepwhole serve` process and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "KEEPWHOLE_DATA_DIR": str(self.folder), "KEEPWHOLE_PREFILL_STEP": "64"}
        command = [sys.executable, "-c", "from app.cli import main; main()", "serve", "--port", "0"]
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"is ready: (\S+)", line):
                self.http = httpx.Client(base_url=found[1], timeout=60)
                return
        raise AssertionError((self.folder / "server.log").read_text())

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.http.close()
        self.process.send_signal(how)
        self.process.wait(30)

    def ask(self, session: str, content: str, **body: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        url = f"/v1/sessions/{session}/messages"
        with self.http.stream("POST", url, json={"content": content, **body}) as response:
            assert response.status_code == 200, response.read()
            event = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data":
                    yield event, json.loads(value)

    def session(self, **body: Any) -> str:
        return str(self.http.post("/v1/sessions", json=body).json()["id"])

    def items(self, path: str) -> list[dict[str, Any]]:
        found, cursor = [], None
        while True:
            page = self.http.get(path, params={"limit": 7, **({"cursor": cursor} if cursor else {})}).json()
            found += page["items"]
            if (cursor := page["next_cursor"]) is None:
                return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("data"))
    for i, town in enumerate(TOWNS):
        text = f"# {town}\n\nThe ferry to {town} leaves at {i + 6}:15 from pier {i + 2}. Tickets cost {i + 11} euros.\n"
        job = service.http.post("/v1/documents", json={"name": f"{town}.md", "text": text}).json()["job_id"]
        while service.http.get(f"/v1/jobs/{job}").json()["status"] not in ("done", "failed"):
            time.sleep(0.05)
    yield service
    service.stop()


def test_a_small_budget_evicts_whole_blocks_and_the_log_agrees_even_after_a_crash(service: Service) -> None:
    session, streamed = service.session(budget_tokens=192), []
    for i in range(8):
        events = list(service.ask(session, f"When does the ferry to {TOWNS[i % 6]} leave?", top_k=1, max_tokens=12))
        streamed += [data for event, data in events if event == "eviction"]
        kind, done = events[-1]
        assert kind == "done"
        assert events[0][0] == "retrieval"
        assert "".join(data["text"] for event, data in events if event == "token") == done["content"]
        assert done["cache"]["resident_tokens"] <= done["cache"]["peak_tokens"] <= 192
        blocks = {block["id"]: block for block in service.items(f"/v1/sessions/{session}/cache")}
        resident = [block["tokens"] for block in blocks.values() if block["state"] == "resident"]
        assert sum(resident) == done["cache"]["resident_tokens"]
        assert all(row["tokens"] == blocks[row["block_id"]]["tokens"] for row in streamed)
    assert streamed
    assert service.items(f"/v1/sessions/{session}/evictions") == streamed
    service.stop(signal.SIGKILL)
    service.start()
    assert service.items(f"/v1/sessions/{session}/evictions") == streamed
    *_, (kind, done) = service.ask(session, "And what does a ticket to Piran cost?", top_k=1, max_tokens=12)
    assert kind == "done"
    assert len(service.items(f"/v1/sessions/{session}/messages")) == 18


def test_only_new_text_is_read(service: Service) -> None:
    session = service.session()
    first = list(service.ask(session, "When does the ferry to Lecce leave?", top_k=1, max_tokens=8))[-1][1]
    events = list(service.ask(session, "From which pier does the ferry to Lecce leave?", top_k=1, max_tokens=8))
    assert [source["state"] for source in events[0][1]["sources"]] == ["resident"]
    assert events[-1][1]["usage"]["cached_tokens"] == first["cache"]["resident_tokens"]
    assert events[-1][1]["usage"]["prefilled_tokens"] < 30


def test_leaving_or_cancelling_frees_the_session_with_a_true_history(service: Service) -> None:
    session = service.session()
    for event, _ in service.ask(session, "Count upwards for as long as you can.", top_k=0, max_tokens=200):
        if event == "token":
            break
    deadline = time.monotonic() + 20
    while (answer := service.http.post(f"/v1/sessions/{session}/messages", json={"content": "Hello", "top_k": 0,
                                       "max_tokens": 4, "stream": False})).status_code == 409:  # fmt: skip
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer.status_code == 200
    history = service.items(f"/v1/sessions/{session}/messages")
    assert next(m["finish_reason"] for m in history if m["role"] == "assistant") == "cancelled"
    blocks = service.items(f"/v1/sessions/{session}/cache")
    assert sum(b["tokens"] for b in blocks) == answer.json()["cache"]["resident_tokens"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"content": ""}, "content"),
        ({"content": "x", "bogus": 1}, "bogus"),
        ({"content": 5}, "content"),
        ({}, "content"),
        ({"content": "x", "top_k": 99}, "top_k"),
        ({"content": "x", "max_tokens": 90000}, "max_tokens"),
        ({"content": "word " * 9000}, "content"),
    ],
)
def test_a_bad_message_is_a_problem_that_names_the_field(service: Service, body: dict[str, Any], field: str) -> None:
    session = service.session()
    answer = service.http.post(f"/v1/sessions/{session}/messages", json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["field"] == field
    assert field in answer.json()["detail"]
    assert service.items(f"/v1/sessions/{session}/messages") == []
