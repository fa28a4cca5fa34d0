"""What is drawn in a Word document and says something: text boxes, SmartArt, charts."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree as ET

from ingest.readers.word.xml import RELATIONSHIPS, Package, child, kind, text_of, value, within

# A chart with more points is a curve, of which nobody reads the numbers.
_MAX_POINTS = 500


class Drawings:
    """Turns drawings of one part into text. left_out: what of them says something that is not read, counted."""

    def __init__(self, package: Package, targets: dict[str, str], space: str, left_out: Counter[str]) -> None:
        self._package = package
        self._targets = targets
        self._space = space
        self._left_out = left_out

    def written(self, drawing: ET.Element) -> list[ET.Element] | None:
        """Paragraphs and tables for what `drawing` says; None for a picture, which its converter reads."""
        boxes = [inner for box in within(drawing, "txbxContent") for inner in box]
        if boxes:
            return boxes
        diagram = next(within(drawing, "relIds"), None)
        if diagram is not None:
            return self._diagram(diagram)
        kinds = [value(data, "uri") or "" for data in within(drawing, "graphicData")]
        if any(uri.endswith(("/chart", "/chartex")) for uri in kinds):
            return self._chart(next(within(drawing, "chart"), None))
        alone = any(child(inner, "graphic", "graphicData", "pic") is not None for inner in drawing)
        return None if alone or next(within(drawing, "pic"), None) is None else self._described(drawing)

    def _diagram(self, reference: ET.Element) -> list[ET.Element]:
        part = self._part(reference, "dm")
        if part is None:
            self._left_out["SmartArt drawing"] += 1
            return []
        points = [text_of(point) for points in within(part, "ptLst") for point in points]
        return [self._paragraph(point) for point in points if point.strip()]

    def _chart(self, reference: ET.Element | None) -> list[ET.Element]:
        part = None if reference is None else self._part(reference, "id")
        if part is None:
            self._left_out["chart"] += 1
            return []
        title = child(part, "chart", "title")
        axes = [text_of(name) for name in within(part, "title") if name is not title]
        lines = [self._paragraph(line) for line in ["" if title is None else text_of(title), *axes] if line.strip()]
        table = self._table([*within(part, "ser")])
        return [*lines, table] if table is not None else lines

    def _table(self, series: list[ET.Element]) -> ET.Element | None:
        """A row for each category, with a column for each series."""
        names: list[str] = []
        columns: list[dict[int, str]] = []
        categories: dict[int, str] = {}
        for number, one in enumerate(series, 1):
            points = _points(one, "val") or _points(one, "yVal")
            categories |= _points(one, "cat") or _points(one, "xVal")
            label = child(one, "tx")
            names.append(("" if label is None else text_of(label, "v")) or f"Series {number}")
            columns.append(points)
        rows = sorted({index for points in columns for index in points})
        if not rows:
            return None
        if len(rows) > _MAX_POINTS:
            self._left_out[f"chart's points beyond {_MAX_POINTS}"] += len(rows) - _MAX_POINTS
        cells = [["", *names]]
        cells += [
            [categories.get(index, str(index + 1)), *(points.get(index, "") for points in columns)]
            for index in rows[:_MAX_POINTS]
        ]
        table = ET.Element(f"{self._space}tbl")
        for row in cells:
            line = ET.SubElement(table, f"{self._space}tr")
            for text in row:
                ET.SubElement(line, f"{self._space}tc").append(self._paragraph(text))
        return table

    def _described(self, drawing: ET.Element) -> list[ET.Element]:
        """Pictures in a group, which are not looked into: the description of the group."""
        texts = dict.fromkeys(value(named, "descr") or "" for named in within(drawing, "docPr"))
        texts |= dict.fromkeys(value(named, "descr") or "" for named in within(drawing, "cNvPr"))
        found = [self._paragraph(text) for text in texts if text.strip()]
        if not found:
            self._left_out["picture without a description"] += 1
        return found

    def _part(self, reference: ET.Element, name: str) -> ET.Element | None:
        ids = (reference.get(f"{space}{name}") for space in RELATIONSHIPS)
        return self._package.xml(self._targets.get(next(filter(None, ids), ""), ""))

    def _paragraph(self, text: str) -> ET.Element:
        paragraph = ET.Element(f"{self._space}p")
        run = ET.SubElement(paragraph, f"{self._space}r")
        ET.SubElement(run, f"{self._space}t").text = text
        return paragraph


def _points(series: ET.Element, name: str) -> dict[int, str]:
    """The cached values of a series, or its categories, by their place."""
    values = child(series, name)
    if values is None:
        return {}
    points = {}
    for point in within(values, "pt"):
        index, text = value(point, "idx") or "", text_of(point, "v")
        if index.isdigit() and kind(point) == "pt":
            points[int(index)] = text
    return points
