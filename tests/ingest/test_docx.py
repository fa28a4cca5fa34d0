from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

import docx
import pytest
from docx.document import Document

from ingest.documents import read_upload
from ingest.errors import Unsupported
from ingest.media_types import DOCX
from ingest.passages import cut
from ingest.readers import docx as reader

MAX = 10_000_000


def written(fill: Callable[[Document], object]) -> bytes:
    document = docx.Document()
    fill(document)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def report(document: Document) -> None:
    document.add_heading("Report", 0)
    document.add_paragraph("# not a heading\nnext line")
    document.add_heading("Results", 1)
    document.add_paragraph("one", style="List Bullet")
    document.add_paragraph("two", style="List Bullet")
    document.add_heading("Numbers", 2)
    table = document.add_table(2, 2)
    for row, cells in zip(table.rows, [("Name", "Größe"), ("a", "1")], strict=True):
        for cell, text in zip(row.cells, cells, strict=True):
            cell.text = text
    document.add_paragraph("To be quoted.", style="Quote")


REPORT = """\
# Report

\\# not a heading
next line

# Results

- one
- two

## Numbers

| Name | Größe |
| --- | --- |
| a | 1 |

> To be quoted.
"""


def test_a_document_becomes_markdown_with_headings_lists_and_tables():
    upload = read_upload("report.docx", written(report), max_bytes=MAX)
    assert (upload.media_type, upload.text) == (DOCX, REPORT)
    passages = cut(upload.text, upload.media_type, lambda text: len(text.split()), 16)
    assert "".join(p.text for p in passages) == upload.text
    assert ("table", "Results > Numbers") in [(p.kind, p.heading) for p in passages]


def test_a_document_is_known_by_its_bytes_where_its_name_says_nothing():
    assert read_upload("report", written(report), max_bytes=MAX).media_type == DOCX


def archive(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, data in files.items():
            zipped.writestr(name, data)
    return file.getvalue()


def damaged(data: bytes) -> bytes:
    """The largest part's bytes changed, its checksum not."""
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        part = zipped.getinfo("word/document.xml")
    middle = part.header_offset + 30 + len(part.filename) + part.compress_size // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 20]) + data[middle + 20 :]


WHOLE = written(report)
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"plain text", "not a DOCX document"),
        (b"%PDF-1.7 text", "'PDF document' is not accepted; its name or media type says"),
        (WHOLE[: len(WHOLE) // 2], "truncated or damaged"),
        (WHOLE[:-30], "truncated or damaged"),
        (damaged(WHOLE), "this DOCX file is damaged"),
        (archive({"word/document.xml": b"<w:document"}), "this DOCX file is damaged"),
        (archive({"xl/workbook.xml": b"<a/>"}), "'an Excel workbook' is not accepted"),
        (archive({"a.txt": b"text"}), "'a ZIP archive' is not accepted"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "'encrypted DOCX document' is not accepted"),
        (OLE, r"'old Word document \(\.doc\)' is not accepted"),
        (written(lambda document: None), "there is no text in it"),
    ],
    ids=["text", "pdf", "half", "cut", "changed", "xml", "xlsx", "zip", "encrypted", "doc", "empty"],
)
def test_what_cannot_be_read_says_why(data, reason):
    with pytest.raises(Unsupported, match=rf"^report\.docx: .*{reason}"):
        read_upload("report.docx", data, max_bytes=MAX)


def test_an_archive_that_unpacks_without_end_is_refused():
    data = archive({"word/document.xml": b" " * (reader.MAX_UNPACKED + 1)})
    assert len(data) < 100_000
    with pytest.raises(Unsupported, match=r"64000001 bytes of XML.*the limit is 64000000"):
        read_upload("report.docx", data, max_bytes=MAX)


def test_entities_are_not_expanded_without_end():
    levels = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    xml = f'<!DOCTYPE d [<!ENTITY a0 "ha">{levels}]><d>&a9;</d>'.encode()
    with pytest.raises(Unsupported, match="this DOCX file is damaged"):
        read_upload("report.docx", archive({"word/document.xml": xml}), max_bytes=MAX)
