"""Markdown: headings, fences, tables and lists by markdown-it-py's line maps."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ingest.blocks import MAX_DEPTH, MAX_LEAD, Block, Kind, Role, contiguous, shortened

# Only block structure is wanted. The default nesting limit of 20 makes a tenth nested list swallow the rest
# of the document.
_BLOCKS = MarkdownIt("commonmark", {"maxNesting": 100}).enable("table")
_BLOCKS.core.ruler.enableOnly(["block"])
_INLINE = MarkdownIt("commonmark")
_MARKUP = re.compile(r"[*_`\[\]<&\\]")

# Without this, the metadata of Jekyll, Hugo or Pandoc is read as a rule and a heading above everything.
_FRONT_MATTER = re.compile(r"---[^\S\n]*\n(?=[\w\"'-]+[^\S\n]*:|#)(?:.*\n)*?(?:---|\.\.\.)[^\S\n]*(?:\n|\Z)")

_KINDS: dict[str, Kind] = {
    "fence": "code",
    "code_block": "code",
    "table_open": "table",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
}
_CONTAINERS = frozenset({"bullet_list_open", "ordered_list_open", "list_item_open", "blockquote_open"})


class _Found(msgspec.Struct):
    """A block from where it starts to where the parser ends it, in characters."""

    start: int
    end: int
    kind: Kind = "prose"
    path: tuple[str, ...] = ()
    role: Role = "body"
    inner: list[_Found] = []
    lead: tuple[str, ...] = ()


def markdown(text: str) -> list[Block]:
    """The top-level blocks of a Markdown text with the tree of what lists and quotes hold."""
    # The parser counts a lone CR as a line end once normalised; here lines end at LF only.
    source = text.replace("\r", " ")
    front = _FRONT_MATTER.match(source)
    if front is not None:
        source = "\n" * front[0].count("\n") + " " * (not front[0].endswith("\n")) + source[front.end() :]
    lines = [0, *(match.end() for match in re.finditer("\n", text)), len(text)]
    found = _tree(_BLOCKS.parse(source), lines)
    if front is not None:
        found.insert(0, _Found(0, front.end(), "code"))
    return contiguous(text, 0, len(text), [_block(block) for block in found])


def _tree(tokens: list[Token], lines: list[int]) -> list[_Found]:
    top = _Found(0, lines[-1])
    # The containers that are open around the current token, outermost first.
    open_: list[_Found] = [top]
    path: list[tuple[int, str]] = []
    opaque_level: int | None = None
    for index, token in enumerate(tokens):
        if opaque_level is not None:
            # Inside a table or a paragraph, until it closes.
            if token.level == opaque_level and token.nesting < 0:
                opaque_level = None
            continue
        if token.nesting < 0:
            open_.pop()
            continue
        if token.map is None:
            continue
        start, stop = (lines[min(line, len(lines) - 1)] for line in token.map)
        role: Role = "body"
        kind = _KINDS.get(token.type)
        if len(open_) == 1:
            if token.type == "heading_open":
                role = "heading"
                level = int(token.tag[1:])
                path = [entry for entry in path if entry[0] < level]
                path.append((level, _title(tokens[index + 1].content)))
            elif kind == "code":
                role = "alone"
        block = _Found(start, stop, kind or open_[-1].kind, tuple(title for _, title in path if title), role)
        if kind == "table":
            block.lead = _columns(tokens, index, block.path)
            block.inner = _rows(token.map, lines, block.path)
        open_[-1].inner.append(block)
        if token.type in _CONTAINERS:
            open_.append(block)
        elif token.nesting > 0:
            opaque_level = token.level
    return top.inner


def _columns(tokens: list[Token], index: int, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the rows of the table that opens at `index`: their columns are its last."""
    names: list[str] = []
    for token in tokens[index:]:
        if token.type == "thead_close":
            break
        if token.type == "inline":
            names.append(_title(token.content))
    return (*path, shortened(" | ".join(names), MAX_LEAD)) if any(names) else ()


def _rows(map: list[int], lines: list[int], path: tuple[str, ...]) -> list[_Found]:
    """Its lines, the first with that of the dashes below it."""
    bounds = [lines[min(line, len(lines) - 1)] for line in range(map[0], map[1] + 1) if line != map[0] + 1]
    return [_Found(start, end, "table", path) for start, end in pairwise(bounds)]


def _title(content: str) -> str:
    if not _MARKUP.search(content):
        return shortened(content)
    # A heading that is a link, say: its text is the title, its address is not.
    (inline,) = _INLINE.parseInline(content)
    return shortened("".join(child.content or " " * (child.type == "softbreak") for child in inline.children or ()))


def _block(found: _Found, depth: int = 1) -> Block:
    children = tuple(_block(inner, depth + 1) for inner in found.inner) if depth < MAX_DEPTH else ()
    return Block(found.start, found.end, found.kind, found.path, found.role, children, found.lead)
