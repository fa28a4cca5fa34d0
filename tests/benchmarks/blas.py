"""Prefill and decode tokens/s of the embedded model: reference BLAS against the tuned ones, in one run.

    .uv/bin/uv run python -m tests.benchmarks.blas [--rounds 3] [--busy 1]

Each library is loaded in a process of its own, since it must come before MLX; the processes take turns, and the
ratio is that of the best rounds, so that a neighbour on a shared machine spoils no single figure. `--busy` runs so many
processes beside it that do nothing but use a core: threads that wait for each other by spinning suffer from them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click

from kv import blas

_PROMPT, _STEPS = 256, 24
# Reference BLAS reads a few tokens a second: a shorter prompt, compared per token.
_PROMPT_SLOW, _STEPS_SLOW = 64, 8


def measure(setting: str) -> dict[str, object]:
    """Load the model with one BLAS and time it. Tokens per second."""
    chosen = blas.load("auto", system_roots=()) if setting == "wheel" else blas.load(setting)
    import mlx.core as mx

    from kv.model.loading import load_model
    from kv.session.session import NewBlock, Session

    model = load_model()
    prompt, steps = (_PROMPT, _STEPS) if chosen.tuned else (_PROMPT_SLOW, _STEPS_SLOW)
    tokens = (model.codec.encode("The ferry leaves the pier at noon and returns at six. ") * prompt)[:prompt]
    session = Session(model, budget=prompt + steps + 64, prefill_step=prompt)
    # Not measured: what a process does once.
    for _ in session.prefill([NewBlock("warm", tokens[:16])]):
        pass
    started = time.perf_counter()
    for _ in session.prefill([NewBlock("text", tokens)], answer=NewBlock("answer", [1])):
        pass
    prefill = len(tokens) / (time.perf_counter() - started)
    token = 1
    started = time.perf_counter()
    for _ in range(steps):
        token = int(mx.argmax(session.step(token)).item())
    return {"blas": chosen.name, "prefill": prefill, "decode": steps / (time.perf_counter() - started)}


def settings() -> list[str]:
    """Reference BLAS, the OpenBLAS in the faiss-cpu wheel, and every tuned one that the system has."""
    found = ["reference", "wheel"]
    for root in (Path("/usr/lib"), Path("/usr/lib64")):
        found += [
            str(path) for pattern in ("blis", "openblas") for path in root.glob(f"*/{pattern}-pthread/libblas.so.3")
        ]
    return found


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--busy", default=0, show_default=True, help="Processes that each keep a core busy.")
@click.option("--one", hidden=True)
def main(rounds: int, busy: int, one: str | None) -> None:
    """Compare."""
    if one is not None:
        print(json.dumps(measure(one)))
        return
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        compare(rounds)
    finally:
        for neighbour in neighbours:
            neighbour.kill()


def compare(rounds: int) -> None:
    """Take turns, and print the best of each."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for setting in settings():
            command = [sys.executable, "-m", "tests.benchmarks.blas", "--one", setting]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            result = json.loads(out.splitlines()[-1])
            figures = best.setdefault(f"{setting} = {result['blas']}", {"prefill": 0.0, "decode": 0.0})
            for name in figures:
                figures[name] = max(figures[name], result[name])
    base = next(iter(best.values()))
    print(f"{'BLAS':48} {'prefill tok/s':>14} {'ratio':>6} {'decode tok/s':>13} {'ratio':>6}")
    for name, figures in best.items():
        print(
            f"{name[-48:]:48} {figures['prefill']:14.1f} {figures['prefill'] / base['prefill']:6.1f}"
            f" {figures['decode']:13.1f} {figures['decode'] / base['decode']:6.1f}"
        )


if __name__ == "__main__":
    main()
