from __future__ import annotations

import io
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader, simpleSplit
from reportlab.pdfgen.canvas import Canvas

from ingest.documents import read_upload
from ingest.errors import InvalidInput, Unsupported
from ingest.passages import cut
from ingest.readers.pdf import PAGE_END

MAX = 10_000_000
BODY = "This is a sentence of the body that goes on for more than one line of the page, as they do. "


class Writer:
    """A page of blocks below each other, as a word processor would print them."""

    def __init__(self, encryption: StandardEncryption | None = None) -> None:
        self.file = io.BytesIO()
        self.canvas = Canvas(self.file, pagesize=A4, encrypt=encryption)
        self.top = 780.0

    def write_block(self, text: str, size: float = 11, font: str = "Helvetica") -> None:
        self.canvas.setFont(font, size)
        for line in simpleSplit(text, font, size, 480):
            self.canvas.drawString(50, self.top, line)
            self.top -= 1.2 * size
        self.top -= 12

    def add_page(self) -> None:
        self.canvas.showPage()
        self.top = 780.0

    def image(self) -> None:
        self.canvas.drawImage(ImageReader(Image.new("RGB", (20, 20), "white")), 50, 500, 200, 200)


def written(fill: Callable[[Writer], object], encryption: StandardEncryption | None = None) -> bytes:
    pdf = Writer(encryption)
    fill(pdf)
    pdf.canvas.showPage()
    pdf.canvas.save()
    return pdf.file.getvalue()


def article(pdf: Writer) -> None:
    pdf.write_block("The Great Article of Many Words in a Title on Two Lines", 26)
    pdf.write_block(BODY * 3)
    pdf.write_block(BODY * 2)
    pdf.write_block("First section", 16)
    pdf.write_block("# not a heading")
    pdf.add_page()
    pdf.write_block(BODY)
    pdf.write_block("Second section", 16)
    pdf.write_block("The end.")


def scan(pdf: Writer) -> None:
    pdf.image()


def read(data: bytes, name: str = "a.pdf") -> str:
    return read_upload(name, data, max_bytes=MAX).text


def test_paragraphs_and_headings_are_found():
    blocks = read(written(article)).replace(PAGE_END, "\n\n").strip().split("\n\n")
    joined = [" ".join(block.split()) for block in blocks]
    assert joined == [
        "# The Great Article of Many Words in a Title on Two Lines",
        (BODY * 3).strip(),
        (BODY * 2).strip(),
        "## First section",
        "\\# not a heading",
        BODY.strip(),
        "## Second section",
        "The end.",
    ]


def test_passages_know_their_page_and_headings():
    upload = read_upload("a.pdf", written(article), max_bytes=MAX)
    passages = cut(upload.text, upload.media_type, lambda text: len(text.split()), 100)
    assert "".join(p.text for p in passages) == upload.text
    title = "The Great Article of Many Words in a Title on Two Lines"
    assert [p.heading for p in passages] == [
        f"{title} > page 1",
        f"{title} > page 1",
        f"{title} > First section > page 1",
        f"{title} > First section > page 2",
        f"{title} > Second section > page 2",
    ]
    assert [p.text.split()[:2] for p in passages] == [
        ["#", "The"],
        ["This", "is"],
        ["##", "First"],
        ["This", "is"],
        ["##", "Second"],
    ]
    assert passages[3].text.startswith("This")


def test_a_page_without_text_says_that_it_is_an_image_and_keeps_the_count():
    def fill(pdf: Writer) -> None:
        pdf.write_block("First.")
        pdf.add_page()
        scan(pdf)
        pdf.add_page()
        pdf.add_page()
        pdf.write_block("Last.")

    upload = read_upload("a.pdf", written(fill), max_bytes=MAX)
    assert upload.text == f"First.{PAGE_END}[Page 2 is an image without text.]{PAGE_END}{PAGE_END}Last.\n"
    passages = cut(upload.text, upload.media_type, lambda text: len(text), 40)
    assert [p.heading for p in passages] == ["page 1", "page 2", "page 4"]
    assert "".join(p.text for p in passages) == upload.text


def test_text_beyond_ascii_is_read():
    assert read(written(lambda pdf: pdf.write_block("Größe: 5 µm, café"))) == "Größe: 5 µm, café\n"


