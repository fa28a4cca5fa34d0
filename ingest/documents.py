"""Uploads: bytes or text from outside, checked and turned into text with a name and a media type."""

from __future__ import annotations

import codecs
import hashlib
import math
import re
import unicodedata
from typing import Any

import msgspec

from ingest.errors import InvalidInput, TooLarge, Unsupported

MAX_NAME = 512
MAX_METADATA_KEYS = 64
MAX_METADATA_KEY = 256
MAX_METADATA_TEXT = 4096

Scalar = str | int | float | bool | None

_LANGUAGES = {
    "bash": "sh", "c": "c", "cc": "cpp", "clj": "clojure", "cpp": "cpp", "cs": "csharp", "css": "css",
    "csv": "csv", "cxx": "cpp", "dart": "dart", "ex": "elixir", "exs": "elixir", "go": "go", "h": "c",
    "hpp": "cpp", "hs": "haskell", "htm": "html", "html": "html", "ini": "ini", "java": "java",
    "jl": "julia", "js": "javascript", "json": "json", "jsonl": "json", "jsx": "javascript", "kt": "kotlin",
    "kts": "kotlin", "less": "css", "lua": "lua", "mjs": "javascript", "ml": "ocaml", "php": "php",
    "pl": "perl", "ps1": "powershell", "py": "python", "pyi": "python", "r": "r", "rb": "ruby", "rs": "rust",
    "scala": "scala", "scss": "css", "sh": "sh", "sql": "sql", "swift": "swift", "toml": "toml",
    "ts": "typescript", "tsv": "csv", "tsx": "typescript", "vue": "html", "xml": "xml", "yaml": "yaml",
    "yml": "yaml", "zig": "zig", "zsh": "sh",
}  # fmt: skip
_ENDINGS = {
    **{ending: f"text/x-{language}" for ending, language in _LANGUAGES.items()},
    "md": "text/markdown",
    "markdown": "text/markdown",
    "txt": "text/plain",
    "rst": "text/plain",
    "log": "text/plain",
}
_BINARY_ENDINGS = frozenset((
    "7z", "avi", "bin", "bmp", "bz2", "class", "db", "dll", "doc", "docx", "dylib", "epub", "exe", "gguf",
    "gif", "gz", "heic", "ico", "jar", "jpeg", "jpg", "mkv", "mov", "mp3", "mp4", "npy", "npz", "odp",
    "ods", "odt", "ogg", "onnx", "otf", "parquet", "pdf", "pkl", "png", "ppt", "pptx", "psd", "pyc", "rar",
    "rtf", "safetensors", "so", "sqlite", "tar", "tgz", "tif", "tiff", "ttf", "wasm", "wav", "webm", "webp",
    "woff", "woff2", "xls", "xlsx", "xz", "zip", "zst",
))  # fmt: skip
_ALIASES = {
    "text/x-markdown": "text/markdown",
    "application/ecmascript": "text/x-javascript",
    "application/javascript": "text/x-javascript",
    "application/json": "text/x-json",
    "application/jsonl": "text/x-json",
    "application/sql": "text/x-sql",
    "application/toml": "text/x-toml",
    "application/typescript": "text/x-typescript",
    "application/x-ndjson": "text/x-json",
    "application/xml": "text/x-xml",
    "application/yaml": "text/x-yaml",
    "application/x-yaml": "text/x-yaml",
    "text/css": "text/x-css",
    "text/csv": "text/x-csv",
    "text/html": "text/x-html",
    "text/javascript": "text/x-javascript",
    "text/tab-separated-values": "text/x-csv",
    "text/xml": "text/x-xml",
}
# Browsers send video/mp2t for TypeScript's .ts: it says as little as octet-stream does.
_UNTOLD = frozenset({"", "application/octet-stream", "binary/octet-stream", "application/unknown", "video/mp2t"})
_SUPPORTED = "supported are Markdown, plain text, source code, JSON, YAML, TOML, CSV, XML and HTML as UTF-8 or UTF-16"
# Cc control, Cs lone surrogate, Zl and Zp line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A document accepted for ingestion. `size` (bytes) and `sha256` describe the bytes as they came."""

    name: str
    text: str
    media_type: str
    metadata: dict[str, Any]
    size: int
    sha256: str


def read_upload(
    name: str,
    data: bytes,
    media_type: str | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    max_bytes: int,
) -> Upload:
    """An uploaded file as text: UTF-8, with or without byte order mark, or UTF-16 with one.

    Line ends become LF. Raises TooLarge above `max_bytes`, Unsupported for a media type that is not text
    and for bytes that are not (with the byte offset), InvalidInput for a bad name or metadata or a blank
    document.
    """
    check_name(name)
    resolved = _media_type(name, media_type)
    checked = check_metadata(metadata)
    if len(data) > max_bytes:
        raise TooLarge(name, len(data), max_bytes)
    text = _lines(name, _decode(name, data))
    sha256 = hashlib.sha256(data).hexdigest()
    return Upload(name=name, text=text, media_type=resolved, metadata=checked, size=len(data), sha256=sha256)


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
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise Unsupported(name, text[error.start], f"character {error.start} is a lone surrogate") from None
    if "\0" in text:
        raise Unsupported(name, "\0", f"character {text.index(chr(0))} is NUL, so this is not text")
    return read_upload(name, data, media_type, metadata, max_bytes=max_bytes)


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


def _media_type(name: str, given: str | None) -> str:
    told = (given or "").partition(";")[0].strip().lower()
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    by_ending = _ENDINGS.get(ending)
    if told in _UNTOLD:
        if ending in _BINARY_ENDINGS:
            raise Unsupported("media_type", f".{ending}", _SUPPORTED)
        return by_ending or "text/plain"
    if told in ("text/markdown", "text/plain"):
        return told
    if told in _ALIASES:
        return _ALIASES[told]
    if by_ending and told.startswith(("text/", "application/x-")):
        return by_ending
    if re.fullmatch(r"text/x-[a-z0-9.+_-]{1,40}", told):
        return told
    if told.startswith("text/"):
        return "text/plain"
    raise Unsupported("media_type", told, _SUPPORTED)


def _decode(name: str, data: bytes) -> str:
    if data.startswith(codecs.BOM_UTF8):
        mark, encoding = len(codecs.BOM_UTF8), "utf-8"
    elif data.startswith(codecs.BOM_UTF16_LE):
        mark, encoding = 2, "utf-16-le"
    elif data.startswith(codecs.BOM_UTF16_BE):
        mark, encoding = 2, "utf-16-be"
    else:
        mark, encoding = 0, "utf-8"
    try:
        text = data[mark:].decode(encoding)
    except UnicodeDecodeError as error:
        offset = mark + error.start
        raise Unsupported(name, data[offset : offset + 4], f"byte {offset} is not {encoding.upper()}") from None
    if "\0" in text:
        offset = mark + len(text[: text.index("\0")].encode(encoding))
        raise Unsupported(name, b"\0", f"byte {offset} is NUL, so this is not text")
    return text


def _lines(name: str, text: str) -> str:
    if not text.strip():
        raise InvalidInput(name, f"{len(text)} characters", "a document must not be blank")
    return text.replace("\r\n", "\n").replace("\r", "\n")
