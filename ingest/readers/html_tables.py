"""Tables of HTML: whether they hold data or only place things on the page, and their cells."""

from __future__ import annotations

from collections import Counter

from selectolax.lexbor import LexborNode

from ingest.readers.html_inline import HEADINGS, inline_text

# What a table for layout holds, and one of data does not. Lists are in both, and so is a single row or column; long
# cells then tell the first.
_LAYOUT = frozenset({"dl", "pre", "table", *HEADINGS})
_LISTS = frozenset({"blockquote", "ol", "ul"})
_MAX_DATA_CELL = 500
# Generators write colspan="100" for "as many as there are".
_MAX_SPAN = 100


def is_layout(table: LexborNode) -> bool:
    """Whether `table` only places things."""
    inner = table.traverse()
    next(inner)
    tags = {node.tag for node in inner}
    if tags & _LAYOUT:
        return True
    texts = rows(table)
    is_grid = len(texts) > 1 and max(map(len, texts)) > 1
    has_lists = not tags.isdisjoint(_LISTS)
    if is_grid != has_lists:
        return has_lists
    return any(len(cell) > _MAX_DATA_CELL for row in texts for cell in row)


def rows(table: LexborNode) -> list[list[str]]:
    """The text of each cell; where one spans others, these are blank."""
    rows: list[list[str]] = []
    # How many more rows a cell above takes of a column.
    taken: Counter[int] = Counter()
    for row in table.css("tr"):
        texts: list[str] = []
        for cell in row.iter():
            if cell.tag in ("td", "th"):
                while taken[len(texts)]:
                    taken[len(texts)] -= 1
                    texts.append("")
                # Beyond so many columns spans would only cost time.
                width = _span(cell, "colspan") if len(texts) < _MAX_SPAN else 1
                height = _span(cell, "rowspan") if len(texts) < _MAX_SPAN else 1
                for column in range(len(texts), len(texts) + width):
                    taken[column] = height - 1
                texts += [inline_text(cell), *[""] * (width - 1)]
        for column in [column for column in taken if column >= len(texts)]:
            taken[column] = max(0, taken[column] - 1)
        while texts and not texts[-1].strip():
            texts.pop()
        rows.append(texts)
    return rows


def _span(cell: LexborNode, name: str) -> int:
    span = cell.attributes.get(name) or ""
    return min(max(int(span), 1), _MAX_SPAN) if span.isascii() and span.isdigit() and len(span) < 9 else 1
