"""Markdown written block by block, such that a parser finds the same blocks again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, takewhile

_SPACE = re.compile(r"[ \t\n\r\f\xa0]+")
# Soft hyphens and zero-width spaces say where a line may end: searching for the word must not fail on them.
_INVISIBLE = re.compile("[\xad\u200b\ufeff]")
# A line of text that would start a heading, list, quote, fence, table row, HTML block, rule or link definition.
_MARKUP = re.compile(
    r"(#{1,6}(?:\s|$)|[-+*](?=\s|$)|[>|<]|\[(?=[^\]]*\]:)|`{3}|~{3}|[-=*_]{3,}\s*$|(?:[-*_] ?){3,}$|[-:| ]+$)"
    r"|(\d{1,9})([.)](?:\s|$))"
)
_FENCES = re.compile(r"`{3,}")

# A list deeper than this is written no deeper, or its indents would outgrow its text.
_MAX_NESTING = 10


@dataclass
class _Container:
    """What a list item or quote puts before each line; `first`, where not yet written, before its first."""

    rest: str
    first: str | None


class MarkdownWriter:
    """Collects inline text until a block ends. `result` is the whole, with one line end at its end."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._inline: list[list[str]] = [[]]
        self._containers: list[_Container] = []
        # The next number of each open list; None for bullets.
        self._lists: list[int | None] = []
        self._gap = False

    def text(self, text: str) -> None:
        """Add inline text; runs of white space count as one space."""
        self._inline[-1].append(text)

    def line_end(self) -> None:
        """End the line inside the current block."""
        self._inline.append([])

    def flush(self) -> None:
        """End the current block: a paragraph, where there was text. Two line ends in a row part paragraphs as well."""
        for has_text, lines in groupby(self._collapsed_lines(), key=bool):
            if has_text:
                self._emit([_MARKUP.sub(_escaped, line, count=1) if _MARKUP.match(line) else line for line in lines])

    def paragraph(self, text: str) -> None:
        """A block of its own."""
        self.flush()
        self.text(text)
        self.flush()

    def end_heading(self, level: int) -> None:
        """End the current block as a heading of `level` 1 to 6."""
        lines = self._take()
        if lines:
            self._emit([f"{'#' * level} {' '.join(lines)}"])

    def code(self, code: str, language: str = "") -> None:
        """A fenced block."""
        self.flush()
        lines = code.replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip().split("\n")
        if any(lines):
            longest = max((len(run) for run in _FENCES.findall(code)), default=2)
            fence = "`" * (longest + 1)
            self._emit([fence + language, *lines, fence])

    def table(self, rows: list[list[str]]) -> None:
        """A table; the first row heads it. Rows and columns without text, such as for spacing, are left out."""
        self.flush()
        cells = [[_collapsed(cell).replace("|", "\\|") for cell in row] for row in rows]
        cells = [row for row in cells if any(row)]
        width = max((len(row) for row in cells), default=0)
        padded = [row + [""] * (width - len(row)) for row in cells]
        columns = [column for column in zip(*padded, strict=True) if any(column)]
        if columns:
            lines = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
            self._emit([lines[0], "|" + " --- |" * len(columns), *lines[1:]])

    def open_list(self, number: int | None) -> None:
        """Start a list: of bullets, or numbered from `number`."""
        self.flush()
        # Inside an item a list follows its text directly, unless it could not interrupt it.
        self._gap = self._gap and not (self._lists and number in (None, 1))
        self._lists.append(number)

    def close_list(self) -> None:
        """End the innermost list."""
        self.flush()
        self._lists.pop()
        self._gap = True

    def open_item(self, number: int | None = None) -> None:
        """Start an item of the innermost list, the next of a numbered one or its `number`."""
        self.flush()
        following = self._lists[-1] if self._lists else None
        if number is None or following is None:
            number = following
        marker = "- " if number is None else f"{number}. "
        if number is not None:
            self._lists[-1] = number + 1
        self._open(marker, " " * len(marker))

    def open_quote(self) -> None:
        """Start a quote."""
        self.flush()
        self._open("> ", "> ")

    def close_container(self) -> None:
        """End the innermost item or quote."""
        self.flush()
        was_item = self._containers.pop().rest.isspace()
        self._gap = self._gap and not was_item

    def result(self) -> str:
        """All that was written."""
        self.flush()
        return "\n".join(self._lines) + "\n" if self._lines else ""

    def _open(self, first: str, rest: str) -> None:
        nested = len(self._containers) < _MAX_NESTING
        self._containers.append(_Container(rest, first) if nested else _Container("", None))

    def _take(self) -> list[str]:
        return [line for line in self._collapsed_lines() if line]

    def _collapsed_lines(self) -> list[str]:
        lines = [_collapsed("".join(parts)) for parts in self._inline]
        self._inline = [[]]
        return lines

    def _emit(self, lines: list[str]) -> None:
        if self._gap:
            begun = takewhile(lambda container: container.first is None, self._containers)
            self._lines.append("".join(container.rest for container in begun).rstrip())
        for line in lines:
            prefix = "".join(
                container.rest if container.first is None else container.first for container in self._containers
            )
            self._lines.append(prefix + line if line else prefix.rstrip())
            for container in self._containers:
                container.first = None
        self._gap = True


def _collapsed(text: str) -> str:
    return _SPACE.sub(" ", _INVISIBLE.sub("", text)).strip()


def _escaped(markup: re.Match[str]) -> str:
    return f"{markup[2]}\\{markup[3]}" if markup[2] else f"\\{markup[0]}"
