"""Equations of a Word document as text on one line, the way Word itself writes them in its linear format."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree as ET

# Of the transitional and of the strict format.
_NAMESPACES = (
    "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "http://purl.oclc.org/ooxml/officeDocument/math",
)
_EQUATION = frozenset(f"{{{space}}}oMath" for space in _NAMESPACES)
_PARAGRAPH = frozenset(f"{{{space}}}oMathPara" for space in _NAMESPACES)
_MAX_DEPTH = 100
# Marks the runs that were equations.
_REPLACED = "equation"
# Invisible, between a function and its argument.
_APPLY = "\u2061"


def with_equations(data: bytes) -> bytes:
    """A DOCX file with each equation replaced by a run of text, since its converter leaves equations out.

    The same bytes where there is none. Raises ET.ParseError, zipfile.BadZipFile and the like for damaged files.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [name for name in archive.namelist() if name.startswith("word/") and name.endswith(".xml")]
        changed = {name: _rewritten(xml) for name in parts if b"oMath" in (xml := archive.read(name))}
        if not changed:
            return data
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as copy:
            for entry in archive.infolist():
                copy.writestr(entry.filename, changed.get(entry.filename) or archive.read(entry))
    return file.getvalue()


def _rewritten(xml: bytes) -> bytes:
    root = ET.fromstring(xml)
    space = root.tag.partition("}")[0] + "}"
    for parent in list(root.iter()):
        for index, child in enumerate(parent):
            if child.tag in _EQUATION | _PARAGRAPH:
                equations = [child] if child.tag in _EQUATION else [part for part in child if part.tag in _EQUATION]
                line = "; ".join(_on_one_line(equation) for equation in equations)
                follows_another = index > 0 and parent[index - 1].get(_REPLACED) is not None
                parent[index] = run = ET.Element(f"{space}r", {_REPLACED: ""})
                ET.SubElement(run, f"{space}t").text = f"; {line}" if follows_another else line
    return ET.tostring(root)


def _on_one_line(equation: ET.Element) -> str:
    return " ".join(_linear(equation, 0).replace(f"{_APPLY}(", "(").replace(_APPLY, " ").split())


def _linear(node: ET.Element, depth: int) -> str:
    kind = _kind(node)
    if kind == "r":
        return "".join(part.text or "" for part in node if _kind(part) == "t")
    if depth > _MAX_DEPTH:
        return "".join(node.itertext())
    parts = [(_kind(part), _linear(part, depth + 1)) for part in node if not _kind(part).endswith("Pr")]
    named = dict(parts)
    base = named.get("e", "")
    lower = f"_{_group(named['sub'])}" if named.get("sub") else ""
    upper = f"^{_group(named['sup'])}" if named.get("sup") else ""
    match kind:
        case "f":
            bar = "¦" if _property(node, "type", "bar") == "noBar" else "/"
            return f"{_group(named.get('num', ''))}{bar}{_group(named.get('den', ''))}"
        case "sSub" | "sSup" | "sSubSup":
            return _group(base) + lower + upper
        case "sPre":
            return lower + upper + base
        case "limLow" | "limUpp":
            return f"{base}{'_' if kind == 'limLow' else '^'}{_group(named.get('lim', ''))}"
        case "rad":
            return f"{named.get('deg', '')}√({base})"
        case "nary":
            return f"{_property(node, 'chr', '∫')}{lower}{upper} {base}"
        case "func":
            return f" {named.get('fName', '')}{base if base.startswith('(') else f' {base}'}"
        case "d":
            inner = _property(node, "sepChr", "|").join(text for _, text in parts)
            return f"{_property(node, 'begChr', '(')}{inner}{_property(node, 'endChr', ')')}"
        case "acc":
            return base + _property(node, "chr", "\u0302")
        case "m":
            return f"[{'; '.join(text for _, text in parts)}]"
        case "mr":
            return ", ".join(text for _, text in parts)
        case "eqArr":
            return "; ".join(text for _, text in parts)
    return "".join(text for _, text in parts)


def _kind(node: ET.Element) -> str:
    return node.tag.rpartition("}")[2]


def _group(text: str) -> str:
    text = text.strip()
    return text if len(text) == 1 or text.isalnum() or _is_bracketed(text) else f"({text})"


def _is_bracketed(text: str) -> bool:
    return text.startswith("(") and text.find(")") == len(text) - 1


def _property(node: ET.Element, name: str, default: str) -> str:
    """The character that the properties of `node` name."""
    return next(_values(node, name), default)


def _values(node: ET.Element, name: str) -> Iterator[str]:
    for properties in node:
        if _kind(properties) == f"{_kind(node)}Pr":
            for entry in properties:
                if _kind(entry) == name:
                    yield next((value for key, value in entry.items() if key.rpartition("}")[2] == "val"), "")
