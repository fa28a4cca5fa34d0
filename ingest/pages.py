"""Pages: the stored text of a PDF, cut into paragraphs that know their page and its headings."""

from __future__ import annotations

import re

from ingest.blocks import Block, Role, contiguous, shortened
from ingest.readers.pdf import PAGE_END

_PARAGRAPH = re.compile(r"\S.*(?:\n.*\S.*)*")
_HEADING = re.compile(r"(#{1,6}) (.+)")


def pages(text: str) -> list[Block]:
    """A block for each paragraph, whose path is the headings above it and its page, such as "page 3".

    A page opens a section, so that no passage is of two pages unless whole pages share it.
    """
    blocks: list[Block] = []
    path: list[tuple[int, str]] = []
    start = 0
    for number, page in enumerate(text.split(PAGE_END), 1):
        role: Role = "section"
        for found in _PARAGRAPH.finditer(page):
            heading = _HEADING.fullmatch(found[0])
            if heading:
                role = "heading"
                level = len(heading[1])
                path = [entry for entry in path if entry[0] < level]
                path.append((level, shortened(heading[2])))
            titles = (*(title for _, title in path), f"page {number}")
            blocks.append(Block(start + found.start(), start + found.end(), "prose", titles, role))
            role = "body"
        start += len(page) + len(PAGE_END)
    return contiguous(text, 0, len(text), blocks)
