"""What the passage bank saves: putting K/V in against reading it, and the first token over five banked passages.

    .uv/bin/uv run python -m tests.benchmarks.recall DATA.json [--rounds 3] [--out RESULT.json]

DATA.json as for `tests.benchmarks.service`. First one session of SmolLM2, no server: a passage of each length
is read behind 700 tokens, and is put in there from memory and from disk instead. Then a real server: five passages of
192 tokens at most, asked about by a new session, read by it for the first time and banked the second. Best of the
rounds.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kv import blas
from tests.app.service import Service
from tests.benchmarks.service import ask

LENGTHS = (32, 64, 128, 192)
BEHIND = 700


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(data: Path, rounds: int, out: Path | None) -> None:
    """Measure."""
    articles = json.loads(data.read_text())["articles"]
    chosen = blas.load()
    figures = {
        "machine": f"{platform.platform()}, {chosen.name}",
        "blocks": blocks(articles, rounds),
        "first_token": first_token(articles, rounds),
    }
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def blocks(articles: list[dict[str, Any]], rounds: int) -> list[dict[str, float]]:
    """Seconds to have one block in a session: read, from memory, from disk."""
    from kv import Session, load_model
    from kv.caches.blockkv import BlockKV
    from kv.session.session import NewBlock

    model = load_model()
    tokens = model.codec.encode(" ".join(p["text"] for article in articles for p in article["paragraphs"]))
    session = Session(model, budget=1024, prefill_step=256)

    def read(block: NewBlock) -> None:
        for _ in session.prefill([block]):
            pass

    read(NewBlock("system", tokens[:40], pinned=True))
    read(NewBlock("before", tokens[40 : 40 + BEHIND]))
    results = []
    print(f"{'tokens':>8} {'read s':>8} {'memory s':>9} {'disk s':>8} {'x memory':>9} {'x disk':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for length in LENGTHS:
            block = NewBlock("block", tokens[1000 : 1000 + length])
            file = Path(folder) / "block.safetensors"
            read(block)
            kv = session.lift("block")
            digest = kv.save(file, "block")
            ways: dict[str, Callable[[], None]] = {
                "read": lambda block=block: read(block),  # type: ignore[misc]
                "memory": lambda block=block, kv=kv: session.insert([(block, kv)]),  # type: ignore[misc]
                "disk": lambda block=block, file=file, digest=digest: session.insert(  # type: ignore[misc]
                    [(block, BlockKV.load(file, "block", digest))]
                ),
            }
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(rounds):
                for name, way in ways.items():
                    session.rewind("block")
                    # What the block before gave to scores is worked out now, and is not a part of what follows.
                    session.blocks()
                    started = time.perf_counter()
                    way()
                    best[name] = min(best[name], time.perf_counter() - started)
            session.rewind("block")
            results.append({"tokens": length, "bytes": kv.nbytes, **best})
            print(
                f"{length:8} {best['read']:8.3f} {best['memory']:9.4f} {best['disk']:8.4f}"
                f" {best['read'] / best['memory']:9.0f} {best['read'] / best['disk']:7.0f}"
            )
    return results


def first_token(articles: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Seconds to the first token of a new session's first question, five passages with it, by where they come from."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), PREFILL_STEP="256")
        service.ingest(*((f"{a['title']}.txt", "\n\n".join(p["text"] for p in a["paragraphs"])) for a in articles))
        print(f"{'read':>6} {'first token s':>14} {'recalled':>9} {'first token s':>14} {'x':>5}")
        # One of each article, so that no passage is in the bank before its question.
        for article in articles[:rounds]:
            question = article["paragraphs"][0]["qas"][0]["question"]
            runs = [ask(service, service.session(), question, top_k=5, max_tokens=1) for _ in range(3)]
            read, recalled = runs[0], min(runs[1:], key=lambda run: run["first_token"])
            results.append({"read": _figures(read), "recalled": _figures(recalled)})
            print(
                f"{read['usage']['prefilled_tokens']:6} {read['first_token']:14.2f}"
                f" {recalled['usage']['cached_tokens']:9} {recalled['first_token']:14.3f}"
                f" {read['first_token'] / recalled['first_token']:5.0f}"
            )
        service.stop()
    return results


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    return {"first_token": run["first_token"], **run["usage"], **run["timings"]}


if __name__ == "__main__":
    main()
