"""HTML to Markdown: the text a reader of the page sees, with its headings, lists, tables and code."""

from __future__ import annotations

import re
from collections import Counter

from selectolax.lexbor import LexborHTMLParser, LexborNode

from ingest.errors import Unsupported
from ingest.readers.markdown_writer import MarkdownWriter

MAX_DEPTH = 5000

_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
# Elements that hold nothing, or that the next of their kind closes.
_SHALLOW = frozenset((
    "area", "base", "body", "br", "col", "dd", "dt", "embed", "head", "hr", "html", "img", "input", "li", "link",
    "meta", "option", "p", "param", "source", "tbody", "td", "tfoot", "th", "thead", "tr", "track", "wbr",
))  # fmt: skip
_UNSEEN = frozenset((
    "-comment", "audio", "canvas", "datalist", "head", "iframe", "math", "noframes", "object", "script", "select",
    "style", "svg", "template", "textarea", "video",
))  # fmt: skip
_BLOCKS = frozenset((
    "address", "article", "aside", "body", "caption", "center", "details", "dialog", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "footer", "form", "header", "hgroup", "hr", "legend", "main", "nav", "p", "search",
    "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr",
))  # fmt: skip
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CODE = frozenset({"code", "kbd", "samp", "tt"})
# What a table for layout holds, and one of data does not. Lists are in both, and so is a single row or column; long
# cells then tell the first.
_LAYOUT = frozenset({"dl", "pre", "table", *_HEADINGS})
_LISTS = frozenset({"blockquote", "ol", "ul"})
_MAX_DATA_CELL = 500
# Generators write colspan="100" for "as many as there are".
_MAX_SPAN = 100
# The marks with which generators of documentation link a heading to itself, and Word's notes to their place.
_ANCHORS = frozenset({"¶", "#", "§", "↑", "↩", "↩︎", "🔗", "\uf0c1"})
_LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight|sourceCode)[- ]([\w+#-]+)")


def read_html(name: str, html: str) -> str:
    """The text of a page as Markdown. Scripts, styles, form fields and what is embedded are left out; so is what
    is around the one `main` element of a page that has one, such as menus.

    Links are their text and images their alternative text. The page's title is its first heading where it has
    no other of the first level. Raises Unsupported for text without a tag, and for more than 5,000 elements
    within each other.
    """
    depth = _deepest(html)
    if depth == 0:
        raise Unsupported(name, html.strip(), "this is not HTML: there is no tag in it")
    # The standard's own algorithm is quadratic in depth: 200,000 <div> take Lexbor minutes.
    if depth > MAX_DEPTH:
        raise Unsupported(name, f"{depth} elements within each other", f"the limit is {MAX_DEPTH}")
    parser = LexborHTMLParser(html)
    writer = MarkdownWriter()
    mains = [main for main in parser.css("main, [role=main]") if main.text().strip()]
    body = mains[0] if len(mains) == 1 else parser.body
    title = parser.css_first("title")
    if title is not None and (body is None or body.css_first("h1") is None):
        writer.text(title.text())
        writer.end_heading(1)
    if body is not None:
        _write(body, writer)
    return writer.result()


def _deepest(html: str) -> int:
    depth = deepest = 0
    for tag in _TAG.finditer(html):
        if tag[1]:
            depth = max(0, depth - 1)
        elif tag[2].lower() not in _SHALLOW:
            depth += 1
        deepest = max(deepest, depth, 1)
    return deepest


def _write(root: LexborNode, writer: MarkdownWriter) -> None:
    # Not by recursion: pages nest deeper than Python's stack.
    waiting = [(root, False)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            _leave(node, writer)
        elif _enter(node, writer):
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(list(node.iter(include_text=True)))]


def _enter(node: LexborNode, writer: MarkdownWriter) -> bool:
    """Write what comes before the children of `node`; False when these are not to be visited."""
    tag = node.tag or ""
    if tag == "-text":
        writer.text(node.text_content or "")
        return False
    if _is_unseen(node):
        return False
    if tag == "br":
        writer.line_end()
    elif tag == "img":
        writer.text(f" {node.attributes.get('alt') or ''} ")
    elif tag == "input":
        writer.text(_box(node))
    elif tag == "pre":
        writer.code(_preformatted(node), _language(node))
        return False
    elif tag == "table" and not _is_layout(node):
        for caption in node.css("caption"):
            writer.paragraph(_cell(caption))
        writer.table(_rows(node))
        return False
    elif tag in _HEADINGS or tag in _BLOCKS:
        writer.flush()
    elif tag in ("ul", "ol", "menu"):
        writer.open_list(_first_number(node) if tag == "ol" else None)
    elif tag == "li":
        writer.open_item()
    elif tag == "blockquote":
        writer.open_quote()
    elif tag in _CODE and node.text().strip():
        writer.text("`")
    return True


def _leave(node: LexborNode, writer: MarkdownWriter) -> None:
    tag = node.tag or ""
    if tag in _HEADINGS:
        writer.end_heading(_HEADINGS[tag])
    elif tag in _BLOCKS:
        writer.flush()
    elif tag in ("ul", "ol", "menu"):
        writer.close_list()
    elif tag in ("li", "blockquote"):
        writer.close_container()
    elif tag in _CODE and node.text().strip():
        writer.text("`")


def _is_unseen(node: LexborNode) -> bool:
    tag = node.tag or ""
    if tag in _UNSEEN or tag.startswith(("-", "!")) or "hidden" in node.attributes:
        return True
    return tag == "a" and node.text().strip() in _ANCHORS


def _is_layout(table: LexborNode) -> bool:
    inner = table.traverse()
    next(inner)
    tags = {node.tag for node in inner}
    if tags & _LAYOUT:
        return True
    rows = _rows(table)
    is_grid = len(rows) > 1 and max(map(len, rows)) > 1
    has_lists = not tags.isdisjoint(_LISTS)
    if is_grid != has_lists:
        return has_lists
    return any(len(cell) > _MAX_DATA_CELL for row in rows for cell in row)


def _rows(table: LexborNode) -> list[list[str]]:
    """The text of each cell; where one spans others, these are blank."""
    rows: list[list[str]] = []
    # How many more rows a cell above takes of a column.
    taken: Counter[int] = Counter()
    for row in table.css("tr"):
        texts: list[str] = []
        for cell in row.iter():
            if cell.tag in ("td", "th"):
                while taken[len(texts)]:
                    taken[len(texts)] -= 1
                    texts.append("")
                # Beyond so many columns spans would only cost time.
                width = _span(cell, "colspan") if len(texts) < _MAX_SPAN else 1
                height = _span(cell, "rowspan") if len(texts) < _MAX_SPAN else 1
                for column in range(len(texts), len(texts) + width):
                    taken[column] = height - 1
                texts += [_cell(cell), *[""] * (width - 1)]
        for column in [column for column in taken if column >= len(texts)]:
            taken[column] = max(0, taken[column] - 1)
        while texts and not texts[-1].strip():
            texts.pop()
        rows.append(texts)
    return rows


def _span(cell: LexborNode, name: str) -> int:
    span = cell.attributes.get(name) or ""
    return min(max(int(span), 1), _MAX_SPAN) if span.isascii() and span.isdigit() and len(span) < 9 else 1


def _cell(cell: LexborNode) -> str:
    texts: list[str] = []
    waiting = [cell]
    while waiting:
        node = waiting.pop()
        if node.tag == "-text":
            texts.append(node.text_content or "")
        elif node.tag == "img":
            texts.append(f" {node.attributes.get('alt') or ''} ")
        elif node.tag == "input":
            texts.append(_box(node))
        elif not _is_unseen(node):
            if node.tag == "li":
                texts.append(" • ")
            elif node.tag in _BLOCKS or node.tag == "br":
                texts.append(" ")
            waiting += reversed(list(node.iter(include_text=True)))
    return "".join(texts)


def _box(field: LexborNode) -> str:
    """A box that is ticked or not, of a task list or of a Word document. Those that are sent have a name or id."""
    attributes = field.attributes
    if (attributes.get("type") or "").lower() != "checkbox" or attributes.get("name") or attributes.get("id"):
        return ""
    return " ☒ " if "checked" in attributes else " ☐ "


def _preformatted(pre: LexborNode) -> str:
    texts: list[str] = []
    for node in pre.traverse(include_text=True):
        if node.tag == "-text":
            texts.append(node.text_content or "")
        elif node.tag == "br":
            texts.append("\n")
    return "".join(texts)


def _language(pre: LexborNode) -> str:
    parent = pre.parent
    nodes = [pre, pre.css_first("code"), parent, parent.parent if parent else None]
    for node in nodes:
        found = _LANGUAGE.search((node.attributes.get("class") or "") if node is not None else "")
        if found:
            return found[1]
    return ""


def _first_number(ol: LexborNode) -> int:
    start = ol.attributes.get("start") or ""
    return int(start) if start.isascii() and start.isdigit() and len(start) < 9 else 1
