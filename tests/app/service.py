"""A `keepwhole serve` process, and a client of it that knows nothing of our code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from tests.app.starter import Forked, Starter

COMMAND = [sys.executable, "-c", "from app.cli.commands import main; main()"]
TOWNS = ["Bodo", "Narva", "Lecce", "Tarifa", "Galway", "Piran"]


# Nothing is computed behind a test's back, unless it asks for it.
QUIET = {"KEEPWHOLE_BANK_AHEAD": "0"}


class Service:
    """The process. folder: its data. environment: settings beside those a test needs.

    starter: what forks it; None starts it anew, as benchmarks do.
    """

    starter: ClassVar[Starter | None] = None

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        settings = {f"KEEPWHOLE_{name}": value for name, value in environment.items()}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KEEPWHOLE_")}
        self.environment = {
            **inherited,
            "KEEPWHOLE_DATA_DIR": str(folder),
            "KEEPWHOLE_PREFILL_STEP": "64",
            **QUIET,
            **settings,
        }
        self.start()

    def start(self, *options: str) -> None:
        """Start it and wait until it says that it is ready. options: of the command, in place of any free port."""
        arguments = ["serve", *(options or ("--port", "0"))]
        with self.log_path.open("ab") as log:
            if self.starter is not None:
                self.process: subprocess.Popen[str] | Forked = self.starter.start(arguments, self.environment, log)
            else:
                self.process = subprocess.Popen(
                    [*COMMAND, *arguments], env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
                )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"is ready: (\S+)", line):
                self.url = found[1]
                self.http = httpx.Client(base_url=self.url, timeout=60)
                return
        raise AssertionError(self.log_path.read_text())

    @property
    def log_path(self) -> Path:
        """Where its log goes."""
        return self.folder / "server.log"

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it; returns its exit status once it is gone."""
        self.http.close()
        self.process.send_signal(how)
        return self.process.wait(30)

    def run(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line against it."""
        command = [*COMMAND, arguments[0], "--url", self.url, *arguments[1:]]
        return subprocess.run(
            command, env=self.environment, input=input, capture_output=True, text=True, timeout=120, check=False
        )

    def ask(self, session: str, content: str, **body: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ask over SSE; yields (event, data) as they come."""
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

    def tell(self, session: str, content: str, **body: Any) -> httpx.Response:
        """Ask, to be answered with JSON."""
        body = {"content": content, "stream": False, **body}
        return self.http.post(f"/v1/sessions/{session}/messages", json=body)

    def session(self, **body: Any) -> str:
        """A new session's id."""
        response = self.http.post("/v1/sessions", json=body)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def items(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        """Every item of a list, page by page."""
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self.http.get(path, params={"limit": 7, **parameters, **({"cursor": cursor} if cursor else {})})
            assert page.status_code == 200, page.text
            found += page.json()["items"]
            if (cursor := page.json()["next_cursor"]) is None:
                return found

    def blocks(self, session: str, **parameters: Any) -> list[dict[str, Any]]:
        """The session's blocks."""
        return self.items(f"/v1/sessions/{session}/cache", **parameters)

    def ingest(self, *texts: tuple[str, str]) -> list[str]:
        """Ingest (name, text) documents; returns their ids."""
        answers = [self.http.post("/v1/documents", json={"name": name, "text": text}).json() for name, text in texts]
        for answer in answers:
            self.finish(answer["job_id"])
        return [answer["documents"][0]["id"] for answer in answers]

    def finish(self, job: str) -> dict[str, Any]:
        """Wait for a job."""
        deadline = time.monotonic() + 60
        while True:
            state: dict[str, Any] = self.http.get(f"/v1/jobs/{job}").json()
            if state["status"] in ("done", "failed"):
                return state
            assert time.monotonic() < deadline, state
            time.sleep(0.02)


def towns(names: Sequence[str] = TOWNS) -> list[tuple[str, str]]:
    """A document about the ferry to each town, with facts that differ."""
    return [
        (
            f"{town}.md",
            f"# {town}\n\nThe ferry to {town} leaves at {i + 6}:15 from pier {i + 2}. Tickets cost {i + 11} euros.\n",
        )
        for i, town in enumerate(names)
    ]
