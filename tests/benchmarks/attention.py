"""Attention on the CPU: MLX's own against `kv.cpu.attention`, in SmolLM2's shape, taken in turns.

    .uv/bin/uv run python -m tests.benchmarks.attention [--rounds 15] [--out RESULT.json]

A pass of some tokens over some rows, theirs included: mlx-lm's function, and ours by way of the same arrays. Median of
the rounds; the ratio is what to read. Then the scores that a stretch of tokens earns by keys alone (`attn_mass`).
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kv import blas

QUERY_HEADS, KEY_HEADS, WIDTH = 9, 3, 64
PASSES = ((1, 900), (8, 900), (25, 900), (64, 900), (64, 2048), (256, 256), (256, 900), (256, 2048))
SPARE = 64


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(rounds: int, out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    print(f"{'tokens':>7} {'rows':>6} {'what':>10} {'MLX ms':>8} {'ours ms':>8} {'x':>5}")
    rows = [measure(count, held, what, rounds) for what in ("attention", "scores") for count, held in PASSES]
    if out is not None:
        about = {"machine": f"{platform.platform()}, {chosen.name}", "passes": rows}
        out.write_text(json.dumps(about, indent=1) + "\n")


def measure(count: int, held: int, what: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a layer's pass, both ways."""
    import mlx.core as mx
    from mlx_lm.models.base import scaled_dot_product_attention

    from kv.caches.scoring import add_attention_mass
    from kv.cpu import attention as cpu_attention

    queries = mx.random.normal((1, QUERY_HEADS, count, WIDTH))
    # As a cache hands them out: the first rows of a longer buffer.
    keys, values = (mx.random.normal((1, KEY_HEADS, held + SPARE, WIDTH))[:, :, :held] for _ in range(2))
    options = {"scale": WIDTH**-0.5, "mask": "causal" if count > 1 else None}
    scores = mx.zeros((1, KEY_HEADS, held))
    mx.eval(queries, keys, values, scores)

    def by_mlx() -> mx.array:
        output: mx.array = scaled_dot_product_attention(queries, keys, values, cache=None, **options)
        return output

    def by_us() -> mx.array:
        output = cpu_attention.attend_instead(scaled_dot_product_attention, queries, keys, values, options)
        assert output is not None
        return output

    def scored(with_numpy: bool) -> mx.array:
        return add_attention_mass(scores, keys, held - count, count, 0.98, with_numpy=with_numpy)

    ways: dict[str, Callable[[], mx.array]] = {"mlx": by_mlx, "ours": by_us}
    if what == "scores":
        ways = {"mlx": lambda: scored(False), "ours": lambda: scored(True)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            mx.eval(way())
            taken[name].append(1000 * (time.perf_counter() - started))
    median = {name: statistics.median(times) for name, times in taken.items()}
    print(
        f"{count:7} {held:6} {what:>10} {median['mlx']:8.2f} {median['ours']:8.2f}"
        f" {median['mlx'] / median['ours']:5.1f}"
    )
    return {"tokens": count, "rows": held, "what": what, **median}


if __name__ == "__main__":
    main()
