"""Ingestion, disk, memory and search as a library grows to 100,000 passages.

    .uv/bin/uv run python -m tests.benchmarks.scale CRANFIELD.json [--passages 1000]… [--out RESULT.json]

Documents of sentences drawn from CRANFIELD.json (as for `tests.benchmarks.retrieval`), so that words are as frequent as
in real text, are ingested with WordLlama's vectors; tokens are counted by a regular expression, so what the model's
tokenizer takes comes on top. Then the library is opened again in another process, the time until vectors are searched
is taken, and real queries are asked: of everything, under a filter that lets a hundredth of the documents through, of
four threads at once, and by words alone. An event loop ticks every 2 ms meanwhile, as the service's does: its latest
tick says for how long a search held the interpreter, beside the latest of an idle one. `ingest_load` and `search_load`
are the machine's load averages: what neighbours take makes other figures worse, processor time (`cpu`) hardly.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from ingest.database import Database
from ingest.documents import Upload, read_text
from ingest.embedders import load_embedder
from ingest.library import Filter, Library, migrations

SIZES = (1_000, 10_000, 100_000)
PARAGRAPHS = 8
SENTENCES = 4
QUERIES = 100
NAME = "library.db"
TICK = 0.002

Ask = Callable[[str], object]


def words(text: str) -> int:
    """Tokens, near enough: 192 of them are about a passage."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def uploads(sentences: Sequence[str]) -> Iterator[Upload]:
    """Documents without end, in a hundred folders in turn."""
    random_ = random.Random(1)
    for n in itertools.count():
        # Each is one or two passages.
        paragraphs = (" ".join(random_.choices(sentences, k=SENTENCES)) for _ in range(PARAGRAPHS))
        text = "\n\n".join(f"## Part {i}\n\n{paragraph}" for i, paragraph in enumerate(paragraphs))
        yield read_text(f"{n % 100}/{n}.md", text + "\n", metadata={"n": n}, max_bytes=10_000_000)


def ingest(data: Path, folder: Path, passages: int) -> dict[str, Any]:
    """Fill a library in `folder`, and what that took."""
    sentences = [
        " ".join(sentence.split())
        for document in json.loads(data.read_text())["docs"].values()
        for sentence in document["text"].split(" .\n")
        if len(sentence.split()) > 5
    ]
    database = Database(folder / NAME, migrations)
    library = Library(database, words, 192, load_embedder("wordllama"))
    source, texts, count, seconds, worked = uploads(sentences), 0, 0, 0.0, 0.0
    while count < passages:
        batch = list(itertools.islice(source, min(250, -(-(passages - count) // (2 * PARAGRAPHS)))))
        started, busy = time.perf_counter(), time.process_time()
        library.wait(library.submit(batch).id)
        seconds += time.perf_counter() - started
        worked += time.process_time() - busy
        texts += sum(len(document.text.encode()) for document in batch)
        count = database.read(lambda db: db.execute("SELECT count(*) FROM passages").fetchone()[0])
    library.close()
    database.close()
    return {
        "passages": count,
        "ingest_load": load(),
        "ingest_passages_per_s": round(count / seconds),
        "ingest_passages_per_cpu_s": round(count / worked),
        "bytes_per_passage": round((folder / NAME).stat().st_size / count),
        "text_bytes_per_passage": round(texts / count),
    }


def search(data: Path, folder: Path) -> dict[str, Any]:
    """Open the library in `folder` and ask it."""
    queries = list(json.loads(data.read_text())["queries"].values())[:QUERIES]
    embedder = load_embedder("wordllama")
    before = resident_bytes()
    database = Database(folder / NAME, migrations)
    started = time.perf_counter()
    library = Library(database, words, 192, embedder)
    library.wait_for_vectors()
    ready = time.perf_counter() - started

    def everything(query: str) -> None:
        library.search(query, 10)

    def filtered(query: str) -> None:
        library.search(query, 10, Filter(path="7"))

    everything(queries[0])
    figures = {"everything": search_figures(everything, queries), "filtered": search_figures(filtered, queries)}
    with ThreadPoolExecutor(4) as pool:
        figures["four threads"] = percentiles(list(pool.map(lambda query: timed(everything, [query])[0], queries)))
    late = asyncio.run(lateness(everything, queries))
    library.close()
    held = resident_bytes() - before
    words_only = Library(database, words, 192)
    figures["words alone"] = search_figures(lambda query: words_only.search(query, 10), queries)
    words_only.close()
    database.close()
    return {
        "vectors_ready_s": round(ready, 2),
        "memory_mb": round(held / 1e6),
        "process_memory_mb": round(resident_bytes() / 1e6),
        "search_load": load(),
        "search_ms": figures,
        "event_loop_late_ms": late,
    }


def load() -> float:
    """The machine's load average of the last minute."""
    return round(os.getloadavg()[0], 1)


def timed(ask: Ask, queries: Sequence[str]) -> list[float]:
    """Seconds of each."""
    seconds = []
    for query in queries:
        started = time.perf_counter()
        ask(query)
        seconds.append(time.perf_counter() - started)
    return seconds


def search_figures(ask: Ask, queries: Sequence[str]) -> dict[str, float]:
    """Milliseconds of a search, and of processor time, which neighbours on the machine change little."""
    busy = time.process_time()
    figures = percentiles(timed(ask, queries))
    return {**figures, "cpu_mean": round((time.process_time() - busy) / len(queries) * 1e3, 2)}


async def lateness(ask: Ask, queries: Sequence[str]) -> dict[str, dict[str, float]]:
    """How late the event loop's ticks are, idle and with searches in a thread, as the service runs them."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            late.append(time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(5)
    idle = percentiles(late)
    late.clear()
    for query in queries:
        await asyncio.to_thread(ask, query)
    ticking.cancel()
    return {"idle": idle, "searching": percentiles(late)}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(seconds, n=20)
    return {"p50": round(cuts[9] * 1e3, 2), "p95": round(cuts[18] * 1e3, 2), "max": round(max(seconds) * 1e3, 2)}


def resident_bytes() -> int:
    """Of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call it in a process of its own, whose memory is its alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--passages", "sizes", multiple=True, type=int, default=SIZES, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(data: Path, sizes: tuple[int, ...], out: Path | None) -> None:
    """Measure."""
    results = []
    for passages in sizes:
        with tempfile.TemporaryDirectory() as folder:
            results.append({**apart(ingest, data, Path(folder), passages), **apart(search, data, Path(folder))})
        print(json.dumps(results[-1]), flush=True)
    if out is not None:
        out.write_text(json.dumps({"machine": platform.platform(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
