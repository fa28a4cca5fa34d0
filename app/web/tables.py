"""Rows of the audit log as files: JSON, JSON lines, CSV, page by page, so that none has to fit into memory."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from litestar.response import Stream

from app.problems import invalid
from ingest.database import Page

_MEDIA_TYPES = {"json": "application/json", "jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
_ROWS = 1000


def as_file(
    kind: type[msgspec.Struct], form: str, name: str, page_of: Callable[[str | None, int], Page[Any]]
) -> Stream:
    """All rows as a download. kind: of the rows. page_of: a page of them by cursor and limit; not for the event loop.

    Raises Problem 422 for a form that there is not.
    """
    if form not in _MEDIA_TYPES:
        raise invalid("format", f"{form[:40]!r} is not one of {', '.join(_MEDIA_TYPES)}")
    # In the header too: the type of a route that answers with JSON otherwise would be put over that of the response.
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.{form}"',
        "Content-Type": _MEDIA_TYPES[form],
    }
    return Stream(_written(kind, form, page_of), media_type=_MEDIA_TYPES[form], headers=headers)


async def _written(
    kind: type[msgspec.Struct], form: str, page_of: Callable[[str | None, int], Page[Any]]
) -> AsyncIterator[str]:
    columns = kind.__struct_fields__
    if form == "csv":
        yield _csv([columns])
    elif form == "json":
        yield "["
    cursor, first = None, True
    while True:
        page = await asyncio.to_thread(page_of, cursor, _ROWS)
        if form == "csv":
            yield _csv([[getattr(row, column) for column in columns] for row in page.items])
        elif page.items:
            between = "\n" if form == "jsonl" else ",\n"
            rows = between.join(msgspec.json.encode(row).decode() for row in page.items)
            yield ("" if first or form == "jsonl" else between) + rows + ("\n" if form == "jsonl" else "")
            first = False
        if (cursor := page.next_cursor) is None:
            break
    if form == "json":
        yield "]\n"


def _csv(rows: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
