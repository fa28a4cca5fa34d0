"""Blocks: the units of meaning a text is made of, as a tree. What a passage may hold is decided in `passages`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import msgspec

Kind = Literal["prose", "code", "table", "list"]
Role = Literal["heading", "section", "body", "alone"]

MAX_TITLE = 120
# What each part of a block carries of its first lines: a passage has about as many characters.
MAX_LEAD = 600
# How deep a tree of blocks is built; what lies deeper is cut at blank lines and lines.
MAX_DEPTH = 10

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
# Closing brackets after a blank line end the unit above them.
# Not a comment, nor an attribute, and not all there is.
_FIRST_LINE = re.compile(r"(?:\s|(?:#|//|--|/\*|\*|;|@|\[).*\n)*(\S.{0,400})\n")
_DEFINITION = re.compile(r"\n[^\S\n]*\n(?=[^\s)\]}])")


class Block(msgspec.Struct, frozen=True):
    """text[start:end] as one unit, in characters, its trailing blank lines included.

    `path`: the titles above it, outermost first. `role`: a heading opens a section and stays with the block
    after it; `section` opens one too; a block that stands alone shares a passage only when its whole section
    does. `children`, in order and apart: where a block too large for a passage is best cut (around list items,
    the members of a class). Where there are none: at blank lines, then at lines. `lead`: the path of its parts but the
    first, which tells what its first lines did, such as the columns of a table; () for the same as `path`.
    """

    start: int
    end: int
    kind: Kind = "prose"
    path: tuple[str, ...] = ()
    role: Role = "body"
    children: tuple[Block, ...] = ()
    lead: tuple[str, ...] = ()


def paragraphs(text: str) -> list[Block]:
    """Prose, cut after blank lines."""
    return blocks_between(text, (match.end() for match in _BLANK_LINES.finditer(text)), "prose")


def outlined_code(text: str) -> list[Block]:
    """Source code of a language without a grammar here, cut before what follows a blank line unindented.

    What does not fit is led by its first line that is no comment.
    """
    blocks = blocks_between(text, (match.end() for match in _DEFINITION.finditer(text)), "code")
    return [msgspec.structs.replace(block, lead=_first_line(text, block)) for block in blocks]


def _first_line(text: str, block: Block) -> tuple[str, ...]:
    found = _FIRST_LINE.match(text, block.start, block.end)
    return (shortened(found[1]),) if found else ()


def blocks_between(text: str, cuts: Iterable[int], kind: Kind) -> list[Block]:
    """Blocks of `kind` from each of the ascending offsets `cuts` to the next; the first starts at 0."""
    bounds = [0, *(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [Block(start, end, kind=kind) for start, end in pairwise(bounds)]


def contiguous(text: str, start: int, end: int, blocks: Iterable[Block], parent: Block | None = None) -> list[Block]:
    """`blocks`, in order and apart, made to follow each other from `start` to `end`.

    Blank text goes to the block before it; other text between them becomes a block of its own, of the kind and
    path of `parent`, or else prose below the path of the block before it.
    """
    joined: list[Block] = []
    position = start
    for block in [*blocks, Block(end, end)]:
        between = text[position : block.start]
        if between.strip():
            gap = parent or Block(0, 0, path=joined[-1].path if joined else ())
            joined.append(Block(position, block.start, gap.kind, gap.path))
        elif between and joined:
            joined[-1] = msgspec.structs.replace(joined[-1], end=block.start)
        elif between:
            block = msgspec.structs.replace(block, start=position)
        if block.start < block.end:
            joined.append(block)
        position = block.end
    return joined


def shortened(title: str, most: int = MAX_TITLE) -> str:
    """`title` on one line. Every passage below it carries it, so an endless one is cut to `most` characters."""
    title = " ".join(title.split())
    return title if len(title) <= most else title[: most - 1] + "…"
