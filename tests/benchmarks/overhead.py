"""What eviction costs a real model: SmolLM2's prefill and decode step under each method, against mlx-lm's own cache.

    .uv/bin/uv run python -m tests.benchmarks.overhead [--rounds 3] [--budget 512] [--out RESULT.json]

A prompt of 1024 tokens in passes of 256, then 48 single tokens. Every method takes its turn in each round; the best
round counts. Attention over a budget is cheaper than over everything, so a method may well cost less than nothing:
`never fills` has room for all and shows the books alone.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kv import blas

TOKENS, PASS, STEPS = 1024, 256, 48


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--budget", default=512, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(rounds: int, budget: int, out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from kv import KVCacheBuilder, KVCacheConfig, load_model
    from kv.methods import METHODS

    loaded = load_model()
    model = loaded.model
    text = "The ferry leaves the pier at noon and returns at six, unless the wind is from the west. "
    tokens = mx.array((loaded.codec.encode(text) * TOKENS)[:TOKENS])[None]

    def ours(method: str, **options: Any) -> Callable[[], list[Any]]:
        config = KVCacheConfig(method=method, **{f"{method}_{name}": value for name, value in options.items()})
        return lambda: KVCacheBuilder.for_model(model, config)

    cases: dict[str, Callable[[], list[Any]]] = {
        "mlx-lm": lambda: make_prompt_cache(model),
        "never fills": ours("chunkkv", budget=2 * TOKENS),
        "chunkkv, model": ours("chunkkv", budget=budget, scope="model"),
        "chunkkv, observed": ours("chunkkv", budget=budget, score="observed"),
    }
    for method in METHODS:
        cases[method] = ours(method, **({} if method in ("full", "kivi") else {"budget": budget}))

    def run(make: Callable[[], list[Any]]) -> tuple[float, float]:
        caches = make()
        started = time.perf_counter()
        for start in range(0, TOKENS, PASS):
            mx.eval(model(tokens[:, start : start + PASS], cache=caches))
        read = time.perf_counter() - started
        mx.eval(model(tokens[:, :1], cache=caches))
        started = time.perf_counter()
        for step in range(STEPS):
            mx.eval(model(tokens[:, step : step + 1], cache=caches))
        return read, (time.perf_counter() - started) / STEPS

    best: dict[str, tuple[float, float]] = {name: (float("inf"), float("inf")) for name in cases}
    for _ in range(rounds):
        for name, make in cases.items():
            read, step = run(make)
            best[name] = (min(best[name][0], read), min(best[name][1], step))
    read, step = best["mlx-lm"]
    print(f"{'cache':20} {'prefill s':>10} {'ratio':>6} {'step ms':>8} {'ratio':>6}")
    for name, (prefill, decode) in best.items():
        print(f"{name:20} {prefill:10.2f} {prefill / read:6.2f} {1000 * decode:8.1f} {decode / step:6.2f}")
    if out is not None:
        machine = f"{platform.platform()}, {chosen.name}"
        figures = {name: {"prefill": prefill, "step": decode} for name, (prefill, decode) in best.items()}
        out.write_text(json.dumps({"machine": machine, "budget": budget, "caches": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
