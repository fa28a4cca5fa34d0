"""A picture of `tests.benchmarks.stream`'s result: kept tokens, K/V bytes, step time and perplexity over the stream.

.uv/bin/uv run --with matplotlib python -m tests.benchmarks.plot stream.json stream.svg
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("result", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def main(result: Path, picture: Path) -> None:
    """Draw."""
    import matplotlib

    matplotlib.use("svg")
    # The same input gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "keepwhole"
    from matplotlib import pyplot

    figures: dict[str, Any] = json.loads(result.read_text())
    read, series = figures["read"], figures["series"]
    x, sampled = [row["streamed"] for row in read], [row["streamed"] for row in series]
    figure, panels = pyplot.subplots(4, 1, sharex=True, figsize=(9, 9))
    panels[0].plot(x, [row["kept"] for row in read], linewidth=0.6)
    panels[0].axhline(figures["budget"], color="grey", linewidth=0.8, linestyle="--")
    panels[0].set_ylabel("kept tokens")
    panels[1].plot(x, [row["kv_bytes"] / 1e6 for row in read], linewidth=0.6)
    panels[1].set_ylabel("K/V, MB")
    panels[2].plot(sampled, [row["step_ms"] for row in series], ".", markersize=4)
    panels[2].set_ylabel("step, ms (noisy machine)")
    for key, name in (("nats", "session"), ("nats_fresh", "stock cache of what it keeps")):
        panels[3].plot(
            sampled, [math.exp(row[key] / row["predicted"]) for row in series], ".", markersize=4, label=name
        )
    panels[3].set_yscale("log")
    panels[3].set_ylabel("perplexity of the next abstract")
    panels[3].legend()
    panels[3].set_xlabel("tokens streamed; the model was trained on 8,192 positions")
    for panel in panels[:3]:
        panel.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
