"""Eviction against the peer of the chunkkv source document (veloxquant-mlx from PyPI), same shapes, in one run.

    .uv/bin/uv run python -m tests.benchmarks.peer [--rounds 2] [--out RESULT.json]

One layer: a pass of 1024 tokens into a budget of 128, and single-token steps at a budget of 512. Each cell is the best
of the rounds, ours and the peer's taking turns. The peer stores half precision; ours keeps what it is given (single).
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

TOKENS, BUDGET, STEP_BUDGET, STEPS = 1024, 128, 512, 64


@click.command()
@click.option("--rounds", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(rounds: int, out: Path | None) -> None:
    """Measure."""
    chosen = blas.load()
    import mlx.core as mx
    from veloxquant_mlx import KVCacheConfig as PeerConfig
    from veloxquant_mlx.cache.chunkkv_cache import ChunkKVCache as PeerCache

    from tests.kv.feeding import build

    def ours(**options: Any) -> Callable[[], Any]:
        return lambda: build(1, "chunkkv", **options)[0]

    def peer(budget: int, chunk: int, score: str, width: int) -> Callable[[], Any]:
        config = PeerConfig(
            method="chunkkv",
            head_dim=width,
            chunkkv_budget=budget,
            chunkkv_chunk_size=chunk,
            chunkkv_n_sink=4,
            chunkkv_score=score,
        )
        return lambda: PeerCache(config)

    def one_pass(make: Callable[[], Any], heads: int, width: int) -> float:
        keys, values = (mx.random.normal((1, heads, TOKENS, width)) for _ in range(2))
        mx.eval(keys, values)
        cache = make()
        started = time.perf_counter()
        cache.update_and_fetch(keys, values)
        mx.eval(cache.state)
        return time.perf_counter() - started

    def steps(make: Callable[[], Any], heads: int, width: int) -> float:
        cache = make()
        for size in (STEP_BUDGET + 8, *[1] * 8):
            rows = mx.random.normal((1, heads, size, width))
            mx.eval(cache.update_and_fetch(rows, rows))
        rows = mx.random.normal((1, heads, 1, width))
        mx.eval(rows, cache.state)
        started = time.perf_counter()
        for _ in range(STEPS):
            mx.eval(cache.update_and_fetch(rows, rows), cache.state)
        return (time.perf_counter() - started) / STEPS

    results = []
    print(f"{'case':34} {'peer':>10} {'literal':>10} {'default':>10} {'x literal':>10} {'x default':>10}")
    for heads, width in ((3, 64), (8, 128)):
        for chunk in (1, 8, 16):
            for score in ("attn_mass", "key_norm"):
                for what, run, budget in (("pass", one_pass, BUDGET), ("step", steps, STEP_BUDGET)):
                    options = {"budget": budget, "chunk_size": chunk, "score": score}
                    makers = {
                        "peer": peer(budget, chunk, score, width),
                        "literal": ours(**options, literal=True),
                        "default": ours(**options),
                    }
                    best = dict.fromkeys(makers, float("inf"))
                    for _ in range(rounds):
                        for name, make in makers.items():
                            best[name] = min(best[name], run(make, heads, width))
                    results.append(
                        {"heads": heads, "width": width, "chunk": chunk, "score": score, "what": what, **best}
                    )
                    print(
                        f"{what} H={heads} D={width} chunk={chunk:<2} {score:9}"
                        + "".join(f" {1000 * best[name]:7.1f} ms" for name in makers)
                        + "".join(f" {best['peer'] / best[name]:10.0f}" for name in ("literal", "default")),
                        flush=True,
                    )
    if out is not None:
        machine = f"{platform.platform()}, {chosen.name}"
        out.write_text(json.dumps({"machine": machine, "tokens": TOKENS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
