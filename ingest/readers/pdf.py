"""PDF: the text layer of its pages, with paragraphs by spacing and headings by size."""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median

import pypdfium2
from pypdfium2 import raw

from ingest.errors import Unsupported
from ingest.readers.pdf_forms import filled_in

# Between two pages of the stored text. White space, so that it is no text and shows as a line.
PAGE_END = "\n\f\n"

# On each form of an older kind the library warns that it cannot do what is not wanted here.
logging.getLogger("pypdfium2").setLevel(logging.ERROR)

# PDFium keeps global state: one call at a time in the process.
_LOCK = threading.Lock()

_END_MARK = b"%%EOF"
# Acrobat looks for the end mark in this many last bytes.
_END_WITHIN = 1024
_LARGER = 1.15
_MAX_HEADING = 120
_PARAGRAPH_GAP = 1.3
_BOLD = 600
_BOLD_NAME = re.compile(rb"bold|black|heavy|CMBX", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
# A document with more of it in bold does not use it for headings.
_MOST_BOLD = 0.25
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
# What PDFium puts for a hyphen that only breaks a word between two lines.
_SOFT_HYPHEN = re.compile("[\x02\ufffe\xad](?:\r?\n)?")


@dataclass
class _Line:
    text: str
    # Points.
    size: float
    bottom: float
    bold: bool


@dataclass
class _Page:
    lines: list[_Line]
    # What forms and text boxes hold.
    filled: list[str]
    # In place of text.
    note: str = ""


def read_pdf(name: str, data: bytes, warnings: list[str]) -> str:
    """The text of each page, pages apart by a form feed.

    A blank line parts paragraphs. A line in larger type than most of the document is written as a heading of
    Markdown, larger being higher; the lowest are bold lines alone above text. What form fields and text boxes hold
    ends their page. A page that shows an image and has no text says so in its place, and is in `warnings`. Raises
    Unsupported, saying why, for a file that is encrypted, truncated, damaged, no PDF, or has no text at all.
    """
    check_pdf_start(name, data)
    if _END_MARK not in data.rstrip(b"\0\r\n \t")[-_END_WITHIN:]:
        raise Unsupported(name, f"{len(data)} bytes", "this PDF file is truncated: %%EOF is missing at its end")
    with _LOCK:
        pages = _pages(name, data)
    if not any(page.lines or page.filled for page in pages):
        count = f"{len(pages)} page{'s' * (len(pages) != 1)}"
        raise Unsupported(name, count, "there is no text in this PDF; if it is scanned, OCR it first")
    unread = [str(number) for number, page in enumerate(pages, 1) if page.note]
    if unread:
        warnings.append(f"page{'s' * (len(unread) > 1)} {', '.join(unread)}: an image without text, perhaps scanned")
    lines = [line for page in pages for line in page.lines]
    levels = _levels(lines)
    _forget_running_heads(lines)
    bold = _bold_level(lines, levels)
    texts = ("\n\n".join(filter(None, [_text(p.lines, levels, bold) or p.note, _filled(p.filled)])) for p in pages)
    return PAGE_END.join(texts) + "\n"


def check_pdf_start(name: str, data: bytes) -> None:
    """Raise Unsupported unless `data`, the start of a file or all of it, starts as a PDF does."""
    if b"%PDF-" not in data[:_END_WITHIN]:
        raise Unsupported(name, data[:8], "this is not a PDF document (application/pdf): its first bytes are not %PDF-")


def _pages(name: str, data: bytes) -> list[_Page]:
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unsupported(name, "encrypted PDF document", "save it without its password first") from error
        raise Unsupported(name, f"{len(data)} bytes", f"this PDF file is damaged: {error}") from error
    number = 0
    try:
        document.init_forms()
        pages: list[_Page] = []
        for number in range(1, len(document) + 1):
            page = document[number - 1]
            lines = _lines(page.get_textpage())
            shows_image = not lines and any(page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE]))
            note = f"[Page {number} is an image without text.]" if shows_image else ""
            pages.append(_Page(lines, filled_in(page), note))
            page.close()
        return pages
    except pypdfium2.PdfiumError as error:
        raise Unsupported(name, f"page {number}", f"this page of the PDF file is damaged: {error}") from error
    finally:
        document.close()


