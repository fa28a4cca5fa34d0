"""Whether passages that were computed behind the default prompt serve sessions with a prompt of their own.

    python -m tests.benchmarks.prefix xquad-dev.json [--questions 40]

Each question of XQuAD is asked under three system prompts behind the four passages that search finds for it. Their K/V
is put in from the bank: computed behind the session's own prompt, and behind the default one. Right as in
`tests.benchmarks.sampling`, answers greedy, of 32 tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kv import blas

blas.load()

from app.turns.prompts import default_system  # noqa: E402
from kv import LoadedModel, NewBlock, Session, load_model  # noqa: E402
from kv.caches.blockkv import BlockKV  # noqa: E402
from kv.model.sampling import Sampling  # noqa: E402
from tests.benchmarks.sampling import answer, normal, prepared  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "prefix.json"
PROMPTS = [
    "You are a librarian. Answer from the passages, briefly.",
    "Answer in one short sentence, for a pupil of ten years.",
    "You help journalists check facts. Use only what the passages say, and name the fact that was asked for.",
]


def computed(model: LoadedModel, system: list[int], passage: list[int]) -> BlockKV:
    """A passage's K/V behind a system prompt, as the bank computes it."""
    session = Session(model, budget=len(system) + len(passage), prefill_step=256, score="key_norm")
    for _ in session.prefill([NewBlock("system", system, pinned=True), NewBlock("passage", passage)]):
        pass
    kv = session.lift("passage")
    session.close()
    return kv


def main() -> None:
    """Measure, print, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--questions", type=int, default=40)
    given = parser.parse_args()
    model = load_model()
    template = model.template
    default = default_system(template)
    right = [{"own": 0, "default": 0} for _ in PROMPTS]
    for question, accepted, passages in prepared(model, given.data, given.questions):
        tokens = [template.wrap(template.passage, passage) for passage in passages]
        shared = [computed(model, default, passage) for passage in tokens]
        for prompt, count in zip(PROMPTS, right, strict=True):
            system = template.wrap(template.system, prompt)
            for way in count:
                session = Session(model, budget=2048, prefill_step=256)
                for _ in session.prefill([NewBlock("system", system, pinned=True)]):
                    pass
                kvs = shared if way == "default" else [computed(model, system, passage) for passage in tokens]
                pairs = zip(tokens, kvs, strict=True)
                session.insert([(NewBlock(f"p{i}", passage), kv) for i, (passage, kv) in enumerate(pairs)])
                asked = NewBlock("q", template.wrap(template.user, question))
                for _ in session.prefill([asked], answer=NewBlock("a", template.assistant.before), logits=True):
                    pass
                text, _ = answer(model, session, Sampling(), 32)
                count[way] += any(normal(reference) in normal(text) for reference in accepted)
                session.close()
    for prompt, count in zip(PROMPTS, right, strict=True):
        print(
            f"behind its own {count['own']:3}, behind the default {count['default']:3} of {given.questions}: {prompt}"
        )
    rows = [{"prompt": prompt, **count} for prompt, count in zip(PROMPTS, right, strict=True)]
    RESULTS.write_text(json.dumps({"questions": given.questions, "prompts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
