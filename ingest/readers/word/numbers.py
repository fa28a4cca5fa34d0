"""The numbers that Word shows before clauses, headings and list items: they are nowhere in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from xml.etree import ElementTree as ET

from ingest.readers.word.xml import child, kind, value, within

# The style of a run that holds a number, which marks it for whoever writes the list.
STYLE = "ListNumberHere"

_LEVELS = 9
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"),
          (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip
_MAX_ROMAN = 4000
_HAN_DIGITS = "〇一二三四五六七八九"
_HAN = frozenset({"chineseCounting", "chineseCountingThousand", "ideographDigital", "japaneseCounting"})


@dataclass(frozen=True)
class _Level:
    start: int = 1
    format: str = "decimal"
    # Such as "%1.%2", where %2 is the number of the second level.
    text: str = ""
    style: str | None = None
    legal: bool = False
    restarts: bool = True


@dataclass
class _List:
    """An abstract numbering: what counts, for all lists that are based on it."""

    levels: dict[int, _Level]
    style_link: str | None = None
    numbering_style: str | None = None
    counts: list[int | None] = field(default_factory=lambda: [None] * _LEVELS)


class Numbers:
    """Counts the numbered paragraphs of a document, asked in their order."""

    def __init__(self, numbering: ET.Element | None, styles: ET.Element | None) -> None:
        self._lists: dict[str, _List] = {}
        # Of each numbering: the list it is based on, and the levels that it has otherwise.
        self._based_on: dict[str, tuple[str, dict[int, _Level]]] = {}
        self._restarted: set[str] = set()
        self._styles: dict[str, ET.Element] = {}
        for style in styles if styles is not None else ():
            self._styles[value(style, "styleId") or ""] = style
        for node in numbering if numbering is not None else ():
            if kind(node) == "abstractNum":
                link, numbering_style = child(node, "styleLink"), child(node, "numStyleLink")
                self._lists[value(node, "abstractNumId") or ""] = _List(
                    {_index(level): _level(level, _Level()) for level in within(node, "lvl")},
                    None if link is None else value(link),
                    None if numbering_style is None else value(numbering_style),
                )
        for node in numbering if numbering is not None else ():
            base = child(node, "abstractNumId")
            if kind(node) == "num" and base is not None:
                self._based_on[value(node, "numId") or ""] = self._numbering(node, value(base) or "")

    def label(self, paragraph: ET.Element) -> str | None:
        """The number before `paragraph`, such as "2.1" or "(a)"; None for a bullet or none. Counts it."""
        properties = child(paragraph, "pPr")
        style = child(properties, "pStyle")
        number, level = self._numbered(child(properties, "numPr"), None if style is None else value(style))
        if number not in self._based_on or level is None or not 0 <= level < _LEVELS:
            return None
        base, own = self._based_on[number]
        counted = self._lists[base]
        levels = {**counted.levels, **own}
        if number not in self._restarted:
            self._restarted.add(number)
            for index in own:
                counted.counts[index] = None
        here = levels.get(level, _Level())
        if here.format in ("bullet", "none") and "%" not in here.text:
            return None
        count = counted.counts[level]
        counted.counts[level] = here.start if count is None else count + 1
        for deeper in range(level + 1, _LEVELS):
            if levels.get(deeper, _Level()).restarts:
                counted.counts[deeper] = None

        def shown(found: re.Match[str]) -> str:
            index = int(found[1]) - 1
            its = levels.get(index, _Level())
            number = counted.counts[index]
            return _formatted(its.start if number is None else number, "decimal" if here.legal else its.format)

        return re.sub(r"%([1-9])", shown, here.text).strip() or None

    def _numbering(self, node: ET.Element, base: str) -> tuple[str, dict[int, _Level]]:
        listed = self._lists.setdefault(base, _List({}))
        if listed.numbering_style is not None:
            # A list that only names a style: another list defines it.
            linked = (id for id, other in self._lists.items() if other.style_link == listed.numbering_style)
            base = next(linked, base)
            listed = self._lists[base]
        own: dict[int, _Level] = {}
        for override in within(node, "lvlOverride"):
            index = _index(override)
            start, level = child(override, "startOverride"), child(override, "lvl")
            known = listed.levels.get(index, _Level())
            if level is not None:
                known = _level(level, known)
            if start is not None:
                known = replace(known, start=_number(start, known.start))
            own[index] = known
        return base, own

    def _numbered(self, direct: ET.Element | None, style: str | None) -> tuple[str, int | None]:
        """Which numbering a paragraph is in, and at which level: by itself, or by its style or those that this is
        based on."""
        number, level = _reference(direct)
        seen: set[str] = set()
        its_own = style
        while style is not None and number is None and style in self._styles and style not in seen:
            seen.add(style)
            number, styled = _reference(child(self._styles[style], "pPr", "numPr"))
            level = styled if level is None else level
            based = child(self._styles[style], "basedOn")
            style = None if based is None else value(based)
        if seen and number in self._based_on:
            # The list may say which of its levels a style has.
            base, own = self._based_on[number]
            levels = {**self._lists[base].levels, **own}
            level = next((index for index, its in levels.items() if its.style == its_own), level)
        return number or "", 0 if level is None else level


def _reference(properties: ET.Element | None) -> tuple[str | None, int | None]:
    number, level = child(properties, "numId"), child(properties, "ilvl")
    return None if number is None else value(number), None if level is None else _number(level, 0)


def as_bullets(numbering: ET.Element) -> None:
    """Change each level of a list that Markdown has no number for, such as (a) or 2.1, into bullets."""
    for level in within(numbering, "lvl"):
        format, text = child(level, "numFmt"), child(level, "lvlText")
        plain = re.fullmatch(r"%\d\.", "" if text is None else value(text) or "")
        if format is not None and not (plain and value(format) == "decimal"):
            for key, _ in list(format.items()):
                if key.rpartition("}")[2] == "val":
                    format.set(key, "bullet")


def _level(node: ET.Element, base: _Level) -> _Level:
    start, format, text = child(node, "start"), child(node, "numFmt"), child(node, "lvlText")
    style, restart = child(node, "pStyle"), child(node, "lvlRestart")
    return _Level(
        base.start if start is None else _number(start, 1),
        base.format if format is None else value(format) or "decimal",
        base.text if text is None else value(text) or "",
        None if style is None else value(style),
        child(node, "isLgl") is not None,
        restart is None or value(restart) != "0",
    )


def _index(node: ET.Element) -> int:
    index = value(node, "ilvl") or "0"
    return min(int(index), _LEVELS - 1) if index.isdigit() else 0


def _number(node: ET.Element, default: int) -> int:
    number = value(node) or ""
    return int(number) if re.fullmatch(r"-?\d{1,9}", number) else default


def _formatted(number: int, format: str) -> str:
    if format in ("upperLetter", "lowerLetter") and number > 0:
        # After z comes aa, then bb.
        letter = chr(ord("a") + (number - 1) % 26) * min((number - 1) // 26 + 1, 9)
        return letter.upper() if format == "upperLetter" else letter
    if format in ("upperRoman", "lowerRoman") and 0 < number < _MAX_ROMAN:
        roman = ""
        for worth, sign in _ROMAN:
            while number >= worth:
                number, roman = number - worth, roman + sign
        return roman.upper() if format == "upperRoman" else roman
    if format == "decimalZero":
        return f"{number:02}"
    if format in _HAN and 0 < number < 100:
        tens, ones = divmod(number, 10)
        ten = "" if tens == 0 else "十" if tens == 1 else f"{_HAN_DIGITS[tens]}十"
        return ten + (_HAN_DIGITS[ones] if ones else "")
    return str(number)
