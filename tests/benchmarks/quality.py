"""Whether answers hold up: the same questions in one long session and each in a session of its own.

    .uv/bin/uv run python -m tests.benchmarks.quality DATA.json [--questions 24] [--budget 1024] [--out RESULT.json]

DATA.json as for `tests.benchmarks.service`. Each question comes with its three best passages, greedily answered in at
most 32 tokens; right means that an accepted text is in the answer. With the bank (its first tokens recomputed or not)
and without.
A small model and few questions: read it as a comparison of ways, not as a grade.
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import click

from tests.app.service import Service
from tests.benchmarks.service import ask, questions

WAYS: dict[str, dict[str, str]] = {
    "bank": {},
    "bank, 8 recomputed": {"BANK_RECOMPUTE": "8"},
    "no bank": {"BANK_MEMORY_MB": "0", "BANK_DISK_MB": "0"},
}


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--questions", "count", default=24, show_default=True)
@click.option("--budget", default=1024, show_default=True)
@click.option("--way", "only", multiple=True, type=click.Choice(list(WAYS)))
@click.option("--out", type=click.Path(path_type=Path))
def main(data: Path, count: int, budget: int, only: tuple[str, ...], out: Path | None) -> None:
    """Measure."""
    articles = json.loads(data.read_text())["articles"]
    asked = questions(articles, count)
    documents = [(f"{a['title']}.txt", "\n\n".join(p["text"] for p in a["paragraphs"])) for a in articles]
    results: dict[str, Any] = {}
    for way in only or WAYS:
        with tempfile.TemporaryDirectory() as folder:
            service = Service(Path(folder), PREFILL_STEP="256", **WAYS[way])
            service.ingest(*documents)
            session = service.session(budget_tokens=budget)
            together = [_answer(service, session, *qa) for qa in asked]
            alone = [_answer(service, service.session(budget_tokens=budget), *qa) for qa in asked]
            service.stop()
        results[way] = {"one_session": together, "alone": alone}
        for name, rows in results[way].items():
            right = sum(row["right"] for row in rows)
            first = sorted(row["first_token"] for row in rows)[len(rows) // 2]
            print(f"{way:20} {name:12} {right:3} of {count} right, median first token {first:.2f} s", flush=True)
    if out is not None:
        about = {"machine": platform.platform(), "budget": budget, "questions": count, "ways": results}
        out.write_text(json.dumps(about, indent=1) + "\n")


def _answer(service: Service, session: str, question: str, accepted: list[str]) -> dict[str, Any]:
    done = ask(service, session, question, top_k=3, max_tokens=32)
    return {
        "right": any(answer.lower() in done["content"].lower() for answer in accepted),
        "first_token": done["first_token"],
        "answer": done["content"],
        "accepted": accepted,
    }


if __name__ == "__main__":
    main()
