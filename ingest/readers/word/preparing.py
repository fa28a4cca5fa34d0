"""A Word document with everything that its converter leaves out rewritten as what it reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from xml.etree import ElementTree as ET

import msgspec

from ingest.readers.word.drawings import Drawings
from ingest.readers.word.equations import equation_run, is_equation
from ingest.readers.word.numbers import STYLE, Numbers, as_bullets
from ingest.readers.word.xml import RELATIONSHIPS, Package, child, kind, space, text_of, value, within

_NOTES = ("word/footnotes.xml", "word/endnotes.xml")
_NUMBERING, _STYLES, _COMMENTS = "word/numbering.xml", "word/styles.xml", "word/comments.xml"
# What the converter looks into. Of anything else with text in it, the text is put in its place.
_READ = frozenset((
    "AlternateContent", "Fallback", "body", "customXml", "document", "drawing", "endnote", "endnotes", "footnote",
    "footnotes", "group", "hyperlink", "ins", "moveTo", "object", "p", "pict", "r", "rect", "roundrect", "sdt",
    "sdtContent", "shape", "smartTag", "t", "tbl", "tc", "textbox", "tr", "txbxContent",
))  # fmt: skip
# What nobody who reads the document sees: what was deleted or moved away, and settings.
_UNSEEN = frozenset((
    "Choice", "del", "moveFrom", "pPr", "rPr", "rt", "rubyPr", "sdtEndPr", "sdtPr", "sectPr", "tblPr", "tcPr", "trPr",
))  # fmt: skip
_BREAKS = re.compile(r"[\n\r\t]")


class Prepared(msgspec.Struct, frozen=True):
    """data: the document for its converter. chunks: the parts to put in the place of their `chunk_mark`."""

    data: bytes
    chunks: list[str]


def chunk_mark(number: int) -> str:
    """The text of a paragraph in whose place a part is to be put."""
    return f"\ue000chunk {number}\ue000"


def prepared(package: Package, warnings: list[str]) -> Prepared:
    """The document with fields, ruby, SmartArt, charts, equations and numbers of lists as text, and with what is struck
    out by its style struck out itself. `warnings` are told what is still left out.

    Raises ET.ParseError, zipfile.BadZipFile and the like for damaged files.
    """
    left_out: Counter[str] = Counter()
    chunks: list[str] = []
    changed: dict[str, ET.Element] = {}
    numbering, styles = package.xml(_NUMBERING), package.xml(_STYLES)
    numbers = Numbers(numbering, styles)
    marked = _marked_styles(styles)
    # The body first: its lists count, those of notes go on.
    for name in (package.main, *_NOTES):
        root = None if name is None else package.xml(name)
        if name is None or root is None:
            continue
        targets = package.targets(name)
        rewriter = _Rewriter(Drawings(package, targets, space(root), left_out), targets, chunks, left_out, space(root))
        rewriter.rewrite(root)
        _mark_runs(root, marked)
        _write_numbers(root, numbers)
        changed[name] = root
    if numbering is not None:
        as_bullets(numbering)
        changed[_NUMBERING] = numbering
    comments = package.xml(_COMMENTS)
    if comments is not None:
        left_out["comment"] += sum(bool(text_of(comment).strip()) for comment in comments)
    warnings += (f"{count} {_plural(what, count)}" for what, count in left_out.items() if count)
    return Prepared(package.copy(changed), chunks)


def _plural(what: str, count: int) -> str:
    first, *rest = what.split(" ", 1)
    return what if count == 1 or first.endswith(("s", "'s")) else " ".join([f"{first}s", *rest])


class _Rewriter:
    def __init__(
        self, drawings: Drawings, targets: dict[str, str], chunks: list[str], left_out: Counter[str], space: str
    ) -> None:
        self._drawings = drawings
        self._targets = targets
        self._chunks = chunks
        self._left_out = left_out
        self._space = space

    def rewrite(self, root: ET.Element) -> None:
        """Rewrite what is in `root`. Not by recursion: documents made to harm nest deeper than Python's stack."""
        waiting = [root]
        while waiting:
            parent = waiting.pop()
            children: list[ET.Element] = []
            pending = list(reversed(parent))
            while pending:
                node = pending.pop()
                instead = self._instead(node, children)
                if instead is None:
                    children.append(node)
                    waiting.append(node)
                else:
                    pending += reversed(instead)
            parent[:] = children

    def _instead(self, node: ET.Element, before: list[ET.Element]) -> list[ET.Element] | None:
        """What to read in the place of `node`, to be looked at in turn; None to keep it."""
        name = kind(node)
        if name in ("t", "r") and node.get("done"):
            return None
        if is_equation(node):
            follows_another = bool(before) and before[-1].get("done") is not None
            return [equation_run(node, self._space, follows_another)]
        if name == "altChunk":
            return [self._chunk(node)]
        if name == "AlternateContent":
            # Word's own form of a drawing, unless an older one says as much.
            choice, fallback = child(node, "Choice"), child(node, "Fallback")
            if fallback is not None and (choice is None or _has_text(fallback) or not _has_text(choice)):
                drawn = None if choice is None else self._drawn(choice, told=True)
                return [drawn] if drawn is not None else list(fallback)
            return [] if choice is None else list(choice)
        if name == "drawing":
            drawn = self._drawn(node)
            return None if drawn is None else [drawn]
        if name == "OLEObject":
            self._left_out[f"embedded object ({value(node, 'ProgID') or 'unknown'})"] += 1
            return []
        if name == "ruby":
            base = child(node, "rubyBase")
            return [] if base is None else list(base)
        if name in _READ or name in _UNSEEN or not _has_text(node):
            return None
        return list(node)

    def _drawn(self, drawing: ET.Element, told: bool = False) -> ET.Element | None:
        if told and not any(value(data, "uri") for data in within(drawing, "graphicData")):
            return None
        written = self._drawings.written(drawing)
        if written is None or (told and not written):
            return None
        # As an older drawing: what is in it goes behind its paragraph.
        picture = ET.Element(f"{self._space}pict")
        box = ET.SubElement(picture, f"{self._space}txbxContent")
        box.extend(written)
        return picture

    def _chunk(self, node: ET.Element) -> ET.Element:
        ids = (node.get(f"{namespace}id") for namespace in RELATIONSHIPS)
        paragraph = ET.Element(f"{self._space}p")
        run = ET.SubElement(paragraph, f"{self._space}r", {"done": "1"})
        ET.SubElement(run, f"{self._space}t").text = chunk_mark(len(self._chunks))
        self._chunks.append(self._targets.get(next(filter(None, ids), ""), ""))
        return paragraph