def encrypted(password: str) -> bytes:
    return written(
        lambda pdf: pdf.write_block("Secret."), StandardEncryption(password, "owner", canPrint=0, strength=128)
    )


WHOLE = written(article)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"plain text", "this is not a PDF document"),
        (b"PK\x03\x04", "'ZIP archive' is not accepted; its name or media type says application/pdf"),
        (WHOLE[: len(WHOLE) // 2], "truncated: %%EOF is missing"),
        (WHOLE[:-10], "truncated: %%EOF is missing"),
        (b"%PDF-1.4\n%%EOF\n", "this PDF file is damaged"),
        (b"%PDF-1.4\n" + b"\0\xff" * 500 + b"%%EOF", "this PDF file is damaged"),
        (encrypted("secret"), "'encrypted PDF document' is not accepted"),
        (written(scan), r"'1 page' is not accepted; there is no text in this PDF; if it is scanned, OCR it first"),
        (written(lambda pdf: None), "no text in this PDF"),
    ],
    ids=["text", "zip", "half", "cut", "empty", "garbage", "encrypted", "scanned", "blank"],
)
def test_what_cannot_be_read_says_why(data, reason):
    with pytest.raises(Unsupported, match=rf"^a\.pdf: .*{reason}"):
        read(data)


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.html"])
def test_no_bytes_are_a_blank_document(name):
    with pytest.raises(InvalidInput, match=rf"^{name}: '0 bytes' is not accepted; a document must not be blank"):
        read(b"", name)


def test_a_pdf_that_only_limits_printing_is_read():
    assert read(encrypted("")) == "Secret.\n"


def test_padding_after_the_end_is_no_damage():
    assert read(WHOLE + b"\0" * 5000) == read(WHOLE)


@pytest.mark.parametrize("step", range(12))
def test_damage_gives_text_or_a_reason(step):
    data = bytearray(WHOLE)
    start = 20 + step * (len(data) - 200) // 12
    data[start : start + 40] = bytes(byte ^ 0x55 for byte in data[start : start + 40])
    try:
        text = read(bytes(data))
    except Unsupported as error:
        text = str(error)
    assert text.strip()


def test_several_threads_read_at_once():
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(read, [WHOLE] * 12))) == 1


def test_what_a_form_holds_ends_its_page():
    def form(pdf: Writer) -> None:
        pdf.write_block("Name and consent")
        fields = pdf.canvas.acroForm
        fields.textfield(name="form[0].name[0]", value="Ng", x=50, y=600)
        fields.textfield(name="t2", tooltip="Street", value="# 5", x=50, y=570)
        fields.textfield(name="t3", tooltip="Empty", value="", x=50, y=540)
        fields.textfield(name="t4", tooltip="Secret", value="hush", x=50, y=510, fieldFlags="password")
        fields.checkbox(name="agreed", checked=True, x=50, y=480)
        fields.checkbox(name="declined", checked=False, x=50, y=450)
        pdf.add_page()
        pdf.write_block("Next page")

    text = read_upload("a.pdf", written(form), max_bytes=MAX).text
    assert text == f"Name and consent\n\nname: Ng\nStreet: # 5\nagreed: Yes{PAGE_END}Next page\n"


def test_a_form_without_other_text_is_text():
    data = written(lambda pdf: pdf.canvas.acroForm.textfield(name="name", value="Ng", x=50, y=600))
    assert read_upload("a.pdf", data, max_bytes=MAX).text == "name: Ng\n"


def test_a_bold_line_alone_above_text_is_a_heading():
    def bold(pdf: Writer) -> None:
        pdf.write_block("Paper", 16)
        for section in ("Methods", "Results", "Not a heading:"):
            pdf.write_block(f"Page head {len(section)}", font="Helvetica-Bold")
            pdf.write_block(section, font="Helvetica-Bold")
            pdf.write_block(BODY * 6)

    headings = re.findall("^#.*", read_upload("a.pdf", written(bold), max_bytes=MAX).text, re.MULTILINE)
    assert headings == ["# Paper", "## Methods", "## Results"]


def test_bold_text_is_no_heading():
    def bold(pdf: Writer) -> None:
        for section in ("Methods", "Results"):
            pdf.write_block(section, font="Helvetica-Bold")
            pdf.write_block("Few words.")

    assert "#" not in read_upload("a.pdf", written(bold), max_bytes=MAX).text
