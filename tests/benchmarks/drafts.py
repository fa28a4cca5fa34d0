"""Prompt lookup: how much of real answers is drafted right, and what it saves.

    python -m tests.benchmarks.drafts xquad-dev.json mtrag-dev.json [--questions 40] [--tokens 60]

XQuAD's questions behind the four passages that search finds, MT-RAG's behind the passages that answer them and the last
two messages of their conversation. Each answer is written twice from the same cache, with and without drafts, in turns;
it must be the same. Chosen by the model's own sampling. Speed: seconds of all answers without, over those with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kv import blas

blas.load()

from app.turns.prompts import default_system  # noqa: E402
from kv import LoadedModel, NewBlock, Session, load_model, run_together  # noqa: E402
from kv.model.sampling import Sampler  # noqa: E402
from tests.benchmarks.sampling import prepared  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "drafts.json"
BUDGET, MOST = 2048, 7


def answer(session: Session, most: int, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """An answer's tokens, and what it took."""
    model = session.model
    assert session.next_logits is not None
    sampler, lookup, rows = Sampler(model.sampling), session.lookup(most), session.next_logits[None]
    said: list[int] = []
    run: list[int] = []
    passes, began = 0, time.perf_counter()
    while True:
        right = 1
        for place in range(len(rows)):
            token = sampler.choose(rows[place]).token
            said.append(token)
            lookup.push(token)
            if token in model.stop_ids or len(said) == tokens or place + 1 == len(rows) or run[place + 1] != token:
                break
            right += 1
        if run:
            session.reject(len(rows) - right)
            lookup.note(len(rows) - 1, right - 1)
        if token in model.stop_ids or len(said) == tokens:
            break
        run = [token, *lookup.draft(min(session.room_for_draft, tokens - len(said) - 1))]
        (rows,) = run_together([session], [run])
        passes += 1
    seconds = time.perf_counter() - began
    return said, {"seconds": seconds, "passes": passes, "drafted": lookup.drafted, "accepted": lookup.accepted}


def conversations(model: LoadedModel, data: Path, count: int) -> Iterator[list[NewBlock]]:
    """MT-RAG's questions that fit, as blocks."""
    given = json.loads(data.read_text())
    template = model.template
    for query in given["queries"]:
        passages = [given["documents"][name] for name in query["relevant"][:3]]
        blocks = [NewBlock(f"p{i}", template.wrap(template.passage, text)) for i, text in enumerate(passages)]
        for i, told in enumerate(query["history"][-2:]):
            kind = template.user if told["role"] == "user" else template.assistant
            blocks.append(NewBlock(f"h{i}", template.wrap(kind, told["text"])))
        blocks.append(NewBlock("q", template.wrap(template.user, query["question"])))
        if sum(len(block.tokens) for block in blocks) < BUDGET - 200 and count:
            count -= 1
            yield blocks


def questions(model: LoadedModel, data: Path, count: int) -> Iterator[list[NewBlock]]:
    """XQuAD's questions, as blocks."""
    template = model.template
    for question, _, passages in prepared(model, data, count):
        blocks = [NewBlock(f"p{i}", template.wrap(template.passage, text)) for i, text in enumerate(passages)]
        yield [*blocks, NewBlock("q", template.wrap(template.user, question))]


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xquad", type=Path)
    parser.add_argument("mtrag", type=Path)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    model = load_model()
    rows = []
    for name, asked in (
        ("xquad", questions(model, given.xquad, given.questions)),
        ("mtrag", conversations(model, given.mtrag, given.questions)),
    ):
        total = {way: {"seconds": 0.0, "passes": 0, "drafted": 0, "accepted": 0} for way in (0, MOST)}
        tokens = others = 0
        for number, blocks in enumerate(asked):
            start = Session(model, budget=BUDGET, prefill_step=256)
            system = NewBlock("system", default_system(model.template), pinned=True)
            prompt = NewBlock("a", model.template.assistant.before)
            for _ in start.prefill([system, *blocks], answer=prompt, logits=True):
                pass
            answers = {}
            # In turns, and each as often the first.
            for way in (0, MOST) if number % 2 else (MOST, 0):
                session = start.fork({block: block for block in start.block_ids})
                answers[way], took = answer(session, way, given.tokens)
                for key, value in took.items():
                    total[way][key] += value
                session.close()
            start.close()
            tokens += len(answers[0])
            others += answers[0] != answers[MOST]
        speed = total[0]["seconds"] / total[MOST]["seconds"]
        row = {
            "data": name,
            "answers": number + 1,
            "other_answers": others,
            "tokens": tokens,
            "drafted": total[MOST]["drafted"],
            "accept_rate": round(total[MOST]["accepted"] / max(1, total[MOST]["drafted"]), 3),
            "passes_a_token": round(total[MOST]["passes"] / max(1, total[0]["passes"]), 3),
            "times_faster": round(speed, 3),
        }
        print(row, flush=True)
        rows.append(row)
    RESULTS.write_text(json.dumps({"model": model.name, "most": MOST, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
