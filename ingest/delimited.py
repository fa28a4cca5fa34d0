"""CSV and its kin: a table whose rows are never cut where they fit, headed by its column names."""

from __future__ import annotations

import csv
import re
from itertools import pairwise

from ingest.blocks import Block, shortened

_DELIMITERS = ",\t;|"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NUMBER = re.compile(r"[-+]?[\d.,]*\d%?")


def rows(text: str) -> list[Block]:
    """One table with a child for each row, quoted line ends inside a row included.

    The delimiter is the one of comma, tab, semicolon and bar that the first line has most of. Where the first
    row holds names only, these are the path of every passage.
    """
    lines = _LINE.findall(text)
    reader = csv.reader(lines, delimiter=max(_DELIMITERS, key=lines[0].count))
    path: tuple[str, ...] = ()
    bounds = [0]
    read = 0
    try:
        for cells in reader:
            if read == 0 and len(cells) > 1 and _are_names(cells):
                path = (shortened(", ".join(cells)),)
            bounds.append(bounds[-1] + sum(len(line) for line in lines[read : reader.line_num]))
            read = reader.line_num
    except csv.Error:
        # A cell beyond the module's limit, or NUL: from here on, a line is a row.
        for line in lines[read:]:
            bounds.append(bounds[-1] + len(line))
    children = tuple(Block(start, end, "table", path) for start, end in pairwise(bounds))
    return [Block(0, len(text), "table", path, children=children)]


def _are_names(cells: list[str]) -> bool:
    return all(cell.strip() and not _NUMBER.fullmatch(cell.strip()) for cell in cells)
