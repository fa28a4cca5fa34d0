"""`keepwhole audit`: what left the caches, as a table, as it happens, or as a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from app.cli.client import Client

_FOLLOW_SECONDS = 1.0
_WIDTH = 240
_COLUMNS = ("when", "session", "kind", "tokens", "rank", "reason", "outcome", "what")


def show(client: Client, conditions: dict[str, str], most: int) -> None:
    """Print the newest `most` evictions that meet the conditions, oldest first."""
    rows = list(client.items("/v1/audit/evictions", **conditions))[-most:]
    table = Table(*(Column(name, no_wrap=True) for name in _COLUMNS), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row))
    # What is read by a program is not cut to the width of a terminal that there is not.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table if rows else "nothing was evicted")


def follow(client: Client, conditions: dict[str, str]) -> None:
    """Print evictions as they happen, a line each, until interrupted."""
    newest = conditions.pop("since", None) or datetime.now(UTC).isoformat(timespec="milliseconds").replace(
        "+00:00", "Z"
    )
    # Rows of the newest time were told, others of that time may follow.
    told: set[str] = set()
    try:
        while True:
            for row in client.items("/v1/audit/evictions", since=newest, **conditions):
                if row["id"] in told:
                    continue
                if row["created_at"] != newest:
                    newest, told = row["created_at"], set()
                told.add(row["id"])
                click.echo("  ".join(_cells(row)))
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return


def export(client: Client, conditions: dict[str, str], form: str) -> Iterator[bytes]:
    """The rows as a file. form: csv, jsonl or json."""
    return client.download("/v1/audit/evictions", format=form, **conditions)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    rank = str(row["rank"]) if row["candidates"] is None else f"{row['rank']}/{row['candidates']}"
    what = row["passage_id"] or row["block_id"]
    return (
        row["created_at"],
        row["session_id"],
        row["kind"],
        str(row["tokens"]),
        rank,
        row["reason"],
        row["outcome"],
        what,
    )
