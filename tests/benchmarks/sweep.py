"""The source document's harness, and what it leaves out: cost against the length of the stream and the budget.

    .uv/bin/uv run python -m tests.benchmarks.sweep [--out RESULT.json]

First its sweep over (length, budget, chunk size, score) on random K/V of one layer (H_kv 3, D 64), beside token-level
H2O at the same budget: what is kept, how long it takes, how long the runs of neighbours are that survive. Then streams
of up to 131,072 tokens in passes of 512, at budgets of up to 8,192: seconds per 1,000 tokens in the first and the last
quarter after the budget filled, and bytes held, both of which should not grow.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from pathlib import Path
from typing import Any

import click

from kv import blas

HEADS, WIDTH, PASS = 3, 64, 512


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
def main(out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    figures = {
        "machine": f"{platform.platform()}, {chosen.name}",
        "sweep": sweep(),
        "lengths": lengths(),
    }
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def sweep() -> list[dict[str, Any]]:
    """One pass of a whole prompt into each setting; H2O is what a chunk of one token is."""
    import mlx.core as mx

    from tests.kv.feeding import build

    rows = []
    print(
        f"{'tokens':>7} {'budget':>7} {'score':10} {'chunk':>6} {'kept':>5}"
        f" {'ratio':>6} {'ms':>8} {'of H2O':>7} {'run':>6}"
    )
    for length in (256, 1024, 4096):
        mx.random.seed(length)
        keys, values = (mx.random.normal((1, HEADS, length, WIDTH)) for _ in range(2))
        mx.eval(keys, values)
        for budget in (64, 128, 512):
            if budget >= length:
                continue
            for score in ("attn_mass", "key_norm"):
                h2o = None
                for chunk in (1, 4, 8, 16, 32):
                    best = float("inf")
                    for _ in range(3):
                        (cache,) = build(1, "chunkkv", budget=budget, chunk_size=chunk, score=score)
                        started = time.perf_counter()
                        cache.update_and_fetch(keys, values)
                        mx.eval(cache.arrays)
                        best = min(best, time.perf_counter() - started)
                    h2o = h2o or best
                    kept = cache.group.positions()[0]
                    runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(kept))
                    row = {
                        "tokens": length, "budget": budget, "score": score, "chunk": chunk, "kept": len(kept),
                        "compression": length / len(kept), "seconds": best, "of_h2o": best / h2o,
                        "mean_run": len(kept) / runs,
                    }  # fmt: skip
                    rows.append(row)
                    print(
                        f"{length:7} {budget:7} {score:10} {chunk:6} {len(kept):5} {row['compression']:6.2f}"
                        f" {1000 * best:8.1f} {row['of_h2o']:7.2f} {row['mean_run']:6.1f}",
                        flush=True,
                    )
    return rows


def lengths() -> list[dict[str, Any]]:
    """Long streams: what a token costs early and late, and what is held."""
    import mlx.core as mx

    from tests.kv.feeding import build

    rows = []
    print(
        f"{'tokens':>7} {'budget':>7} {'s/1k early':>11} {'s/1k late':>10} {'ratio':>6} {'KB early':>9} {'KB late':>8}"
    )
    for length, budget in ((16_384, 512), (131_072, 512), (131_072, 2048), (131_072, 8192)):
        (cache,) = build(1, "chunkkv", budget=budget)
        keys = mx.random.normal((1, HEADS, PASS, WIDTH))
        mx.eval(keys)
        seconds, held = [], []
        for _ in range(length // PASS):
            started = time.perf_counter()
            cache.update_and_fetch(keys, keys)
            mx.eval(cache.arrays)
            seconds.append(time.perf_counter() - started)
            held.append(cache.nbytes)
        filled = -(-budget // PASS) + 1
        quarter = (len(seconds) - filled) // 4
        # Means: a pass in which nothing leaves costs nothing, and would make a median flatter.
        per_thousand = [
            sum(part) / len(part) * 1000 / PASS for part in (seconds[filled : filled + quarter], seconds[-quarter:])
        ]
        row = {
            "tokens": length, "budget": budget, "early": per_thousand[0], "late": per_thousand[1],
            "bytes_early": max(held[filled : filled + quarter]), "bytes_late": max(held[-quarter:]),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{length:7} {budget:7} {row['early']:11.4f} {row['late']:10.4f} {row['late'] / row['early']:6.2f}"
            f" {row['bytes_early'] / 1e3:9.0f} {row['bytes_late'] / 1e3:8.0f}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
