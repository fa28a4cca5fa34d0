"""Which splitter cuts which media type into blocks."""

from __future__ import annotations

from ingest.blocks import Block, outlined_code, paragraphs
from ingest.delimited import rows
from ingest.markdown import markdown
from ingest.media_types import DOCX, HTML, PDF
from ingest.pages import pages
from ingest.source import can_parse, source


def split(text: str, media_type: str) -> list[Block]:
    """The blocks of `text`, contiguous from 0 to its end; [] for no text.

    HTML and DOCX were turned into Markdown, and PDF into pages, when they were read.
    """
    if not text:
        return []
    if media_type in ("text/markdown", HTML, DOCX):
        return markdown(text)
    if media_type == PDF:
        return pages(text)
    if media_type == "text/plain":
        return paragraphs(text)
    if media_type == "text/x-csv":
        return rows(text)
    if can_parse(text, media_type):
        return source(text, media_type)
    return outlined_code(text)
