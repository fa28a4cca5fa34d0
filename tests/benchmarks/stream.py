"""A stream far beyond the trained context: does the cache stay flat, and does the model still read as well at its end?

    .uv/bin/uv run python -m tests.benchmarks.stream cranfield.json [--tokens 100000] [--out RESULT.json]

The abstracts of the file go through one session of SmolLM2 (trained on 8,192 positions), each a block; the block with
the least attention leaves, whole, when one needs its room. Every 2,500 tokens, and at each of the last 20 abstracts,
the next abstract is predicted by a copy of the session and by stock mlx-lm: its full cache, which has read just what
the session keeps and nothing else. At the end the session as it was when it first filled, restored from disk, and as it
is now take steps in turns. Half an hour.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from kv import blas

STEP, EVERY, TAIL, STEPS = 256, 2500, 20, 40
LONGEST = 384


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", "length", default=100_000, show_default=True)
@click.option("--budget", default=1024, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(file: Path, length: int, budget: int, out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache

    from kv import Session, load_model
    from kv.session.session import NewBlock

    model = load_model()
    texts = [document["text"] for document in json.loads(file.read_text())["docs"].values()]
    abstracts = [tokens for text in texts if 32 <= len(tokens := model.codec.encode(text + "\n\n")) <= LONGEST]
    starts = [0]
    for tokens in abstracts:
        starts.append(starts[-1] + len(tokens))
    count = next((i for i, start in enumerate(starts) if start >= length), None)
    if count is None:
        raise click.ClickException(f"{file}: {starts[-1]} tokens are too few for {length}")

    session = Session(model, budget=budget, prefill_step=STEP)
    template = model.template
    held = {"system": template.wrap(template.system, "You read abstracts of papers on aerodynamics.")}
    for _ in session.prefill([NewBlock("system", held["system"], pinned=True)]):
        pass
    series: list[dict[str, Any]] = []
    read: list[dict[str, Any]] = []

    def loss(caches: list[Any], before: list[int], tokens: list[int]) -> float:
        """Nats of all tokens but the first, behind `before`, which is read first."""
        for start in range(0, len(before), STEP):
            model.model(mx.array(before[start : start + STEP])[None], cache=caches)
            mx.eval([cache.state for cache in caches])
        logits = model.model(mx.array(tokens)[None], cache=caches)[0, :-1]
        return nn.losses.cross_entropy(logits, mx.array(tokens[1:])).sum().item()

    def steps(*sessions: Session, times: int) -> list[float]:
        """The median seconds of a step of each session, which take them in turns, so that noise meets them alike."""
        for of in sessions:
            for _ in of.prefill([], answer=NewBlock("probe", abstracts[0][:2])):
                pass
        seconds: list[list[float]] = [[] for _ in sessions]
        for token in abstracts[0][1 : times + 1]:
            for of, taken in zip(sessions, seconds, strict=True):
                started = time.perf_counter()
                of.step(token)
                taken.append(time.perf_counter() - started)
        for of in sessions:
            of.close_answer(2, [])
            of.rewind("probe")
        return [statistics.median(taken) for taken in seconds]

    with tempfile.TemporaryDirectory() as folder:
        full, now = Path(folder) / "full.safetensors", Path(folder) / "now.safetensors"
        filled = ""
        next_sample = 0
        for number, tokens in enumerate(abstracts[:count]):
            while session.room < max(len(tokens), STEPS + 2):
                if not filled:
                    filled = session.save(full, "full")
                least = least_attended(session)
                session.evict(least)
                del held[least]
            tail = number >= count - TAIL
            if starts[number] >= next_sample or tail:
                next_sample += 0 if tail else EVERY
                session.save(now, "now")
                kept = [token for block in session.block_ids for token in held[block]]
                row = {
                    "streamed": starts[number],
                    "position": session.position,
                    "kept": session.tokens_kept,
                    "kv_bytes": session.nbytes,
                    "step_ms": 1000 * steps(session, times=5)[0],
                    "predicted": len(tokens) - 1,
                    "nats": loss(load_prompt_cache(str(now)), [], tokens),
                    "nats_fresh": loss(make_prompt_cache(model.model), kept, tokens),
                    "tail": tail,
                }
                assert len(kept) == row["kept"]
                series.append(row)
                print(
                    f"{row['streamed']:7} tokens, kept {row['kept']:5}, {row['kv_bytes'] / 1e6:5.1f} MB, "
                    f"{row['step_ms']:5.0f} ms a step, perplexity {math.exp(row['nats'] / row['predicted']):6.2f}, "
                    f"fresh {math.exp(row['nats_fresh'] / row['predicted']):6.2f}",
                    flush=True,
                )
            block = f"abstract {number}"
            for _ in session.prefill([NewBlock(block, tokens)]):
                pass
            held[block] = tokens
            read.append({"streamed": starts[number + 1], "kept": session.tokens_kept, "kv_bytes": session.nbytes})
        first = Session.load(model, full, "full", filled)

    while session.room < STEPS + 2 or session.tokens_kept > first.tokens_kept:
        session.evict(least_attended(session))
    while first.room < STEPS + 2:
        first.evict(least_attended(first))
    bytes_first, bytes_end = (max(row["kv_bytes"] for row in rows) for rows in halves(read))
    taken = [steps(first, session, times=STEPS) for _ in range(5)]
    tails = [row for row in series if row["tail"]]
    predicted = sum(row["predicted"] for row in tails)
    summary = {
        "streamed": starts[count],
        "perplexity": math.exp(sum(row["nats"] for row in tails) / predicted),
        "perplexity_fresh": math.exp(sum(row["nats_fresh"] for row in tails) / predicted),
        "predicted": predicted,
        "step_ratio": statistics.median(end / start for start, end in taken),
        "step_ms": [[round(1000 * seconds, 1) for seconds in pair] for pair in taken],
        "kept_at_steps": [first.tokens_kept, session.tokens_kept],
        "kv_bytes_first": bytes_first,
        "kv_bytes_end": bytes_end,
        "most_kept": max(row["kept"] for row in read),
    }
    print(json.dumps(summary, indent=1))
    if out is not None:
        about = {"machine": f"{platform.platform()}, {chosen.name}", "budget": budget, **summary}
        out.write_text(json.dumps({**about, "series": series, "read": read}, indent=1) + "\n")


def least_attended(session: Any) -> str:
    """The block to evict: neither the system prompt nor the newest."""
    block: str = min(session.blocks()[1:-1], key=lambda block: block.score).id
    return block


def halves(read: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows up to 5,000 tokens, when the cache has just filled, and those of the last 5,000."""
    end = read[-1]["streamed"]
    return [row for row in read if row["streamed"] <= 5000], [row for row in read if row["streamed"] > end - 5000]


if __name__ == "__main__":
    main()
