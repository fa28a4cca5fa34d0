"""Preformatted text of HTML: its lines, however a highlighter writes them, and its language."""

from __future__ import annotations

import re

from selectolax.lexbor import LexborNode

from ingest.readers.html_inline import BLOCKS

_LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight|sourceCode)[- ]([\w+#-]+)")
_BLOCK_STYLE = re.compile(r"display\s*:\s*(?:block|flex|grid|table-row|list-item)")
_LINE_CLASS = re.compile(r"(?:^|[\s_-])line(?:$|\s)")
_NUMBER = re.compile(r"\s*(\d+)\s*")


def preformatted(pre: LexborNode) -> str:
    """The text of `pre`, without the numbers that a highlighter puts before its lines; "" for such numbers alone."""
    # Lines as pieces: the text of each element in them.
    lines: list[list[str]] = [[]]
    has_line_ends = "\n" in pre.text()
    after_block = False
    waiting = [(pre, False)]
    while waiting:
        node, is_done = waiting.pop()
        if node.tag == "-text" or node.tag == "br":
            text = "\n" if node.tag == "br" else node.text_content or ""
            if after_block and not text.startswith("\n") and lines[-1]:
                lines.append([])
            after_block = False
            first, *rest = text.split("\n")
            lines[-1] += [first] if first else []
            lines += [[line] if line else [] for line in rest]
            continue
        if node is not pre and _is_line(node, has_line_ends):
            if is_done:
                after_block = True
            elif lines[-1]:
                lines.append([])
                after_block = False
        if not is_done:
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(list(node.iter(include_text=True)))]
    return "\n".join("".join(line) for line in _without_numbers(lines))


def language(pre: LexborNode) -> str:
    """The language that the classes of `pre` or of what is next to it name."""
    stated = pre.attributes.get("data-language") or pre.attributes.get("data-lang") or ""
    if re.fullmatch(r"[\w+#-]{1,40}", stated):
        return stated
    parent = pre.parent
    nodes = [pre, pre.css_first("code"), parent, parent.parent if parent else None]
    for node in nodes:
        found = _LANGUAGE.search((node.attributes.get("class") or "") if node is not None else "")
        if found:
            return found[1]
    return ""


def _is_line(node: LexborNode, has_line_ends: bool) -> bool:
    if node.tag in BLOCKS or node.tag == "li" or _BLOCK_STYLE.search(node.attributes.get("style") or ""):
        return True
    # Lines by style sheet, which is not read here.
    return not has_line_ends and _LINE_CLASS.search(node.attributes.get("class") or "") is not None


def _without_numbers(lines: list[list[str]]) -> list[list[str]]:
    """`lines` without their first pieces where these count up from line to line."""
    numbers = [_NUMBER.fullmatch(line[0]) if line else None for line in lines]
    found = [int(number[1]) for number in numbers if number]
    counted = len(found) > 1 and found == list(range(found[0], found[0] + len(found)))
    if not counted or not all(number or not line for number, line in zip(numbers, lines, strict=True)):
        return lines
    return [line[1:] for line in lines]
