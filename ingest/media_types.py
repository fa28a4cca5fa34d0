"""Media types: what a file is, by what its sender says, by its name, and by its first bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

from ingest.errors import Unsupported

HTML = "text/html"
PDF = "application/pdf"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"

_LANGUAGES = {
    "bash": "sh", "c": "c", "cc": "cpp", "cjs": "javascript", "clj": "clojure", "cpp": "cpp", "cs": "csharp",
    "css": "css", "csv": "csv", "geojson": "json", "cts": "typescript", "cxx": "cpp", "dart": "dart", "ex": "elixir",
    "exs": "elixir", "go": "go", "h": "c", "hh": "cpp", "hpp": "cpp", "hs": "haskell", "hxx": "cpp", "inc": "c",
    "ini": "ini", "ipynb": "json", "java": "java", "jl": "julia", "js": "javascript", "json": "json",
    "jsonl": "json", "jsx": "javascript", "kt": "kotlin", "kts": "kotlin", "less": "css", "lua": "lua",
    "mjs": "javascript", "ml": "ocaml", "mts": "typescript", "ndjson": "json", "php": "php", "pl": "perl",
    "ps1": "powershell", "py": "python", "pyi": "python", "r": "r", "rb": "ruby", "rs": "rust",
    "scala": "scala", "scss": "css", "sh": "sh", "sql": "sql", "swift": "swift", "toml": "toml",
    "ts": "typescript", "tsv": "csv", "tsx": "typescript", "vue": "vue", "xml": "xml", "yaml": "yaml",
    "yml": "yaml", "zig": "zig", "zsh": "sh",
}  # fmt: skip
_ENDINGS = {
    **{ending: f"text/x-{language}" for ending, language in _LANGUAGES.items()},
    "md": "text/markdown",
    "markdown": "text/markdown",
    "txt": "text/plain",
    "rst": "text/plain",
    "log": "text/plain",
    "srt": "text/plain",
    "vtt": "text/plain",
    "htm": HTML,
    "html": HTML,
    "xhtml": HTML,
    "pdf": PDF,
    "docx": DOCX,
}
_BINARY_ENDINGS = frozenset((
    "7z", "avi", "bin", "bmp", "bz2", "class", "db", "dll", "doc", "docm", "dotx", "dylib", "epub", "exe", "gguf",
    "gif", "gz", "heic", "ico", "jar", "jpeg", "jpg", "mkv", "mov", "mp3", "mp4", "npy", "npz", "odp",
    "ods", "odt", "ogg", "onnx", "otf", "parquet", "pkl", "png", "ppt", "pptx", "psd", "pyc", "rar",
    "rtf", "safetensors", "so", "sqlite", "tar", "tgz", "tif", "tiff", "ttf", "wasm", "wav", "webm", "webp",
    "woff", "woff2", "xls", "xlsx", "xz", "zip", "zst",
))  # fmt: skip
_ALIASES = {
    "text/x-markdown": "text/markdown",
    "application/x-pdf": PDF,
    "application/x-subrip": "text/plain",
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
    "application/xhtml+xml": HTML,
    "text/x-html": HTML,
    "text/javascript": "text/x-javascript",
    "text/tab-separated-values": "text/x-csv",
    "text/xml": "text/x-xml",
}
# Browsers ask Windows, which knows .ts as video, .csv as Excel's and .rs as something of Visual Studio: these say as
# little as octet-stream does.
_UNTOLD = frozenset((
    "", "application/octet-stream", "binary/octet-stream", "application/unknown", "application/vnd.ms-excel",
    "application/x-unknown", "application/rls-services+xml", "video/mp2t", "video/vnd.dlna.mpeg-tts",
))  # fmt: skip
# What these hold is no text, whatever the name says.
_BINARY = re.compile(
    r"(?:audio|font|image|model|video)/|application/(?:gzip|pkcs|vnd\.sqlite|wasm|zip|zstd|x-\w*zip|x-tar)"
)
_SUFFIXES = {"json": "text/x-json", "xml": "text/x-xml", "yaml": "text/x-yaml"}
_SUPPORTED = (
    "supported are Markdown, plain text, HTML, PDF and DOCX with text, source code, JSON, YAML, TOML, CSV and XML"
)
_CANONICAL = frozenset({HTML, PDF, DOCX, "text/markdown", "text/plain"})

# First bytes that no text has; formats that start with letters soon have NUL, which no text has either.
# A ZIP archive may be DOCX, which only its reader can tell.
_SIGNATURES: dict[bytes, str] = {
    b"%PDF-": "PDF document",
    b"PK\x03\x04": "ZIP archive",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "old or encrypted Office document",
    b"{\\rtf1": "RTF document",
    b"\x89PNG\r\n": "PNG image",
    b"\xff\xd8\xff": "JPEG image",
    b"\x1f\x8b\x08": "gzip archive",
    b"BZh91AY": "bzip2 archive",
    b"\xfd7zXZ\x00": "xz archive",
    b"\x28\xb5\x2f\xfd": "zstd archive",
    b"7z\xbc\xaf\x27\x1c": "7z archive",
    b"\x7fELF": "ELF program",
    b"\xcf\xfa\xed\xfe": "Mach-O program",
    b"SQLite format 3\x00": "SQLite database",
}
_HTML_START = re.compile(rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)[\s>]", re.IGNORECASE | re.DOTALL)


class MediaType(NamedTuple):
    """`essence` without parameters, and the encoding its sender names, if any."""

    essence: str
    charset: str | None


def media_type_of(name: str, given: str | None, data: bytes) -> MediaType:
    """The media type of a file, in the one form used here for it (`text/x-python`, `text/markdown`, ...).

    `given` decides where it says anything, then the ending of `name`, then the first bytes. Raises Unsupported
    for a type that has no text here, and where the first bytes are of another format than said.
    """
    told, _, parameters = (given or "").partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w.:+-]+)", parameters, re.IGNORECASE)
    essence = _essence(name, told.strip().lower(), data)
    signature = _signature(data)
    if signature is not None and not _agrees(signature, essence):
        raise Unsupported(name, signature, f"its name or media type says {essence}; {_SUPPORTED}")
    return MediaType(essence, charset[1] if charset else None)


def _essence(name: str, told: str, data: bytes) -> str:
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    by_ending = _ENDINGS.get(ending)
    if told in _UNTOLD:
        if ending in _BINARY_ENDINGS:
            raise Unsupported("media_type", f".{ending}", _SUPPORTED)
        return by_ending or _by_content(data)
    if told in _CANONICAL:
        return told
    if told in _ALIASES:
        return _ALIASES[told]
    if by_ending and told.startswith(("text/", "application/x-")):
        return by_ending
    if re.fullmatch(r"text/x-[a-z0-9.+_-]{1,40}", told):
        return told
    if told.startswith("text/"):
        return "text/plain"
    if _BINARY.match(told) or ending in _BINARY_ENDINGS:
        raise Unsupported("media_type", told, _SUPPORTED)
    by_suffix = _SUFFIXES.get(told.rpartition("+")[2])
    if by_ending or by_suffix:
        return by_ending or by_suffix or ""
    raise Unsupported("media_type", told, _SUPPORTED)


def _by_content(data: bytes) -> str:
    """For names that say nothing: a PDF, a DOCX or an HTML page by its first bytes, else plain text."""
    signature = _signature(data)
    if signature == "PDF document":
        return PDF
    if signature == "ZIP archive" and b"word/" in data:
        return DOCX
    return HTML if _HTML_START.match(data[:2048]) else "text/plain"


def _signature(data: bytes) -> str | None:
    return next((label for start, label in _SIGNATURES.items() if data.startswith(start)), None)


def _agrees(signature: str, essence: str) -> bool:
    if essence == DOCX:
        # Its reader says more exactly what is wrong.
        return signature in ("ZIP archive", "old or encrypted Office document")
    return signature == "PDF document" and essence == PDF
