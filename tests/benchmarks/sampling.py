"""How the embedded model's tokens are best chosen: right answers and loops, by sampling parameters.

    python -m tests.benchmarks.sampling xquad-dev.json [--questions 120] [--tokens 96] [--seeds 3]

Each question of XQuAD is asked behind the four passages that search finds for it, best last, as a turn has them. One
prefill serves all ways of choosing. Right: the answer's text holds a reference answer, case and articles aside.
Loops: answers that `app.turns.repeats` would end, and those of which a sentence stands there three times.
Draws are seeded by question; a way that draws is run with several seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kv import blas

blas.load()

from app.library import counter_of, open_documents, open_library  # noqa: E402
from app.settings import Settings  # noqa: E402
from app.turns.prompts import DEFAULT_SYSTEM_PROMPT, passage_message  # noqa: E402
from app.turns.repeats import Repeats  # noqa: E402
from kv import LoadedModel, NewBlock, Session, load_model  # noqa: E402
from kv.model.sampling import Sampler, Sampling  # noqa: E402
from tests.benchmarks.service import questions  # noqa: E402
from tests.ingest.helpers import ingest, upload  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sampling.json"

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty 1.1": {"repetition_penalty": 1.1},
    "penalty 1.2": {"repetition_penalty": 1.2},
    "penalty 1.3": {"repetition_penalty": 1.3},
    "frequency 0.3": {"frequency_penalty": 0.3},
    "temperature 0.2, top_p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "temperature 0.2, top_p 0.9, penalty 1.2": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.2},
}


def normal(text: str) -> str:
    """Lower case, without articles and punctuation."""
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))


def answer(model: LoadedModel, start: Session, sampling: Sampling, tokens: int) -> tuple[str, bool]:
    """The answer's text, and whether it was a loop."""
    session = start.fork({block: block for block in start.block_ids})
    logits, sampler, repeats = start.next_logits, Sampler(sampling), Repeats()
    said: list[int] = []
    looped = False
    while logits is not None and len(said) < tokens:
        token = sampler.choose(logits).token
        if token in model.stop_ids:
            break
        said.append(token)
        if looped := repeats.push(token):
            break
        logits = session.step(token)
    session.close()
    text = model.codec.decode(said)
    sentences = [normal(sentence) for sentence in re.split(r"[.!?\n]+", text)]
    return text, looped or any(s and sentences.count(s) >= 3 for s in sentences)


def prepared(model: LoadedModel, data: Path, count: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """Questions, their accepted answers, and the passages that are found for each, as messages, best last."""
    articles = json.loads(data.read_text())["articles"]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder))
        library = open_library(open_documents(settings), counter_of(model), settings)
        texts = [(f"{a['title']}.txt", "\n\n".join(p["text"] for p in a["paragraphs"])) for a in articles]
        for name, text in texts:
            ingest(library, upload(name, text))
        library.wait_for_vectors()
        for question, accepted in questions(articles, count):
            yield question, accepted, [passage_message(p) for p in reversed(library.search(question, 4))]
        library.close()


def main() -> None:
    """Run all ways, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    model = load_model()
    template = model.template
    counts = {name: {"right": 0, "loops": 0, "tokens": 0, "runs": 0} for name in WAYS}
    for number, (question, references, passages) in enumerate(prepared(model, given.data, given.questions)):
        session = Session(model, budget=2048, prefill_step=256)
        parts = [NewBlock("system", template.wrap(template.system, DEFAULT_SYSTEM_PROMPT), pinned=True)]
        parts += [NewBlock(f"p{i}", template.wrap(template.passage, text)) for i, text in enumerate(passages)]
        parts.append(NewBlock("q", template.wrap(template.user, question)))
        for _ in session.prefill(parts, answer=NewBlock("a", template.assistant.before), logits=True):
            pass
        for name, way in WAYS.items():
            for seed in range(given.seeds if way.get("temperature") else 1):
                text, looped = answer(model, session, Sampling(**way, seed=1000 * seed + number), given.tokens)
                count = counts[name]
                count["right"] += any(normal(reference) in normal(text) for reference in references)
                count["loops"] += looped
                count["tokens"] += len(model.codec.encode(text))
                count["runs"] += 1
        session.close()
        if number % 10 == 9:
            print(number + 1, {name: (c["right"], c["loops"]) for name, c in counts.items()}, flush=True)
    table = {
        name: {"right": c["right"] / c["runs"], "loops": c["loops"] / c["runs"], "tokens": c["tokens"] / c["runs"]}
        for name, c in counts.items()
    }
    for name, row in table.items():
        print(f"{name:42} right {row['right']:.3f}  loops {row['loops']:.3f}  tokens {row['tokens']:.0f}")
    about = {"questions": given.questions, "tokens": given.tokens, "model": model.name}
    RESULTS.write_text(json.dumps({**about, "ways": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
