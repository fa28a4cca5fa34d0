"""Uploads: bytes or text from outside, checked and turned into text with a name and a media type."""

from __future__ import annotations

import hashlib
import math
import unicodedata
from typing import Any

import msgspec

from ingest.encodings import decode
from ingest.errors import InvalidInput, TooLarge, Unsupported
from ingest.media_types import DOCX, HTML, PDF, media_type_of
from ingest.readers.base64 import without_base64
from ingest.readers.docx import read_docx
from ingest.readers.html import read_html
from ingest.readers.pdf import read_pdf

MAX_NAME = 512
MAX_METADATA_KEYS = 64
MAX_METADATA_KEY = 256
MAX_METADATA_TEXT = 4096

Scalar = str | int | float | bool | None

# Cc control, Cs lone surrogate, Zl and Zp line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A document accepted for ingestion. `size` (bytes) and `sha256` describe the bytes as they came.

    `charset`: the encoding that its sender named; None for UTF-8, which needs no naming. `warnings`: what of it could
    not be read and was left out, such as "2 charts".
    """

    name: str
    text: str
    media_type: str
    metadata: dict[str, Any]
    size: int
    sha256: str
    charset: str | None = None
    warnings: list[str] = []


def read_upload(
    name: str,
    data: bytes,
    media_type: str | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    max_bytes: int,
) -> Upload:
    """An uploaded file as text, with LF as its only line end.

    Text is decoded by `ingest.encodings`; HTML and DOCX become Markdown, and a PDF the text of its pages. Raises
    TooLarge above `max_bytes`; Unsupported for a media type without text, for bytes that are not what name or
    media type say, and for files that are encrypted, damaged or scanned, with the reason; InvalidInput for a bad
    name or metadata or a blank document.
    """
    check_name(name)
    checked = check_metadata(metadata)
    if len(data) > max_bytes:
        raise TooLarge(name, len(data), max_bytes)
    essence, charset = media_type_of(name, media_type, data)
    if not data:
        raise InvalidInput(name, "0 bytes", "a document must not be blank")
    warnings: list[str] = []
    text = _text(name, data, essence, charset, warnings).replace("\r\n", "\n").replace("\r", "\n")
    text = without_base64(text, warnings)
    if not text.strip():
        raise InvalidInput(name, f"{len(data)} bytes", "a document must not be blank")
    return Upload(
        name=name,
        text=text,
        media_type=essence,
        metadata=checked,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        charset=named_charset(charset),
        warnings=warnings,
    )


def named_charset(charset: str | None) -> str | None:
    """`charset` in lower case, None for UTF-8: what tells two readings of the same bytes apart."""
    return None if charset is None or charset.lower() in ("utf-8", "utf8") else charset.lower()


def _text(name: str, data: bytes, media_type: str, charset: str | None, warnings: list[str]) -> str:
    if media_type == PDF:
        return read_pdf(name, data, warnings)
    if media_type == DOCX:
        return read_docx(name, data, warnings)
    text = decode(name, data, charset, warnings)
    return read_html(name, text, warnings) if media_type == HTML else text


def read_text(
    name: str,
    text: str,
    media_type: str | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    max_bytes: int,
) -> Upload:
    """A document that arrived as text; its bytes are its UTF-8 encoding. Checked as in `read_upload`.

    NUL and lone surrogates raise Unsupported with the character offset.
    """
    return read_upload(name, encode_text(name, text), as_utf8(media_type), metadata, max_bytes=max_bytes)


def encode_text(name: str, text: str) -> bytes:
    """`text` as UTF-8. Raises Unsupported for NUL and lone surrogates, with the character offset."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise Unsupported(name, text[error.start], f"character {error.start} is a lone surrogate") from None
    if "\0" in text:
        raise Unsupported(name, "\0", f"character {text.index(chr(0))} is NUL, so this is not text")
    return data


def as_utf8(media_type: str | None) -> str:
    """The media type of what arrived as text: what it says of an encoding was said of other bytes."""
    essence = (media_type or "").partition(";")[0]
    return f"{essence};charset=utf-8"


def check_name(name: str) -> None:
    """Raise InvalidInput unless `name` has 1 to 512 characters and none that controls a terminal or a line.

    Names are data: they may look like paths, and are never used as paths.
    """
    if not name.strip():
        raise InvalidInput("name", name, f"it must have 1 to {MAX_NAME} characters, not all of them space")
    if len(name) > MAX_NAME:
        raise InvalidInput("name", name, f"it must have 1 to {MAX_NAME} characters and this has {len(name)}")
    for offset, character in enumerate(name):
        if unicodedata.category(character) in _UNPRINTABLE:
            raise InvalidInput("name", name, f"character {offset} is a control character")


def printable_name(name: str) -> str:
    """`name` made fit to be recorded, for files refused because of their very name."""
    safe = "".join("\ufffd" if unicodedata.category(c) in _UNPRINTABLE else c for c in name[:MAX_NAME])
    return safe if safe.strip() else "unnamed"


def check_metadata(metadata: dict[str, Any] | None, field: str = "metadata") -> dict[str, Scalar]:
    """`metadata` unchanged, or {} for None. Raises InvalidInput unless it is a flat, bounded JSON object."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise InvalidInput(field, metadata, "it must be a JSON object")
    if len(metadata) > MAX_METADATA_KEYS:
        raise InvalidInput(field, f"{len(metadata)} keys", f"the limit is {MAX_METADATA_KEYS} keys")
    for key, value in metadata.items():
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_METADATA_KEY or not _encodable(key):
            raise InvalidInput(field, key, f"a key must be text of 1 to {MAX_METADATA_KEY} characters")
        _check_scalar(f"{field}.{key}", value)
    return metadata


def _check_scalar(field: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > MAX_METADATA_TEXT or not _encodable(value):
            raise InvalidInput(field, value, f"text must have at most {MAX_METADATA_TEXT} valid characters")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise InvalidInput(field, value, "a whole number must fit in 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidInput(field, value, "a number must be finite")
    elif value is not None:
        raise InvalidInput(field, value, "it must be text, a number, true, false or null")


def _encodable(text: str) -> bool:
    # SQLite's text functions stop at NUL, and its driver refuses lone surrogates.
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
