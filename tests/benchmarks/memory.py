"""Whether the cap on memory holds: many sessions under load, and the most that the server's process ever took.

    .uv/bin/uv run python -m tests.benchmarks.memory DATA.json [--minutes 30] [--sessions 50] [--out RESULT.json]

DATA.json as for `tests.benchmarks.service`. Eight clients at once ask random sessions of several budgets, some of which
they fork, cancel half-way or delete. The memory for K/V is small, so that sessions and passages keep going to disk and
coming back. Resident memory is read twice a second; it is to stay below what the process took when the model was
loaded, and the cap. What `/ready` says of K/V is to stay below the cap at all times.
"""

from __future__ import annotations

import json
import platform
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx

from tests.app.service import Service
from tests.benchmarks.service import questions, rss

CLIENTS = 8
BUDGETS = (256, 512, 1024, 2048)


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--sessions", "count", default=50, show_default=True)
@click.option("--cap", default=600, show_default=True, help="KEEPWHOLE_KV_MEMORY_MB.")
@click.option("--out", type=click.Path(path_type=Path))
def main(data: Path, minutes: float, count: int, cap: int, out: Path | None) -> None:
    """Measure."""
    articles = json.loads(data.read_text())["articles"]
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), KV_MEMORY_MB=str(cap), PREFILL_STEP="256")
        loaded = rss(service)
        service.ingest(*((f"{a['title']}.txt", "\n\n".join(p["text"] for p in a["paragraphs"])) for a in articles))
        run = Run(service, [service.session(budget_tokens=BUDGETS[i % len(BUDGETS)]) for i in range(count)])
        asked = [question for question, _ in questions(articles, 400)]
        until = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(run.client, number, asked, until) for number in range(CLIENTS)]
            series = run.watch(until, lambda: all(client.done() for client in clients))
            for client in clients:
                client.result()
        status = service.stop()
    most = max(row["rss"] for row in series)
    summary: dict[str, Any] = {
        "minutes": minutes,
        "sessions": count,
        "cap_mb": cap,
        "loaded_mb": loaded // 1_000_000,
        "peak_mb": most // 1_000_000,
        "beyond_loaded_mb": (most - loaded) // 1_000_000,
        "most_kv_mb": max(row["kv"] for row in series) // 1_000_000,
        "most_mlx_mb": max(row["mlx"] for row in series) // 1_000_000,
        "most_waiting": max(row["waiting"] for row in series),
        "most_at_work": max(row["at_work"] for row in series),
        "did": dict(run.did),
        "exit_status": status,
    }
    print(json.dumps(summary, indent=1))
    if out is not None:
        about = {"machine": platform.platform(), **summary}
        # One row in ten seconds is enough to see how it went.
        out.write_text(json.dumps({**about, "series": series[::20]}, indent=1) + "\n")


class Run:
    """The load on one server."""

    def __init__(self, service: Service, sessions: list[str]) -> None:
        self.service = service
        self.sessions = sessions
        self.did: Counter[str] = Counter()
        self._lock = threading.Lock()

    def client(self, seed: int, asked: list[str], until: float) -> None:
        """Ask, fork, cancel and delete until the time is over."""
        chance = random.Random(seed)
        with httpx.Client(base_url=self.service.url, timeout=None) as http:
            while time.monotonic() < until:
                with self._lock:
                    session = chance.choice(self.sessions)
                act = chance.random()
                body = {"content": chance.choice(asked), "top_k": chance.randint(0, 5), "max_tokens": 24}
                if act < 0.85:
                    answer = http.post(f"/v1/sessions/{session}/messages", json={**body, "stream": False})
                    self._note(f"asked {answer.status_code}")
                elif act < 0.95:
                    with http.stream("POST", f"/v1/sessions/{session}/messages", json=body) as response:
                        for line in response.iter_lines():
                            if line.startswith("event: token"):
                                break
                    self._note(f"left {response.status_code}")
                else:
                    made = http.post(f"/v1/sessions/{session}/fork", json={})
                    self._note(f"forked {made.status_code}")
                    if made.status_code == 201:
                        with self._lock:
                            self.sessions[self.sessions.index(session)] = made.json()["id"]
                        self._note(f"deleted {http.delete(f'/v1/sessions/{session}').status_code}")

    def watch(self, until: float, over: Any) -> list[dict[str, int]]:
        """Samples of the process and of what it says."""
        series = []
        started = time.monotonic()
        with httpx.Client(base_url=self.service.url, timeout=None) as http:
            while not over():
                said = http.get("/ready").json()
                series.append(
                    {
                        "second": round(time.monotonic() - started),
                        "rss": rss(self.service),
                        "kv": said["session_kv_bytes"] + said["bank_kv_bytes"],
                        "mlx": said["mlx_bytes"],
                        "waiting": said["turns_waiting"],
                        "at_work": said["turns_at_work"],
                    }
                )
                if len(series) % 120 == 1:
                    print(json.dumps(series[-1]), flush=True)
                time.sleep(0.5)
        return series

    def _note(self, what: str) -> None:
        with self._lock:
            self.did[what] += 1


if __name__ == "__main__":
    main()
