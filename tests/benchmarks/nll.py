"""How well a model still predicts real text once most of it has left the cache, by method, at equal budgets.

    .uv/bin/uv run python -m tests.benchmarks.nll xquad-dev.json [--budget 256] [--texts 3] [--out RESULT.json]

SmolLM2 reads texts of 1536 tokens, put together from the paragraphs of the file, 64 tokens at a time. Shown is the mean
negative log-likelihood, in nats a token, of what comes after the first 512. Less is better; the full cache is no bound,
since much of these texts, whose paragraphs stand alone, only distracts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kv import blas

LENGTH, FIRST, STEP = 1536, 512, 64


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--budget", default=256, show_default=True)
@click.option("--texts", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(file: Path, budget: int, texts: int, out: Path | None) -> None:
    """Measure."""
    blas.load()
    import mlx.core as mx
    import mlx.nn as nn

    from kv import KVCacheBuilder, KVCacheConfig, load_model
    from kv.methods import METHODS

    loaded = load_model()
    articles = json.loads(file.read_text())["articles"]
    paragraphs = [paragraph["text"] for article in articles for paragraph in article["paragraphs"]]
    tokens: list[int] = loaded.tokenizer.encode("\n\n".join(paragraphs))
    streams = [tokens[start : start + LENGTH] for start in range(0, texts * LENGTH, LENGTH)]
    if len(streams[-1]) < LENGTH:
        raise click.ClickException(f"{file}: {len(tokens)} tokens are too few for {texts} texts of {LENGTH}")

    def loss(caches: list[Any], stream: list[int]) -> float:
        total, count = 0.0, 0
        for start in range(0, LENGTH - 1, STEP):
            targets = mx.array(stream[start + 1 : start + STEP + 1])
            logits = loaded.model(mx.array(stream[start : start + STEP])[None], cache=caches)[0, : len(targets)]
            losses = nn.losses.cross_entropy(logits, targets)
            mx.eval(losses, [cache.state for cache in caches])
            if start >= FIRST:
                total += losses.sum().item()
                count += len(targets)
        return total / count

    cases: dict[str, dict[str, Any]] = {method: {} for method in METHODS if method not in ("snapkv",)}
    cases |= {
        "chunkkv, model": {"scope": "model"},
        "chunkkv, observed": {"score": "observed"},
        "chunkkv, key_norm": {"score": "key_norm"},
        "chunkkv, decay 0.995": {"decay": 0.995},
        "chunkkv, decay 1": {"decay": 1.0},
        "chunkkv, literal": {"literal": True},
        "h2o, observed": {"score": "observed"},
        "h2o, decay 0.995": {"decay": 0.995},
        "h2o, decay 1": {"decay": 1.0},
        "h2o, literal": {"literal": True},
    }
    results: dict[str, list[float]] = {}
    for name, options in cases.items():
        method = name.partition(",")[0]
        if method not in ("full", "kivi"):
            options = {"budget": budget, **options}
        config = KVCacheConfig(method=method, **{f"{method}_{option}": value for option, value in options.items()})
        results[name] = [loss(KVCacheBuilder.for_model(loaded.model, config), stream) for stream in streams]
        print(f"{name:22} {sum(results[name]) / texts:.3f}   " + " ".join(f"{value:.3f}" for value in results[name]))
    if out is not None:
        about = {"budget": budget, "length": LENGTH, "from": FIRST, "step": STEP, "nats": results}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