def _lines(page: pypdfium2.PdfTextPage) -> list[_Line]:
    text = page.get_text_range() if page.count_chars() else ""
    # Where text beyond 16 bits makes the two counts differ, a line is measured a few characters off.
    last = page.count_chars() - 1
    lines: list[_Line] = []
    for found in re.finditer(r"[^\r\n]+", _SOFT_HYPHEN.sub(lambda hyphen: "\ufffe" * len(hyphen[0]), text)):
        line = _CONTROLS.sub("", found[0].replace("\ufffe", "")).strip()
        if line:
            inked = [index for index in range(found.start(), found.end()) if not text[index].isspace()]
            picked = {min(index, last) for index in (inked[0], inked[len(inked) // 2], inked[-1])}
            boxes = [page.get_charbox(index, loose=True) for index in picked]
            # The size that the font is said to have ignores how the page scales it.
            size = round(2 * median(top - bottom for _, bottom, _, top in boxes)) / 2
            lines.append(_Line(line, size, boxes[0][1], bold=all(_is_bold(page, index) for index in picked)))
    return lines


def _is_bold(page: pypdfium2.PdfTextPage, index: int) -> bool:
    name = ctypes.create_string_buffer(128)
    raw.FPDFText_GetFontInfo(page, index, name, len(name), None)
    # Many fonts state no weight.
    return raw.FPDFText_GetFontWeight(page, index) >= _BOLD or _BOLD_NAME.search(name.value) is not None


def _levels(lines: list[_Line]) -> dict[float, int]:
    """The heading level of each size of type that is larger than that of most of the text."""
    characters: Counter[float] = Counter()
    for line in lines:
        characters[line.size] += len(line.text)
    body = max(characters, key=characters.__getitem__, default=0.0)
    sizes = sorted({line.size for line in lines if _can_head(line) and line.size >= body * _LARGER}, reverse=True)
    return {size: min(level, 6) for level, size in enumerate(sizes, 1)}


def _can_head(line: _Line) -> bool:
    return len(line.text) <= _MAX_HEADING and sum(character.isalpha() for character in line.text) > 1


def _forget_running_heads(lines: list[_Line]) -> None:
    """What is bold more than once, whatever its numbers, is the head of pages or of a table's columns."""
    times = Counter(_DIGITS.sub("", line.text) for line in lines if line.bold)
    for line in lines:
        line.bold = line.bold and times[_DIGITS.sub("", line.text)] == 1


def _bold_level(lines: list[_Line], levels: dict[float, int]) -> int | None:
    """The heading level of bold lines in the size of the text, if there are headings among them."""
    bold = sum(len(line.text) for line in lines if line.bold)
    return min(len(levels) + 1, 6) if bold <= _MOST_BOLD * sum(len(line.text) for line in lines) else None


def _text(lines: list[_Line], levels: dict[float, int], bold_level: int | None) -> str:
    drops = [a.bottom - b.bottom for a, b in pairwise(lines) if a.size == b.size and a.bottom > b.bottom]
    pitch = median(drops) if drops else 0.0
    written: list[str] = []
    last: _Line | None = None
    follows_heading = False
    for line, next_ in zip_longest(lines, lines[1:]):
        level = levels.get(line.size) if _can_head(line) else None
        drop = last.bottom - line.bottom if last is not None else 0.0
        apart = last is None or follows_heading or not 0 <= drop <= _PARAGRAPH_GAP * max(pitch, line.size)
        if level is None and apart and _heads(line, next_):
            level = bold_level
        if level is not None:
            goes_on = last is not None and last.size == line.size and follows_heading and 0 <= drop < 2 * line.size
            if goes_on and line.size in levels:
                written[-1] += f" {line.text}"
            else:
                written += ["", f"{'#' * level} {line.text}"]
        else:
            written += [""] * apart + [_not_heading(line.text)]
        follows_heading = level is not None
        last = line
    return "\n".join(written).strip()


def _heads(line: _Line, next_: _Line | None) -> bool:
    """Whether it is a bold line alone above text."""
    stands = line.bold and _can_head(line) and line.text[0].isalnum() and line.text[-1] not in ".,;:"
    return stands and next_ is not None and not next_.bold and next_.bottom < line.bottom


def _filled(lines: list[str]) -> str:
    return "\n".join(_not_heading(_CONTROLS.sub("", line)) for line in lines)


def _not_heading(line: str) -> str:
    return re.sub(r"^(?=#{1,6}\s)", r"\\", line)
