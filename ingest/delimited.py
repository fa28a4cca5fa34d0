"""CSV and its kin: a table whose rows are never cut where they fit, headed by its column names."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from itertools import islice, pairwise

from ingest.blocks import MAX_LEAD, Block, shortened

_DELIMITERS = ",\t;|"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NUMBER = re.compile(r"[-+]?[\d.,]*\d%?")
# What Excel takes for an instruction.
_SEPARATOR = re.compile(r"\ufeff?sep=(.)\s*$", re.IGNORECASE)
# Lines that tell the delimiter, and rows in which the column names may be: below a title, the day, blank lines.
_LOOKED_AT = 20


def rows(text: str) -> list[Block]:
    """One table with a child for each row, quoted line ends inside a row included.

    The delimiter is that of comma, tab, semicolon and bar which most of the first lines have, or what a line such as
    `sep=;` says. The path of every row from the one that holds names only is these names.
    """
    lines = _LINE.findall(text)
    separator = _SEPARATOR.match(lines[0])
    delimiter = separator[1] if separator else max(_DELIMITERS, key=lambda sign: _evidence(sign, lines))
    bounds = [0]
    found: list[list[str]] = []
    read = 0
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        for cells in reader:
            if len(found) < _LOOKED_AT:
                found.append(cells)
            bounds.append(bounds[-1] + sum(len(line) for line in lines[read : reader.line_num]))
            read = reader.line_num
    except csv.Error:
        # A cell beyond the module's limit, or NUL: from here on, a line is a row.
        for line in lines[read:]:
            bounds.append(bounds[-1] + len(line))
    header, path = _header(found[1:] if separator else found)
    header += bool(separator)
    children = tuple(
        Block(start, end, "table", path if number >= header else ())
        for number, (start, end) in enumerate(pairwise(bounds))
    )
    return [Block(0, len(text), "table", path, children=children)]


def _evidence(sign: str, lines: Sequence[str]) -> tuple[int, int]:
    counts = [line.count(sign) for line in islice(lines, _LOOKED_AT)]
    return sum(count > 0 for count in counts), counts[0]


def _header(found: list[list[str]]) -> tuple[int, tuple[str, ...]]:
    """The row that names the columns, the first or one below a title, and these names as a path; () for none."""
    widest = 0
    for number, cells in enumerate(found):
        filled = sum(bool(cell.strip()) for cell in cells)
        if filled > max(1, widest):
            if _are_names(cells):
                return number, (shortened(", ".join(cells), MAX_LEAD),)
            # The first row that is as wide as the table is its first of data.
            widest = filled
            if filled == max(map(len, found)):
                break
    return 0, ()


def _are_names(cells: list[str]) -> bool:
    # An index has no name.
    named = cells if cells[0].strip() else cells[1:]
    return len(named) > 1 and all(cell.strip() and not _NUMBER.fullmatch(cell.strip()) for cell in named)
