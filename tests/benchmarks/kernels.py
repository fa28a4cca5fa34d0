"""The embedded model on the CPU: its weights quantised, in kernels, against dequantised to float32 through MLX.

    .uv/bin/uv run python -m tests.benchmarks.kernels [--rounds 7] [--out RESULT.json]

Both models in one process, taken in turns: a step of 1 to 8 sessions, the first behind 750 tokens; passes of 25 and 256
tokens behind nothing and behind 750. Best and median of the rounds in milliseconds; the ratio of the best is what to
read. Then the same step with one and two processes beside it that do nothing but spin.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kv import blas


def stock_of() -> Any:
    """The embedded model as it was served before: float32 through MLX, attention in NumPy."""
    import dataclasses

    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    from kv import load_model, observed

    loaded = load_model(on_gpu=True)
    model = dequantize_model(loaded.model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    observed.install(model)
    return dataclasses.replace(loaded, model=model)


def cases(model: Any, tokens: list[int]) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    from kv import NewBlock, Session, step_together

    sessions = []
    for length in (750, *[40] * 7):
        session = Session(model, budget=2048, prefill_step=256)
        answer = NewBlock("answer", tokens[length : length + 4])
        for _ in session.prefill([NewBlock("text", tokens[:length])], answer=answer):
            pass
        sessions.append(session)

    def reading(held: int, count: int) -> Callable[[], object]:
        session = Session(model, budget=2048, prefill_step=256)
        if held:
            for _ in session.prefill([NewBlock("text", tokens[:held])]):
                pass

        def read() -> None:
            for _ in session.prefill([NewBlock("more", tokens[-count:])]):
                pass
            session.rewind("more")

        return read

    def stepping(rows: int) -> Callable[[], object]:
        return lambda: step_together(sessions[:rows], [5] * rows)

    return {f"step, {rows} rows": stepping(rows) for rows in (1, 2, 4, 8)} | {
        f"pass of {count} behind {held}": reading(held, count) for held in (0, 750) for count in (25, 256)
    }


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(rounds: int, out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    import numpy as np

    from kv import load_model

    began = time.perf_counter()
    mine = load_model()
    seconds = time.perf_counter() - began
    tokens = np.random.default_rng(1).integers(0, 49_000, 2000).tolist()
    both = {"kernels": cases(mine, tokens), "mlx": cases(stock_of(), tokens)}
    rows: list[dict[str, Any]] = []

    def take(name: str, busy: int = 0) -> None:
        rows.append(measure(name, {kind: each[name] for kind, each in both.items()}, rounds, busy))
        if out is not None:
            # After each: it takes minutes, and what is measured is measured.
            about = {"machine": f"{platform.platform()}, {chosen.name}", "load_seconds": round(seconds, 2)}
            out.write_text(json.dumps({**about, "cases": rows}, indent=1) + "\n")

    for name in both["mlx"]:
        take(name)
    for busy in (1, 2):
        spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            take("step, 1 rows", busy)
        finally:
            for process in spinning:
                process.kill()
                process.wait()


def measure(name: str, ways: dict[str, Callable[[], object]], rounds: int, busy: int = 0) -> dict[str, Any]:
    """Milliseconds of each way, in turns."""
    taken: dict[str, list[float]] = {kind: [] for kind in ways}
    for _ in range(rounds + 1):
        for kind, run in ways.items():
            began = time.perf_counter()
            run()
            taken[kind].append((time.perf_counter() - began) * 1000)
    row: dict[str, Any] = {"what": name, "busy": busy}
    for kind, times in taken.items():
        # The first of each is not counted.
        row[f"{kind}_best_ms"], row[f"{kind}_ms"] = round(min(times[1:]), 1), round(statistics.median(times[1:]), 1)
    row["times_faster"] = round(row["mlx_best_ms"] / row["kernels_best_ms"], 1)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
