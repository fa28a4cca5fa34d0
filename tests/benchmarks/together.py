"""What sessions gain by decoding together: tokens a second of 1, 2, 4 and 8 sessions in one pass, against one alone.

    .uv/bin/uv run python -m tests.benchmarks.together [--rounds 5] [--steps 16] [--score attn_mass] [--out RESULT.json]

SmolLM2; every session holds as many rows. All cases take their turn in each round, and the best round of each counts.
One session is `Session.step`, more are `kv.session.together.step_together`. The floor is a pass of single tokens, no
caches: what a step costs before it attends to anything.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

import click

from kv import blas

SESSIONS, ROWS = (1, 2, 4, 8), (256, 900)


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=16, show_default=True, help="Steps timed in a round.")
@click.option(
    "--score", default="attn_mass", show_default=True, type=click.Choice(["attn_mass", "key_norm", "observed"])
)
@click.option("--out", type=click.Path(path_type=Path))
def main(rounds: int, steps: int, score: str, out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    import mlx.core as mx

    from kv import Session, load_model
    from kv.session.session import NewBlock
    from kv.session.together import step_together

    loaded = load_model()
    text = loaded.codec.encode(
        "The ferry leaves the pier at noon and returns at six, unless the wind is from the west. "
    )

    prompt = NewBlock("answer", text[:1])

    def opened(rows: int) -> Session:
        session = Session(loaded, budget=rows + steps + 1, prefill_step=256, score=score)
        for _ in session.prefill([NewBlock("text", (text * rows)[:rows])], answer=prompt):
            pass
        return session

    def timed(sessions: list[Session]) -> float:
        """Seconds a step; the answers are forgotten afterwards, so that each round finds as many rows."""
        tokens = [text[0]] * len(sessions)
        step_together(sessions, tokens)
        started = time.perf_counter()
        for _ in range(steps):
            step_together(sessions, tokens)
        seconds = (time.perf_counter() - started) / steps
        for session in sessions:
            session.rewind("answer")
            for _ in session.prefill([], answer=prompt):
                pass
        return seconds

    def floor(count: int) -> float:
        tokens = mx.full((count, 1), text[0])
        mx.eval(loaded.model(tokens))
        started = time.perf_counter()
        for _ in range(steps):
            mx.eval(loaded.model(tokens))
        return (time.perf_counter() - started) / steps

    best: dict[tuple[int, int], float] = {}
    pools = {rows: [opened(rows) for _ in range(max(SESSIONS))] for rows in ROWS}
    for _ in range(rounds):
        for count in SESSIONS:
            best[0, count] = min(best.get((0, count), float("inf")), floor(count))
            for rows, pool in pools.items():
                best[rows, count] = min(best.get((rows, count), float("inf")), timed(pool[:count]))
    figures = []
    print(f"{'rows':>6} {'sessions':>8} {'step ms':>8} {'tokens/s':>9} {'of one alone':>12}")
    for (rows, count), seconds in sorted(best.items()):
        ratio = count * best[rows, 1] / seconds
        print(f"{rows or 'floor':>6} {count:8} {1000 * seconds:8.1f} {count / seconds:9.1f} {ratio:11.2f}x")
        figures.append({"rows": rows, "sessions": count, "step": seconds, "ratio": round(ratio, 2)})
    if out is not None:
        machine = f"{platform.platform()}, {chosen.name}"
        out.write_text(json.dumps({"machine": machine, "score": score, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
