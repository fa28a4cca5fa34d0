"""HTML to Markdown: the text a reader of the page sees, with its headings, lists, tables and code."""

from __future__ import annotations

import re

from selectolax.lexbor import LexborHTMLParser, LexborNode

from ingest.errors import Unsupported
from ingest.readers.html_code import language, preformatted
from ingest.readers.html_inline import BLOCKS, HEADINGS, closing, inline_text, is_unseen, opening, replaced
from ingest.readers.html_tables import is_layout, rows
from ingest.readers.markdown_writer import MarkdownWriter

MAX_DEPTH = 5000

_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
# Elements that hold nothing, or that the next of their kind closes.
_SHALLOW = frozenset((
    "area", "base", "body", "br", "col", "dd", "dt", "embed", "head", "hr", "html", "img", "input", "li", "link",
    "meta", "option", "p", "param", "source", "tbody", "td", "tfoot", "th", "thead", "tr", "track", "wbr",
))  # fmt: skip


def read_html(name: str, html: str, warnings: list[str] | None = None) -> str:
    """The text of a page as Markdown. Scripts, styles, form fields and what is embedded are left out; so is what
    is around the one `main` element of a page that has one, such as menus.

    Links keep their addresses where these are whole, and images are their alternative text; what was struck out is in
    ~~, and what is raised after a ^. The page's title is its first heading where it has no other of the first level.
    `warnings` are told of drawings and pictures whose text is not read. Raises Unsupported for text without a tag, and
    for more than 5,000 elements within each other.
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
        if warnings is not None:
            warnings += _left_out(body)
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


def _left_out(body: LexborNode) -> list[str]:
    kinds = (
        ("drawing", " (SVG) with text", sum(svg.css_first("text") is not None for svg in body.css("svg"))),
        ("picture", " without a description", sum("alt" not in image.attributes for image in body.css("img"))),
    )
    return [f"{count} {kind}{'s' * (count > 1)}{what}" for kind, what, count in kinds if count]


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
    if (text := replaced(node)) is not None:
        writer.text(text)
        return False
    if is_unseen(node):
        return False
    if tag == "br":
        writer.line_end()
    elif tag == "pre":
        writer.code(preformatted(node), language(node))
        return False
    elif tag == "table" and not is_layout(node):
        for caption in node.css("caption"):
            writer.paragraph(inline_text(caption))
        writer.table(rows(node))
        return False
    elif tag in HEADINGS or tag in BLOCKS:
        writer.flush()
    elif tag in ("ul", "ol", "menu"):
        writer.open_list(_number(node, "start") or 1 if tag == "ol" else None)
    elif tag == "li":
        writer.open_item(_number(node, "value"))
    elif tag == "blockquote":
        writer.open_quote()
    else:
        writer.text(opening(node))
    return True


def _leave(node: LexborNode, writer: MarkdownWriter) -> None:
    tag = node.tag or ""
    if tag in HEADINGS:
        writer.end_heading(HEADINGS[tag])
    elif tag in BLOCKS:
        writer.flush()
    elif tag in ("ul", "ol", "menu"):
        writer.close_list()
    elif tag in ("li", "blockquote"):
        writer.close_container()
    else:
        writer.text(closing(node))


def _number(node: LexborNode, attribute: str) -> int | None:
    number = node.attributes.get(attribute) or ""
    return int(number) if number.isascii() and number.isdigit() and len(number) < 9 else None
