"""The served product over a long session: time to first token, kept tokens against the budget, memory, /health.

    .uv/bin/uv run python -m tests.benchmarks.service DATA.json [--messages 50] [--budget 1024] [--out RESULT.json]

DATA.json has the form of SQuAD's articles:
{"articles": [{"title", "paragraphs": [{"text", "qas": [{"question", "answers"}]}]}]}.
A real server process is started on a new data folder. Questions are asked one by one in one session, each
with its three best passages; the 10th is asked again in a new session for the ratio. Times are the client's.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import httpx

from tests.app.service import Service


def questions(articles: list[dict[str, Any]], count: int) -> list[tuple[str, list[str]]]:
    """(question, accepted answers), one paragraph after the other so that the topic keeps changing."""
    by_paragraph = [p["qas"] for article in articles for p in article["paragraphs"]]
    found = [qas[i] for i in range(max(map(len, by_paragraph))) for qas in by_paragraph if i < len(qas)]
    return [(qa["question"], qa["answers"]) for qa in found[:count]]


def ask(service: Service, session: str, question: str, **body: Any) -> dict[str, Any]:
    """One message: the seconds to its first token, and what `done` said."""
    started = time.perf_counter()
    first = None
    for event, data in service.ask(session, question, **body):
        if event == "token" and first is None:
            first = time.perf_counter() - started
        if event == "done":
            return {
                "first_token": first or time.perf_counter() - started,
                "total": time.perf_counter() - started,
                **data,
            }
    raise RuntimeError("the stream ended without `done`")


def rss(service: Service) -> int:
    """The server's resident memory in bytes."""
    kilobytes = subprocess.run(["ps", "-o", "rss=", "-p", str(service.process.pid)], capture_output=True, check=True)
    return int(kilobytes.stdout) * 1024


def probe_health(url: str, until: threading.Event, pause: float = 0.02) -> list[float]:
    """Seconds that /health took, with a pause after each, until told to stop."""
    waits = []
    with httpx.Client(base_url=url) as client:
        while not until.is_set():
            started = time.perf_counter()
            client.get("/health").raise_for_status()
            waits.append(time.perf_counter() - started)
            time.sleep(pause)
    return waits


def health(service: Service) -> dict[str, Any]:
    """/health while nothing else happens, and while a prompt of thousands of tokens is read."""
    stop = threading.Event()
    threading.Timer(3.0, stop.set).start()
    idle = probe_health(service.url, stop)
    stop, result = threading.Event(), {}

    def read() -> None:
        session = service.session(budget_tokens=4096)
        result.update(ask(service, session, "word " * 3000, top_k=0, max_tokens=1))
        stop.set()

    threading.Thread(target=read).start()
    busy = probe_health(service.url, stop)

    def figures(waits: list[float]) -> dict[str, float]:
        ordered = sorted(waits)
        return {
            "probes": len(ordered),
            "median_ms": 1000 * statistics.median(ordered),
            "p99_ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
            "max_ms": 1000 * ordered[-1],
        }

    return {
        "prefilled_tokens": result["usage"]["prefilled_tokens"],
        "seconds": result["timings"]["prefill"],
        "idle": figures(idle),
        "busy": figures(busy),
    }


def long_session(service: Service, asked: list[tuple[str, list[str]]], budget: int) -> dict[str, Any]:
    """Ask everything in one session; then the 10th question again in a new one."""
    session = service.session(budget_tokens=budget)
    messages = []
    for number, (question, accepted) in enumerate(asked, start=1):
        print(f"\rmessage {number} of {len(asked)}", end="", file=sys.stderr, flush=True)
        done = ask(service, session, question, top_k=3, max_tokens=32)
        messages.append(
            {
                "first_token": done["first_token"],
                "total": done["total"],
                "right": any(answer.lower() in done["content"].lower() for answer in accepted),
                "rss": rss(service),
                **done["usage"],
                **done["cache"],
                "step_seconds": done["timings"]["decode"] / max(1, done["usage"]["completion_tokens"]),
            }
        )
    follow_up = ask(service, session, asked[-1][0], top_k=3, max_tokens=32)
    fresh = ask(service, service.session(budget_tokens=budget), asked[9][0], top_k=3, max_tokens=32)
    return {
        "budget": budget,
        "messages": messages,
        "fresh_10": {"first_token": fresh["first_token"], **fresh["usage"]},
        "follow_up": {"first_token": follow_up["first_token"], **follow_up["usage"]},
    }


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--messages", default=50, show_default=True, type=click.IntRange(10))
@click.option("--budget", default=1024, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write every figure as JSON.")
def main(data: Path, messages: int, budget: int, out: Path | None) -> None:
    """Measure."""
    articles = json.loads(data.read_text())["articles"]
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), PREFILL_STEP="256")
        service.ingest(*((f"{a['title']}.txt", "\n\n".join(p["text"] for p in a["paragraphs"])) for a in articles))
        run = long_session(service, questions(articles, messages), budget)
        figures = {"machine": f"{platform.platform()}, {platform.processor() or platform.machine()}", "session": run}
        figures["health"] = health(service)
        service.stop()
    print(file=sys.stderr)
    report(figures)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def report(figures: dict[str, Any]) -> None:
    """Print the figures."""
    run = figures["session"]
    rows = run["messages"]
    print(f"{'message':>8} {'first token s':>14} {'read':>6} {'cached':>7} {'kept':>6} {'peak':>6} {'KV MB':>7}"
          f" {'ms/step':>8} {'RSS MB':>7}")  # fmt: skip
    for number in sorted({1, 2, 5, 10, 20, 30, 40, len(rows)} & set(range(1, len(rows) + 1))):
        row = rows[number - 1]
        print(
            f"{number:8} {row['first_token']:14.2f} {row['prefilled_tokens']:6} {row['cached_tokens']:7}"
            f" {row['resident_tokens']:6} {row['peak_tokens']:6} {row['kv_bytes'] / 1e6:7.1f}"
            f" {1000 * row['step_seconds']:8.0f} {row['rss'] / 1e6:7.0f}"
        )
    peak, filled = max(row["peak_tokens"] for row in rows), [r for r in rows if r["evicted"]]
    print(f"largest kept-token count, forward passes included: {peak} of budget {run['budget']}")
    print(f"largest between turns: {max(row['resident_tokens'] for row in rows)} of budget {run['budget']}")
    if filled:
        later = [row["kv_bytes"] for row in filled]
        print(f"KV bytes from the first eviction on: {min(later) / 1e6:.1f} to {max(later) / 1e6:.1f} MB")
    print(f"blocks evicted: {sum(row['evicted'] for row in rows)}; answers with an accepted text:"
          f" {sum(row['right'] for row in rows)} of {len(rows)}")  # fmt: skip
    again, seconds = run["follow_up"], [rows[0]["first_token"], rows[9]["first_token"], run["fresh_10"]["first_token"]]
    print(
        "first token: message 1 {:.2f} s, message 10 {:.2f} s, question 10 in a new session {:.2f} s".format(*seconds)
    )
    print(f"the last question asked again, its passages resident: {again['first_token']:.2f} s,"
          f" {again['prefilled_tokens']} tokens read")  # fmt: skip
    health = figures["health"]
    print(f"/health while {health['prefilled_tokens']} tokens were read in {health['seconds']:.1f} s:")
    for name in ("idle", "busy"):
        print("  " + name + " " + ", ".join(f"{key} {value:.1f}" for key, value in health[name].items()))


if __name__ == "__main__":
    main()