def _has_text(node: ET.Element) -> bool:
    return any(kind(inner) in ("t", "drawing", "oMath") for inner in node.iter())


def _marked_styles(styles: ET.Element | None) -> dict[str, list[ET.Element]]:
    """Styles of characters that strike out, raise or lower what is in them, with the properties that do it."""
    marked: dict[str, list[ET.Element]] = {}
    for style in styles if styles is not None else ():
        properties = child(style, "rPr")
        found = [mark for mark in properties or () if kind(mark) in ("strike", "dstrike", "vertAlign")]
        if found and value(style, "type") == "character":
            marked[value(style, "styleId") or ""] = found
    return marked


def _mark_runs(root: ET.Element, marked: dict[str, list[ET.Element]]) -> None:
    """Have each run say itself what its style says, and that it is struck out however often."""
    for properties in within(root, "rPr"):
        style = child(properties, "rStyle")
        known = {kind(mark) for mark in properties}
        for mark in [] if style is None else marked.get(value(style) or "", []):
            if kind(mark) not in known:
                properties.append(mark)
        for mark in list(properties):
            if kind(mark) == "dstrike":
                properties.append(ET.Element(f"{space(mark)}strike", mark.attrib))


def _write_numbers(root: ET.Element, numbers: Numbers) -> None:
    for paragraph in within(root, "p"):
        if paragraph.tag != f"{space(root)}p":
            continue
        label = numbers.label(paragraph)
        if label is None or not text_of(paragraph).strip():
            continue
        namespace = space(paragraph)
        run = ET.Element(f"{namespace}r")
        style = ET.SubElement(ET.SubElement(run, f"{namespace}rPr"), f"{namespace}rStyle")
        style.set(f"{namespace}val", STYLE)
        ET.SubElement(run, f"{namespace}t").text = _BREAKS.sub(" ", label)
        paragraph.insert(1 if child(paragraph, "pPr") is not None else 0, run)


def unread(messages: Iterable[str]) -> Iterable[str]:
    """What the converter itself says that it left out."""
    signs = sum("w:sym element" in message for message in messages)
    return [f"{signs} sign{'s' * (signs > 1)} of a font that is not known"] if signs else []
