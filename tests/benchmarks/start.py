"""From the command to ready, and what it takes, against another checkout: a commit before, say.

    git worktree add /tmp/before COMMIT
    python -m tests.benchmarks.start /tmp/before [--rounds 5]

Both run from this environment, in turns, each on a data folder of its own that its first start, not counted, has made.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import click

from tests.app.service import COMMAND

FIGURES = ("ready after", "processor time", "resident MB")


def start(checkout: Path, folder: Path) -> tuple[float, float, float]:
    """Seconds until it is ready, seconds of processor time until then, MB resident then."""
    environment = {**os.environ, "KEEPWHOLE_DATA_DIR": str(folder)}
    began = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0"], cwd=checkout, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if not any(re.search("is ready: ", line) for line in process.stdout):
            raise click.ClickException(f"{checkout}: the server ended before it was ready")
        ready = time.perf_counter() - began
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    processor = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return ready, processor, int(found[1]) / 1000


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True)
def main(other: Path, rounds: int) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory() as name:
        checkouts = {"other": other, "this": Path.cwd()}
        for label, checkout in checkouts.items():
            start(checkout, Path(name, label))
        taken: dict[str, list[tuple[float, float, float]]] = {label: [] for label in checkouts}
        for _ in range(rounds):
            for label, checkout in checkouts.items():
                taken[label].append(start(checkout, Path(name, label)))
    medians = {
        label: [statistics.median(column) for column in zip(*rows, strict=True)] for label, rows in taken.items()
    }
    for figure, other_one, this in zip(FIGURES, medians["other"], medians["this"], strict=True):
        print(f"{figure:16} {other_one:7.1f} -> {this:6.1f}  ratio {this / other_one:.2f}")


if __name__ == "__main__":
    main()
