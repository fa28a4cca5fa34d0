"""Ingestion, disk, memory and search as a library grows to 100,000 passages.

    .uv/bin/uv run python -m tests.benchmarks.scale CRANFIELD.json [--passages 1000]… [--out RESULT.json]

Each size runs in a process of its own. Documents of sentences drawn from CRANFIELD.json (as for
`tests.benchmarks.retrieval`), so that words are as frequent as in real text, are ingested with WordLlama's vectors;
tokens are counted by a regular expression, so what the model's tokenizer takes comes on top. Then the library is opened
again, the time until vectors are searched is taken, and real queries are asked: of everything, under a filter that lets
a hundredth of the documents through, by words alone, and of four threads at once. At last an event loop ticks every
2 ms, as the service's does: its latest tick says for how long a search held the interpreter. `load` is the machine's
load average.
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
QUERIES = 200
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


def main_of(data: Path, passages: int, folder: Path) -> dict[str, Any]:
    """All figures of one size."""
    collection = json.loads(data.read_text())
    sentences = [
        " ".join(sentence.split())
        for document in collection["docs"].values()
        for sentence in document["text"].split(" .\n")
        if len(sentence.split()) > 5
    ]
    queries = list(collection["queries"].values())[:QUERIES]
    embedder = load_embedder("wordllama")
    path = folder / "library.db"
    database = Database(path, migrations)
    library = Library(database, words, 192, embedder)
    source, texts, ingested, worked, count = uploads(sentences), 0, 0.0, 0.0, 0
    while count < passages:
        batch = list(itertools.islice(source, min(250, -(-(passages - count) // (2 * PARAGRAPHS)))))
        started, busy = time.perf_counter(), time.process_time()
        library.wait(library.submit(batch).id)
        ingested += time.perf_counter() - started
        worked += time.process_time() - busy
        texts += sum(len(document.text.encode()) for document in batch)
        count = database.read(lambda db: db.execute("SELECT count(*) FROM passages").fetchone()[0])
    library.close()
    database.close()
    stored = path.stat().st_size

    before = resident_bytes()
    database = Database(path, migrations)
    started = time.perf_counter()
    library = Library(database, words, 192, embedder)
    library.wait_for_vectors()
    loaded = time.perf_counter() - started
    held = resident_bytes() - before
    kinds: dict[str, Ask] = {
        "all": lambda query: library.search(query, 10),
        "filtered": lambda query: library.search(query, 10, Filter(path="7")),
    }
    for kind in kinds.values():
        kind(queries[0])
    result = {
        "passages": count,
        "load": round(os.getloadavg()[0], 1),
        "ingest_passages_per_s": round(count / ingested),
        "ingest_passages_per_cpu_s": round(count / worked),
        "bytes_per_passage": round(stored / count),
        "text_bytes_per_passage": round(texts / count),
        "vectors_ready_s": round(loaded, 2),
        "memory_mb": round(held / 1e6),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "search_ms": {name: search_figures(ask, queries) for name, ask in kinds.items()},
    }
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda query: timed(kinds["all"], [query])[0], queries))
    result["search_ms"]["four threads"] = percentiles(together)
    result["event_loop_late_ms"] = asyncio.run(lateness(kinds["all"], queries))
    library.close()
    words_only = Library(database, words, 192)
    ask: Ask = lambda query: words_only.search(query, 10)  # noqa: E731
    result["search_ms"]["words alone"] = search_figures(ask, queries)
    words_only.close()
    database.close()
    return result


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
    await asyncio.sleep(1)
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


def in_folder(data: Path, passages: int) -> dict[str, Any]:
    """One size in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return main_of(data, passages, Path(folder))


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--passages", "sizes", multiple=True, type=int, default=SIZES, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(data: Path, sizes: tuple[int, ...], out: Path | None) -> None:
    """Measure."""
    results = []
    for passages in sizes:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(in_folder, (data, passages)))
        print(json.dumps(results[-1]), flush=True)
    if out is not None:
        out.write_text(json.dumps({"machine": platform.platform(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
