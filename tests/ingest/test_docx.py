from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable

import docx
import pytest
from docx.document import Document
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls

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


MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"


def add_xml(document: Document, xml: str) -> None:
    spaces = f'xmlns:m="{MATH}" xmlns:w14="http://schemas.microsoft.com/office/word/2010/wordml"'
    document.add_paragraph("see ")._p.append(parse_xml(f"<w:p {nsdecls('w')} {spaces}>{xml}</w:p>")[0])


@pytest.mark.parametrize(
    ("omml", "line"),
    [
        ("<m:sSup><m:e>{c}</m:e><m:sup>{2}</m:sup></m:sSup>", "c^2"),
        ("<m:f><m:num>{a+b}</m:num><m:den>{c}</m:den></m:f>", "(a+b)/c"),
        ("<m:rad><m:deg/><m:e>{x}</m:e></m:rad>", "√(x)"),
        ("<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr><m:sub>{n=1}</m:sub><m:sup>{∞}</m:sup><m:e>{n}</m:e></m:nary>",
         "∑_(n=1)^∞ n"),
        ("{y=}<m:func><m:fName>{log}</m:fName><m:e><m:d><m:e>{x}</m:e></m:d></m:e></m:func>", "y= log(x)"),
        ("<m:m><m:mr><m:e>{1}</m:e><m:e>{0}</m:e></m:mr><m:mr><m:e>{0}</m:e></m:mr></m:m>", "[1, 0; 0]"),
        ("<m:odd><m:e>{kept}</m:e></m:odd>", "kept"),
    ],
)  # fmt: skip
def test_an_equation_is_text_on_one_line(omml, line):
    runs = re.sub(r"\{(.*?)\}", r"<m:r><m:t>\1</m:t></m:r>", omml)
    data = written(lambda document: add_xml(document, f"<m:oMath>{runs}</m:oMath>"))
    assert read_upload("a.docx", data, max_bytes=MAX).text == f"see {line}\n"


def test_boxes_are_ticked_or_not():
    box = "<w:sdt><w:sdtPr><w14:checkbox>{}</w14:checkbox></w:sdtPr><w:sdtContent/></w:sdt>"

    def fill(document: Document) -> None:
        add_xml(document, box.format("<w14:checked w14:val='1'/>"))
        add_xml(document, box.format("<w14:checked w14:val='0'/>"))

    assert read_upload("a.docx", written(fill), max_bytes=MAX).text == "see ☒\n\nsee ☐\n"


def test_the_body_may_have_a_number_in_its_name():
    with zipfile.ZipFile(io.BytesIO(written(report))) as zipped:
        parts = {name: zipped.read(name) for name in zipped.namelist()}
    renamed = {name.replace("document.xml", "document2.xml"): data for name, data in parts.items()}
    for name in ("_rels/.rels", "[Content_Types].xml"):
        renamed[name] = renamed[name].replace(b"word/document.xml", b"word/document2.xml")
    assert read_upload("report.docx", archive(renamed), max_bytes=MAX).text == REPORT


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
