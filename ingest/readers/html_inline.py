"""What stands in a line of HTML: marks around text, links, raised figures, boxes, and what is not seen at all."""

from __future__ import annotations

import re

from selectolax.lexbor import LexborNode

BLOCKS = frozenset((
    "address", "article", "aside", "body", "caption", "center", "dd", "details", "dialog", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "hr", "legend", "main", "nav", "p",
    "search", "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr",
))  # fmt: skip
HEADINGS = {f"h{level}": level for level in range(1, 7)}

_UNSEEN = frozenset((
    "-comment", "audio", "canvas", "datalist", "head", "iframe", "noframes", "object", "rp", "rt", "script", "select",
    "style", "svg", "template", "textarea", "video",
))  # fmt: skip
# What a page unfolds when somebody asks for it.
_UNFOLDS = frozenset({"tabpanel", "region"})
# The same equation once more, drawn by KaTeX or as Wikipedia's picture.
_DRAWN = re.compile(r"\b(?:katex-html|mwe-math-fallback-image-\w+)\b")
# The marks with which generators of documentation link a heading to itself, and Word's notes to their place.
_ANCHORS = frozenset({"¶", "#", "§", "↑", "↩", "↩︎", "🔗", "\uf0c1"})
_CODE = frozenset({"code", "kbd", "samp", "tt"})
_STRUCK = frozenset({"s", "strike", "del"})
_STRUCK_BY_STYLE = re.compile(r"text-decoration[\w-]*\s*:[^;]*line-through")
_BLOCK_WITHIN = ", ".join([*sorted(BLOCKS | HEADINGS.keys()), "li", "blockquote", "pre"])

_ADDRESS = re.compile(r"(?:https?|ftp|mailto):\S", re.IGNORECASE)
# Longer ones say where somebody came from, not where the link leads.
_MAX_ADDRESS = 300
_MENUS = frozenset({"nav", "footer", "menu"})
_LOOKED_ABOVE = 12

# Raised letters that change no value: ordinals, trade marks.
_ORDINAL = re.compile(r"[^\W\d_]{2,}|[aeoº*†‡]|[^\w+\u2212-]+")
_PLAIN = re.compile(r"[+\u2212-]?[\w.,]+|[+\u2212-]+")


def is_unseen(node: LexborNode) -> bool:
    """Whether a reader of the page sees nothing of `node`. What tabs and folds hide is seen on request."""
    tag, attributes = node.tag or "", node.attributes
    if tag in _UNSEEN or tag.startswith(("-", "!")):
        return tag != "-text"
    if "hidden" in attributes:
        unfolds = attributes.get("hidden") == "until-found" or attributes.get("role") in _UNFOLDS
        if not unfolds:
            return True
    if tag in ("span", "img") and _DRAWN.search(attributes.get("class") or ""):
        return True
    if tag == "a":
        return node.text().strip() in _ANCHORS
    # What strikes out whole paragraphs cannot be marked in a line.
    return _is_struck(node) and node.css_first(_BLOCK_WITHIN) is not None


def replaced(node: LexborNode) -> str | None:
    """The text that stands for `node` and all in it: of a picture, a box, an equation. None for other elements."""
    if node.tag == "img":
        return f" {node.attributes.get('alt') or ''} "
    if node.tag == "input":
        return _box(node)
    return _equation(node) if node.tag == "math" else None


def opening(node: LexborNode) -> str:
    """What to write before what is in `node`."""
    tag = node.tag or ""
    if tag == "a":
        return "[" if _address(node) else ""
    if tag in ("sup", "sub"):
        return _raised(node)[0]
    return _mark(node)


def closing(node: LexborNode) -> str:
    """What to write after what is in `node`."""
    tag = node.tag or ""
    if tag == "a":
        address = _address(node)
        return f"]({address})" if address else ""
    if tag in ("sup", "sub"):
        return _raised(node)[1]
    return _mark(node)


def inline_text(root: LexborNode) -> str:
    """All that is in `root` on one line, as in a cell of a table."""
    texts: list[str] = []
    waiting = [(root, False)]
    while waiting:
        node, is_done = waiting.pop()
        tag = node.tag or ""
        if is_done:
            texts.append(closing(node))
        elif tag == "-text":
            texts.append(node.text_content or "")
        elif (text := replaced(node)) is not None:
            texts.append(text)
        elif not is_unseen(node):
            if tag == "li":
                texts.append(" • ")
            elif tag in BLOCKS or tag == "br":
                texts.append(" ")
            elif node is not root:
                texts.append(opening(node))
                waiting.append((node, True))
            waiting += [(child, False) for child in reversed(list(node.iter(include_text=True)))]
    return "".join(texts)


def _mark(node: LexborNode) -> str:
    tag = node.tag or ""
    if tag == "q":
        return '"'
    if (tag in _CODE or _is_struck(node)) and node.text().strip():
        return "`" if tag in _CODE else "~~"
    return ""


def _is_struck(node: LexborNode) -> bool:
    if node.tag in _STRUCK:
        return True
    return node.tag == "span" and _STRUCK_BY_STYLE.search(node.attributes.get("style") or "") is not None


def _address(link: LexborNode) -> str:
    """Where a link leads, if a reader would want to know: not in menus or code, and not where its text says it."""
    address = (link.attributes.get("href") or "").strip()
    if not _ADDRESS.match(address) or len(address) > _MAX_ADDRESS:
        return ""
    text = link.text().strip()
    bare = re.sub(r"^(?:\w+:(?://)?)", "", address).rstrip("/")
    if not text or bare in text or link.css_first(_BLOCK_WITHIN) is not None:
        return ""
    above = link.parent
    for _ in range(_LOOKED_ABOVE):
        if above is None:
            break
        if above.tag in _MENUS or above.tag in _CODE or above.attributes.get("role") == "navigation":
            return ""
        above = above.parent
    address = re.sub(r"[\s|<>]", lambda found: f"%{ord(found[0]) & 0xFF:02X}", address)
    return f"<{address}>" if "(" in address or ")" in address else address


def _raised(node: LexborNode) -> tuple[str, str]:
    """The marks around what is raised or lowered: without, 10⁶ would be 106, and log₂8 log28."""
    text = node.text().strip()
    if not text or text.startswith("["):
        return "", ""
    if node.tag == "sub":
        before, after = _text_beside(node.prev)[-1:], _text_beside(node.next)[:1]
        # As in CO₂.
        if text.isdigit() and not before.isdigit() and not after.isdigit():
            return "", ""
        return ("_", " " if after.isdigit() else "") if _PLAIN.fullmatch(text) else ("_(", ")")
    if node.css_first("a[href^='#']") is not None:
        return "[", "]"
    if _ORDINAL.fullmatch(text):
        return "", ""
    return ("^", "") if _PLAIN.fullmatch(text) else ("^(", ")")


def _text_beside(node: LexborNode | None) -> str:
    return (node.text_content or "") if node is not None and node.tag == "-text" else ""


def _equation(math: LexborNode) -> str:
    """As its author wrote it, mostly in TeX; else its symbols."""
    source = math.css_first("annotation[encoding*='tex'], annotation[encoding*='TeX']")
    text = source.text() if source is not None else math.attributes.get("alttext") or math.text(separator=" ")
    return f" {text.strip()} "


def _box(field: LexborNode) -> str:
    """A box that is ticked or not, of a task list or of a Word document. Those that are sent have a name or id."""
    attributes = field.attributes
    if (attributes.get("type") or "").lower() != "checkbox" or attributes.get("name") or attributes.get("id"):
        return ""
    return " ☒ " if "checked" in attributes else " ☐ "
