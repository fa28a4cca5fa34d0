"""DOCX to Markdown: by way of HTML, which mammoth makes of Word's styles."""

from __future__ import annotations

import html
import io
import re
import zipfile

import mammoth

from ingest.errors import Unsupported
from ingest.readers.html import read_html
from ingest.readers.word.chunks import chunk_as_html
from ingest.readers.word.numbers import STYLE
from ingest.readers.word.preparing import chunk_mark, prepared, unread
from ingest.readers.word.xml import Package

# Bytes of XML. Unpacked, a book of a thousand pages has about ten million; an archive made to harm has billions.
MAX_UNPACKED = 64_000_000

_BODY = re.compile(r"word/(?:document\d*\.xml|_rels/\w+\.xml\.rels)")
_OLE = b"\xd0\xcf\x11\xe0"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
_OTHERS = {"xl/": "an Excel workbook", "ppt/": "a PowerPoint presentation", "META-INF/": "an OpenDocument or EPUB file"}
# A Word document may hold others, and these others.
_MAX_WITHIN = 3
_NUMBER = re.compile(r'(<li>)?<span class="number">([^<]*)</span>')
_STYLES = f"""
r.{STYLE} => span.number
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => p:fresh
p[style-name='Source Code'] => pre:separator('\\n')
p[style-name='HTML Preformatted'] => pre:separator('\\n')
p[style-name='Plain Text'] => pre:separator('\\n')
p[style-name='Code'] => pre:separator('\\n')
p[style-name='Quote'] => blockquote > p:fresh
p[style-name='Intense Quote'] => blockquote > p:fresh
"""


def read_docx(name: str, data: bytes, warnings: list[str]) -> str:
    """The text of a Word document as Markdown: body, tables, notes, numbers of clauses, text boxes, SmartArt, data of
    charts, documents within it, equations on one line; not headers, footers, comments or deletions.

    `warnings` are told what of it is left out. Raises Unsupported, saying why, for a file that is encrypted, of the old
    binary format, another kind of file, truncated or damaged, without text, or larger than 64 MB of XML when unpacked.
    """
    _check(name, data)
    try:
        page = _as_html(data, warnings, 0)
    except Exception as error:
        # Whatever a stranger's XML makes the library raise, it is this file that cannot be read.
        raise Unsupported(name, f"{type(error).__name__}: {error}", "this DOCX file is damaged") from error
    text = read_html(name, page, warnings) if page else ""
    if not text:
        found = f", but there is: {'; '.join(warnings)}" if warnings else ", perhaps pictures of text; OCR it first"
        raise Unsupported(name, "DOCX document", f"there is no text in it{found}")
    return text


def _as_html(data: bytes, warnings: list[str], depth: int) -> str:
    package = Package(data)
    ready = prepared(package, warnings)
    converted = mammoth.convert_to_html(
        io.BytesIO(ready.data), style_map=_STYLES, convert_image=mammoth.images.img_element(lambda image: {})
    )
    warnings += unread(message.message for message in converted.messages)
    page = _NUMBER.sub(_numbered, converted.value)
    for number, part in enumerate(ready.chunks):
        inner = None
        if depth < _MAX_WITHIN and part in package.names:
            inner = chunk_as_html(part, package.read(part), lambda data: _as_html(data, warnings, depth + 1))
        if inner is None:
            warnings.append(f"a document within this one (altChunk) that is not read: {part.rpartition('/')[2]}")
        page = page.replace(f"<p>{chunk_mark(number)}</p>", inner or "")
    return page


def _numbered(found: re.Match[str]) -> str:
    """A number of a list as its item's own; another before the text."""
    label = html.unescape(found[2])
    if found[1] and re.fullmatch(r"\d{1,8}\.", label):
        return f'<li value="{label[:-1]}">'
    return f"{found[1] or ''}{html.escape(label)} "


def check_docx_start(name: str, data: bytes) -> None:
    """Raise Unsupported unless `data`, the start of a file or all of it, starts as a Word document does."""
    if not data.startswith((b"PK", _OLE)):
        raise Unsupported(name, data[:8], "this is not a DOCX document: its first bytes are not PK")


def _check(name: str, data: bytes) -> None:
    if data.startswith(_OLE):
        if _ENCRYPTED in data:
            raise Unsupported(name, "encrypted DOCX document", "save it without its password first")
        raise Unsupported(name, "old Word document (.doc)", "save it as .docx first")
    check_docx_start(name, data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {file.filename: file.file_size for file in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise Unsupported(name, str(error), "this DOCX file is truncated or damaged") from error
    # Microsoft's servers call it document2.xml at times, others anything.
    if not any(_BODY.fullmatch(file) for file in files):
        kind = next(
            (kind for start, kind in _OTHERS.items() if any(f.startswith(start) for f in files)), "a ZIP archive"
        )
        raise Unsupported(name, kind, "this is not a DOCX document: it has no word/document.xml")
    size = sum(size for file, size in files.items() if file.endswith((".xml", ".rels")))
    if size > MAX_UNPACKED:
        raise Unsupported(name, f"{size} bytes of XML", f"the limit is {MAX_UNPACKED} bytes unpacked")
