"""Encodings: bytes to text, by byte order mark, by validity, by declaration, and by statistics at last."""

from __future__ import annotations

import codecs
import re
from typing import NoReturn

from charset_normalizer import from_bytes

from ingest.alphabets import encoding_of_latin
from ingest.errors import Unsupported
from ingest.mixed import decode_by_lines, is_partly_utf8

# UTF-32 first: its little-endian mark starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARATIONS = (
    re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE),
    re.compile(rb"^\s*<\?xml[^>]{0,100}encoding\s*=\s*[\"']([\w.:-]+)"),
    # PEP 263, which Emacs and Vim users write in other languages as well.
    re.compile(rb"\A(?:[^\n]*\n)?[^\S\n]*(?:#|//|/\*|--)[^\n]*?coding[:=][ \t]*([\w.-]+)"),
)
_DECLARED_WITHIN = 2048
_ISO_2022 = {b"\x1b$B": "iso2022_jp_2", b"\x1b$@": "iso2022_jp_2", b"\x1b$)C": "iso2022_kr"}

# Control characters that no text in a one-byte encoding has. Tab, line ends, form feed and escape stay.
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
# Polish or Czech read as Western European has signs inside words; kana in Shift JIS, these before letters.
_NOT_WESTERN = re.compile(r"[a-z][\u00a1-\u00bf\u00d7\u00f7]+[a-z]|[\u201a\u0192]\w")
_CANDIDATES = (
    "cp1250", "iso8859_2", "cp1251", "koi8_r", "cp866", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp932",
    "euc_jp", "gb18030", "big5", "cp949",
)  # fmt: skip
# Bytes above ASCII in a row, on average, below which they are accents among Latin letters.
_ALONE = 1.5
_SAMPLE = 200_000


def decode(name: str, data: bytes, charset: str | None = None, warnings: list[str] | None = None) -> str:
    """`data` as text. A byte order mark decides, then `charset` (what the sender says), then validity as UTF-8
    or UTF-16, then what the text declares (HTML, XML, `coding:`), then its statistics.

    A log that several programs wrote may be UTF-8 in some lines only, which `warnings` are told. Raises Unsupported
    with the byte offset for what is not text, and where text breaks its own encoding.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _strict(name, data, encoding, len(mark))
    if charset is not None:
        return _strict(name, data, _known(name, charset))
    for escape, encoding in _ISO_2022.items():
        if escape in data:
            return _strict(name, data, encoding)
    unmarked = _unmarked_utf16(data)
    if unmarked is not None:
        return _strict(name, data, unmarked)
    try:
        return _without_nul(name, data.decode(), "utf-8", 0)
    except UnicodeDecodeError as error:
        return _legacy(name, data, error, [] if warnings is None else warnings)


def _legacy(name: str, data: bytes, error: UnicodeDecodeError, warnings: list[str]) -> str:
    control = _CONTROLS.search(data)
    if control is not None:
        _refuse(name, data, control.start(), "is a control character, so this is not text")
    if (
        len(data) - error.start < 4
        and error.reason == "unexpected end of data"
        and _HIGH_RUN.search(data, 0, error.start)
    ):
        _refuse(name, data, error.start, "starts a UTF-8 character that is cut off: the file is truncated")
    declared = (pattern.search(data[:_DECLARED_WITHIN]) for pattern in _DECLARATIONS)
    for encoding in (_codec(found[1].decode()) for found in declared if found):
        # UTF-16 could not have been searched, and UTF-8 has failed.
        if encoding is not None and not encoding.startswith("utf"):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                break
    if is_partly_utf8(data):
        warnings.append(f"not all of it is UTF-8 (from byte {error.start} on): the rest is read as an older encoding")
        return decode_by_lines(data, _guess)
    guess = _guess(data)
    if guess is None:
        _refuse(name, data, error.start, "is not UTF-8, nor is this text in another encoding that can be told")
    return _strict(name, data, guess)


def _guess(data: bytes) -> str | None:
    """The likeliest of the encodings that were common before UTF-8.

    Statistics alone fail on the commonest case: charset-normalizer 3.5 takes a short text with few accents for
    Persian, and Polish for Turkish. So where bytes above ASCII stand alone between letters, a language is found whose
    alphabet they are; else, where they are neither signs inside words nor Japanese, the text is Western European
    (Windows-1252, as which web browsers read Latin-1 too).
    """
    runs = _HIGH_RUN.findall(data)
    if sum(map(len, runs)) < _ALONE * len(runs):
        other = encoding_of_latin(data[:_SAMPLE])
        if other is not None:
            return other
        try:
            if not _NOT_WESTERN.search(data.decode("cp1252")):
                return "cp1252"
        except UnicodeDecodeError:
            pass
    # Among much ASCII, as in source code, the statistics see too little of the rest.
    sample = b" ".join(word for word in data.split() if _HIGH_RUN.search(word))[:_SAMPLE]
    best = from_bytes(sample, cp_isolation=list(_CANDIDATES)).best()
    return None if best is None else best.encoding


def _unmarked_utf16(data: bytes) -> str | None:
    """UTF-16 without a mark, as Windows tools write it: nearly every other byte is NUL."""
    half = len(data) // 2
    if half < 4:
        return None
    even, odd = data[0::2].count(0) / half, data[1::2].count(0) / half
    if min(even, odd) < 0.05 and max(even, odd) > 0.7:
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _known(name: str, charset: str) -> str:
    encoding = _codec(charset)
    if encoding is None:
        raise Unsupported(name, charset, "its media type names a character set that is not known here")
    return encoding


def _codec(charset: str) -> str | None:
    try:
        # Fails as well for Python's codecs from bytes to bytes.
        b"x".decode(charset)
    except LookupError:
        return None
    except UnicodeError:
        pass
    encoding = codecs.lookup(charset).name
    if encoding in ("idna", "punycode", "raw-unicode-escape", "unicode-escape"):
        return None
    # As browsers do: Latin-1 has nothing between 0x80 and 0x9F, where Windows-1252 has quotes and dashes.
    return "cp1252" if encoding in ("iso8859-1", "ascii") else encoding


def _strict(name: str, data: bytes, encoding: str, mark: int = 0) -> str:
    try:
        text = data[mark:].decode(encoding)
    except UnicodeDecodeError as error:
        offset = mark + error.start
        end = ": the file is truncated" if "truncated" in error.reason or "end of data" in error.reason else ""
        _refuse(name, data, offset, f"is not {encoding.upper()}{end}")
    return _without_nul(name, text, encoding, mark)


def _without_nul(name: str, text: str, encoding: str, mark: int) -> str:
    if "\0" in text:
        offset = mark + len(text[: text.index("\0")].encode(encoding))
        raise Unsupported(name, b"\0", f"byte {offset} is NUL, so this is not text")
    return text


def _refuse(name: str, data: bytes, offset: int, why: str) -> NoReturn:
    raise Unsupported(name, data[offset : offset + 4], f"byte {offset} {why}")
