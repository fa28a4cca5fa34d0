"""Ten turns on SmolLM2 in one cache: how often the question just asked is still answered, by method. A small probe.

    .uv/bin/uv run python -m tests.benchmarks.turns [--budget 192] [--out RESULT.json]

Each turn is about 100 tokens that state an hour four times and ask for it, so that the text is fresh and all of it fits
the budget; what fails is a cache that no longer holds what was just said, or holds too much of what was said before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kv import blas

TURNS = 10


@click.command()
@click.option("--budget", default=192, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(budget: int, out: Path | None) -> None:
    """Count."""
    blas.load()
    from mlx_lm import stream_generate
    from mlx_lm.models.cache import make_prompt_cache

    from kv import KVCacheBuilder, KVCacheConfig, load_model
    from kv.methods import METHODS

    loaded = load_model()

    def right(caches: list[Any]) -> int:
        count = 0
        for turn in range(TURNS):
            hour = str(turn + 6)
            text = f"Question {turn}: the ferry to the island leaves at {hour} o'clock. " * 4 + "When does it leave?"
            prompt = loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True
            )
            parts = stream_generate(loaded.model, loaded.tokenizer, prompt, max_tokens=16, prompt_cache=caches)
            count += hour in "".join(part.text for part in parts)
        return count

    cases: dict[str, dict[str, Any]] = {
        name: {} if name in ("full", "kivi") else {"budget": budget} for name in METHODS
    }
    cases["chunkkv, observed"] = {"budget": budget, "score": "observed"}
    cases["h2o, observed"] = {"budget": budget, "score": "observed"}
    cases["chunkkv, literal"] = {"budget": budget, "literal": True}
    results = {"mlx-lm": right(make_prompt_cache(loaded.model))}
    for name, options in cases.items():
        method = name.partition(",")[0]
        config = KVCacheConfig(method=method, **{f"{method}_{option}": value for option, value in options.items()})
        results[name] = right(KVCacheBuilder.for_model(loaded.model, config))
    for name, count in results.items():
        print(f"{name:20} {count} of {TURNS}")
    if out is not None:
        out.write_text(json.dumps({"budget": budget, "turns": TURNS, "right": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
