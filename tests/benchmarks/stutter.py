"""Whether ingesting makes chats stutter: the gaps between a stream's tokens, alone and during a large ingestion.

    .uv/bin/uv run python -m tests.benchmarks.stutter [--rounds 4] [--kind files] [--out RESULT.json]

What is ingested is real: `files` are the modules of Python's own library, by the hundred in a request; `text` is as
many of them as 2 MB hold, as one file without any structure to it; `code` is the same as one Python module. Answers
alternate, two alone and then as many as a job lasts for; of these only gaps that lie wholly within the job are counted.
Gaps are the client's, between the arrivals of `token` events. The ratio is what to read: within 1.5 is the aim. Also
/health, asked all the while.
"""

from __future__ import annotations

import json
import platform
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import httpx

from tests.app.service import Service
from tests.benchmarks.service import probe_health

TEXT_BYTES = 2_000_000
FILES = 100
KINDS = ("files", "text", "code")
QUESTION = "Write a long story about a lighthouse, a storm and a boat that came back. Do not stop early."


@click.command()
@click.option("--rounds", default=4, show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS))
@click.option("--tokens", default=150, show_default=True, help="Tokens of each answer.")
@click.option("--out", type=click.Path(path_type=Path))
def main(rounds: int, kinds: tuple[str, ...], tokens: int, out: Path | None) -> None:
    """Measure."""
    results = {}
    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            service = Service(Path(folder))
            results[kind] = measure(service, kind, rounds, tokens)
            service.stop()
        report(kind, results[kind])
    if out is not None:
        out.write_text(json.dumps({"machine": platform.platform(), "kinds": results}, indent=1) + "\n")


def measure(service: Service, kind: str, rounds: int, tokens: int) -> dict[str, Any]:
    """The gaps in seconds, sorted, and those of /health."""
    modules = library()
    alone: list[float] = []
    during: list[float] = []
    idle: list[float] = []
    busy: list[float] = []
    taken: list[dict[str, float]] = []
    stream(service, tokens)
    for number in range(rounds):
        with probing(service) as waits:
            for _ in range(2):
                alone += gaps(stream(service, tokens))
        idle += waits
        with probing(service) as waits:
            ingestion = Ingestion(service, uploads(kind, modules, number))
            while ingestion.running:
                arrivals = stream(service, tokens)
                during += gaps([at for at in arrivals if ingestion.covers(at)])
        busy += waits
        taken.append(ingestion.summary)
    series = {"alone": alone, "during": during, "health_alone": idle, "health_during": busy}
    return {**{name: sorted(seconds) for name, seconds in series.items()}, "ingestions": taken}


@contextmanager
def probing(service: Service) -> Iterator[list[float]]:
    """Ask for /health all the while; yields the seconds it took, all there at the end."""
    waits: list[float] = []
    stop = threading.Event()
    probe = threading.Thread(target=lambda: waits.extend(probe_health(service.url, stop, pause=0.2)))
    probe.start()
    yield waits
    stop.set()
    probe.join()


def stream(service: Service, tokens: int) -> list[float]:
    """One answer: when its tokens arrived."""
    session = service.session(budget_tokens=512)
    asked = service.ask(session, QUESTION, top_k=0, max_tokens=tokens)
    arrivals = [time.monotonic() for event, _ in asked if event == "token"]
    service.http.delete(f"/v1/sessions/{session}")
    return arrivals


def gaps(arrivals: list[float]) -> list[float]:
    """Seconds between one and the next."""
    return [after - before for before, after in pairwise(arrivals)]


class Ingestion:
    """One job at work, in the background."""

    def __init__(self, service: Service, files: list[tuple[str, bytes]]) -> None:
        self.began = time.monotonic()
        self.ended = float("inf")
        self._size = sum(len(data) for _, data in files)
        with httpx.Client(base_url=service.url, timeout=120) as http:
            answer = http.post("/v1/documents", files=[("files", file) for file in files])
        answer.raise_for_status()
        self._url = f"{service.url}/v1/jobs/{answer.json()['job_id']}"
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            job = httpx.get(self._url, timeout=60).json()
            if job["finished_at"] is not None:
                self.ended = time.monotonic()
                self._states = [document["status"] for document in job["documents"]]
                return
            time.sleep(0.25)

    @property
    def running(self) -> bool:
        """Whether it is not over."""
        return self._thread.is_alive()

    def covers(self, moment: float) -> bool:
        """Whether it was at work then."""
        return self.began < moment < self.ended

    @property
    def summary(self) -> dict[str, float]:
        """What it was."""
        self._thread.join()
        done = self._states.count("done")
        return {"seconds": self.ended - self.began, "bytes": self._size, "files": len(self._states), "done": done}


def library() -> list[tuple[str, bytes]]:
    """Python's own modules."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return [(str(path.relative_to(root)), path.read_bytes()) for path in paths]


def uploads(kind: str, modules: list[tuple[str, bytes]], number: int) -> list[tuple[str, bytes]]:
    """What to ingest in a round: never the same bytes twice, since those would not be cut again."""
    if kind == "files":
        chosen = [module for module in modules if 2_000 < len(module[1]) < 200_000]
        chosen = chosen[number * FILES :][:FILES]
        return [(f"{number}/{name}", data) for name, data in chosen]
    joined = b"\n\n".join(_until(modules, TEXT_BYTES))
    ending = "txt" if kind == "text" else "py"
    return [(f"all-{number}.{ending}", b"# Round %d\n\n" % number + joined)]


def _until(modules: list[tuple[str, bytes]], size: int) -> Iterator[bytes]:
    for _, data in modules:
        if b"coding:" not in data[:200]:
            yield data
            size -= len(data)
        if size < 0:
            return


def report(kind: str, result: dict[str, Any]) -> None:
    """Print the figures."""
    sizes = ", ".join(f"{i['bytes'] / 1e6:.1f} MB in {i['seconds']:.0f} s" for i in result["ingestions"])
    print(f"{kind}: {sizes}; {len(result['alone'])} gaps alone, {len(result['during'])} during")
    for name, share in (("median", 0.5), ("p95", 0.95), ("p99", 0.99), ("longest", 1.0)):
        alone, during, *health = (
            1000 * result[which][int(share * (len(result[which]) - 1))]
            for which in ("alone", "during", "health_alone", "health_during")
        )
        print(f"  {name:8} {alone:6.0f} ms alone, {during:6.0f} ms during: {during / alone:5.2f};"
              f" /health {health[0]:4.0f}, {health[1]:4.0f} ms", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
