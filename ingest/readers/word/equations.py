"""Equations of a Word document as text on one line, the way Word itself writes them in its linear format."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from ingest.readers.word.xml import kind

# Of the transitional and of the strict format.
_NAMESPACES = (
    "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "http://purl.oclc.org/ooxml/officeDocument/math",
)
_EQUATION = frozenset(f"{{{space}}}oMath" for space in _NAMESPACES)
_PARAGRAPH = frozenset(f"{{{space}}}oMathPara" for space in _NAMESPACES)
_MAX_DEPTH = 100
# Invisible, between a function and its argument.
_APPLY = "\u2061"


def is_equation(node: ET.Element) -> bool:
    """Whether `node` is an equation, or a paragraph of equations."""
    return node.tag in _EQUATION or node.tag in _PARAGRAPH


def equation_run(node: ET.Element, space: str, follows_another: bool) -> ET.Element:
    """A run of text, in the namespace `space`, in the place of `node`, since its converter leaves equations out."""
    equations = [node] if node.tag in _EQUATION else [part for part in node if part.tag in _EQUATION]
    line = "; ".join(_on_one_line(equation) for equation in equations)
    run = ET.Element(f"{space}r", {"done": "1"})
    ET.SubElement(run, f"{space}t").text = f"; {line}" if follows_another else line
    return run


def _on_one_line(equation: ET.Element) -> str:
    return " ".join(_linear(equation, 0).replace(f"{_APPLY}(", "(").replace(_APPLY, " ").split())


def _linear(node: ET.Element, depth: int) -> str:
    name = kind(node)
    if name == "r":
        return "".join(part.text or "" for part in node if kind(part) == "t")
    if depth > _MAX_DEPTH:
        return "".join(node.itertext())
    parts = [(kind(part), _linear(part, depth + 1)) for part in node if not kind(part).endswith("Pr")]
    named = dict(parts)
    base = named.get("e", "")
    lower = f"_{_group(named['sub'])}" if named.get("sub") else ""
    upper = f"^{_group(named['sup'])}" if named.get("sup") else ""
    match name:
        case "f":
            bar = "¦" if _property(node, "type", "bar") == "noBar" else "/"
            return f"{_group(named.get('num', ''))}{bar}{_group(named.get('den', ''))}"
        case "sSub" | "sSup" | "sSubSup":
            return _group(base) + lower + upper
        case "sPre":
            return lower + upper + base
        case "limLow" | "limUpp":
            return f"{base}{'_' if name == 'limLow' else '^'}{_group(named.get('lim', ''))}"
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
        if kind(properties) == f"{kind(node)}Pr":
            for entry in properties:
                if kind(entry) == name:
                    yield next((value for key, value in entry.items() if key.rpartition("}")[2] == "val"), "")
