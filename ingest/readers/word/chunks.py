"""Other documents inside a Word document (altChunk), which Word takes in when it opens it."""

from __future__ import annotations

import email
import email.policy
import html
from collections.abc import Callable

from selectolax.lexbor import LexborHTMLParser

from ingest.encodings import decode
from ingest.errors import Unsupported

_HTML = (".htm", ".html", ".xhtml")
_MHTML = (".mht", ".mhtml")
_WORD = (".docx", ".docm", ".dotx")


def chunk_as_html(part: str, data: bytes, word_as_html: Callable[[bytes], str]) -> str | None:
    """The HTML that stands for the part of that name; None for a format that is not read, such as RTF."""
    ending = part[part.rfind(".") :].lower()
    try:
        if ending in _HTML:
            return _body(decode(part, data))
        if ending in _MHTML:
            page = email.message_from_bytes(data, policy=email.policy.default).get_body(("html", "plain"))
            return None if page is None else _body(page.get_content())
        if ending == ".txt":
            lines = decode(part, data).splitlines()
            return "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    except (Unsupported, LookupError, ValueError):
        return None
    return word_as_html(data) if ending in _WORD else None


def _body(page: str) -> str:
    body = LexborHTMLParser(page).body
    return "" if body is None else body.html or ""
