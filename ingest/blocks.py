"""Blocks: the units of meaning a text is made of, found by one splitter for each family of media types.

A splitter returns blocks that follow each other without a gap from 0 to the end of the text. What a passage
may hold is decided elsewhere (`passages`), so a better splitter can take a family over without touching that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token

Kind = Literal["prose", "code", "table", "list"]
Role = Literal["heading", "body", "alone"]

_MAX_HEADING = 120

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
# Closing brackets after a blank line end the unit above them.
_DEFINITION = re.compile(r"\n[^\S\n]*\n(?=[^\s)\]}])")

# Only block structure is wanted. The default nesting limit of 20 makes a tenth nested list swallow the rest
# of the document.
_MARKDOWN = MarkdownIt("commonmark", {"maxNesting": 100}).enable("table")
_MARKDOWN.core.ruler.enableOnly(["block"])
_MARKDOWN_KINDS: dict[str, Kind] = {
    "fence": "code",
    "code_block": "code",
    "table_open": "table",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
}


class Block(msgspec.Struct, frozen=True):
    """text[start:end] as one unit, its trailing blank lines included.

    `role`: a heading opens a section and stays with the block after it; a block that stands alone shares a
    passage only when its whole section does. `seams` are offsets where a block too large for a passage is
    best cut: a tuple for each level, coarse to fine.
    """

    start: int
    end: int
    kind: Kind = "prose"
    heading: str = ""
    role: Role = "body"
    seams: tuple[tuple[int, ...], ...] = ()


def split(text: str, media_type: str) -> list[Block]:
    """The blocks of `text`, contiguous from 0 to its end; [] for no text."""
    if not text:
        return []
    if media_type == "text/markdown":
        return _markdown(text)
    if media_type == "text/plain":
        return _paragraphs(text)
    if media_type == "text/x-csv":
        return [Block(0, len(text), kind="table")]
    return _source(text)


def _paragraphs(text: str) -> list[Block]:
    return _cut_at(text, (match.end() for match in _BLANK_LINES.finditer(text)), "prose")


def _source(text: str) -> list[Block]:
    return _cut_at(text, (match.end() for match in _DEFINITION.finditer(text)), "code")


def _cut_at(text: str, cuts: Iterable[int], kind: Kind) -> list[Block]:
    bounds = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    return [Block(start, end, kind=kind) for start, end in pairwise(bounds)]


class _Found(msgspec.Struct):
    start: int
    kind: Kind
    heading: str
    role: Role = "body"
    items: list[int] = []
    solids: set[int] = set()

    def until(self, end: int) -> Block:
        seams = (tuple(self.items), tuple(sorted(self.solids)))
        return Block(self.start, end, self.kind, self.heading, self.role, seams)


def _markdown(text: str) -> list[Block]:
    # The parser counts a lone CR as a line end once normalised; here lines end at LF only.
    source = text.replace("\r", " ")
    lines = [0, *(match.end() for match in re.finditer("\n", text)), len(text)]
    tokens = _MARKDOWN.parse(source)
    found: list[_Found] = []
    path: list[tuple[int, str]] = []
    end = 0
    for index, token in enumerate(tokens):
        if token.map is None or token.nesting < 0:
            continue
        start, stop = (lines[min(line, len(lines) - 1)] for line in token.map)
        if token.level > 0:
            if token.level == 1 and token.type == "list_item_open":
                found[-1].items.append(start)
            elif token.type in ("fence", "code_block", "table_open"):
                found[-1].solids |= {start, stop}
            continue
        # Link definitions leave no token.
        if text[end:start].strip():
            found.append(_Found(end, "prose", _joined(path)))
        role: Role = "body"
        kind = _MARKDOWN_KINDS.get(token.type, "prose")
        if token.type == "heading_open":
            role = "heading"
            level = int(token.tag[1:])
            path = [entry for entry in path if entry[0] < level]
            path.append((level, _title(tokens[index + 1])))
        elif kind == "code":
            role = "alone"
        found.append(_Found(start, kind, _joined(path), role))
        end = stop
    if text[end:].strip() or not found:
        found.append(_Found(end, "prose", _joined(path)))
    found[0].start = 0
    ends = [*(block.start for block in found[1:]), len(text)]
    return [block.until(end) for block, end in zip(found, ends, strict=True)]


def _joined(path: list[tuple[int, str]]) -> str:
    return " > ".join(title for _, title in path if title)


def _title(inline: Token) -> str:
    # Every passage below it carries the heading, so an endless one must not.
    title = " ".join(inline.content.split())
    return title if len(title) <= _MAX_HEADING else title[: _MAX_HEADING - 1] + "…"
