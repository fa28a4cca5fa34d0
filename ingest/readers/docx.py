"""DOCX to Markdown: by way of HTML, which mammoth makes of Word's styles."""

from __future__ import annotations

import io
import re
import zipfile

import mammoth

from ingest.errors import Unsupported
from ingest.readers.equations import with_equations
from ingest.readers.html import read_html

# Bytes of XML. Unpacked, a book of a thousand pages has about ten million; an archive made to harm has billions.
MAX_UNPACKED = 64_000_000

_OLE = b"\xd0\xcf\x11\xe0"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
_OTHERS = {"xl/": "an Excel workbook", "ppt/": "a PowerPoint presentation", "META-INF/": "an OpenDocument or EPUB file"}
_MAIN = re.compile(r"word/document\d*\.xml")
_STYLES = """
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
    """The text of a Word document as Markdown: body, tables, notes, equations on one line; not headers, footers,
    comments or deletions.

    Raises Unsupported, saying why, for a file that is encrypted, of the old binary format, another kind of file,
    truncated or damaged, without text, or larger than 64 MB of XML when unpacked.
    """
    _check(name, data)
    try:
        html = mammoth.convert_to_html(
            io.BytesIO(with_equations(data)),
            style_map=_STYLES,
            convert_image=mammoth.images.img_element(lambda image: {}),
        ).value
    except Exception as error:
        # Whatever a stranger's XML makes the library raise, it is this file that cannot be read.
        raise Unsupported(name, f"{type(error).__name__}: {error}", "this DOCX file is damaged") from error
    if not html:
        raise Unsupported(name, "DOCX document", "there is no text in it, perhaps pictures of text; OCR it first")
    return read_html(name, html)


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
    # Microsoft's servers call it document2.xml at times.
    if not any(_MAIN.fullmatch(file) for file in files):
        kind = next(
            (kind for start, kind in _OTHERS.items() if any(f.startswith(start) for f in files)), "a ZIP archive"
        )
        raise Unsupported(name, kind, "this is not a DOCX document: it has no word/document.xml")
    size = sum(size for file, size in files.items() if file.endswith((".xml", ".rels")))
    if size > MAX_UNPACKED:
        raise Unsupported(name, f"{size} bytes of XML", f"the limit is {MAX_UNPACKED} bytes unpacked")
