"""Passages: a text cut at its structure into pieces that fit a number of model tokens, nothing lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile

import msgspec

from ingest.blocks import Block, Kind, contiguous
from ingest.splitters import split

MIN_TOKENS = 16

# A text with more characters to a token than this is no text; counting it whole would only cost time.
_MAX_CHARACTERS_PER_TOKEN = 32

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_LINE = re.compile(r"\n")
_SENTENCE = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)\]]*\s+|(?<=[\u3002\uff01\uff1f])")
_WORD = re.compile(r"\s+")
_BORDERS = (_BLANK_LINES, _LINE, _SENTENCE, _WORD)


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """document_text[start:end] == text, `tokens` model tokens long.

    `heading` is the path of headings above it joined by " > ". `part` is "2/3" for the second of three
    passages that one oversized block was cut into, else None.
    """

    text: str
    kind: Kind
    heading: str
    start: int
    end: int
    tokens: int
    part: str | None = None


class _Piece(msgspec.Struct, frozen=True):
    start: int
    end: int
    tokens: int
    kind: Kind
    path: tuple[str, ...]
    # Part of a heading.
    leads: bool
    # Where the block that it is a part of starts, and the path of the parts behind that.
    led_from: int = 0
    lead: tuple[str, ...] = ()


class _Measured(msgspec.Struct, frozen=True):
    block: Block
    pieces: list[_Piece]
    cut: bool


def cut(
    text: str,
    media_type: str,
    count_tokens: Callable[[str], int],
    max_tokens: int,
    blocks: Sequence[Block] | None = None,
) -> list[Passage]:
    """Cut `text` into passages of at most `max_tokens` tokens; joined they are `text` again.

    A block (paragraph, fence, list, table, function, class) that fits is never cut. A larger one is cut where
    it hurts least: around its children (list items, nested code, members, rows), where these do not fit around
    theirs, and at the end at blank lines, lines, sentences, words, and at characters last. `count_tokens` need
    not be additive; each block is counted once, and each passage. `blocks`: those of `text`, if it is split already.
    Raises ValueError for `max_tokens` below 16.
    """
    if max_tokens < MIN_TOKENS:
        raise ValueError(f"max_tokens must be at least {MIN_TOKENS}, not {max_tokens}")
    packer = _Packer(text, count_tokens, max_tokens)
    if blocks is None:
        blocks = split(text, media_type)
    return [passage for section in _sections(blocks) for passage in packer.pack(section)]


def _sections(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    section: list[Block] = []
    for block in blocks:
        if block.role in ("heading", "section") and section and section[-1].role != "heading":
            yield section
            section = []
        section.append(block)
    if section:
        yield section


class _Packer:
    def __init__(self, text: str, count_tokens: Callable[[str], int], max_tokens: int) -> None:
        self.text = text
        self.count_tokens = count_tokens
        self.max_tokens = max_tokens
        self.max_counted = max_tokens * _MAX_CHARACTERS_PER_TOKEN
        # Segments are counted in groups of at least this many characters, to spare calls.
        self.grain = max_tokens // 8

    def pack(self, section: list[Block]) -> list[Passage]:
        measured = [self._measure(block) for block in section]
        whole = self._whole(measured)
        if whole is not None:
            return [whole]
        passages: list[Passage] = []
        run: list[_Piece] = []
        leads = True
        for item in measured:
            if not item.cut and item.block.role != "alone":
                run += item.pieces
                leads = leads and item.block.role == "heading"
                continue
            if not leads:
                passages += self._fill(run)
                run = []
            filled = self._fill(run + item.pieces)
            passages += _numbered(filled, item.block.start) if item.cut else filled
            run, leads = [], True
        return passages + self._fill(run)

    def _whole(self, measured: list[_Measured]) -> Passage | None:
        pieces = [piece for item in measured for piece in item.pieces]
        if any(item.cut for item in measured) or sum(piece.tokens for piece in pieces) > self.max_tokens:
            return None
        passage = self._passage(pieces)
        return passage if passage.tokens <= self.max_tokens else None

    def _measure(self, block: Block) -> _Measured:
        whole = self._uncut(block)
        return _Measured(block, self._led(block) if whole is None else whole, cut=whole is None)

    def _uncut(self, block: Block) -> list[_Piece] | None:
        """The block in one piece, or with the blank lines around it apart; None when it does not fit."""
        piece = self._fitting(block, block.start, block.end)
        if piece is not None:
            return [piece]
        start, end = self._body(block)
        if start < end and end - start < block.end - block.start:
            piece = self._fitting(block, start, end)
            if piece is not None:
                before = self._atoms(block, block.start, start, 0)
                after = self._atoms(block, end, block.end, 0)
                return [*before, piece, *after]
        return None

    def _parts(self, block: Block) -> Iterator[_Piece]:
        """The pieces of a block that does not fit."""
        if not block.children:
            yield from self._atoms(block, block.start, block.end, 0)
            return
        children = contiguous(self.text, block.start, block.end, block.children, block)
        for group in self._neighbours(children):
            piece = self._joined(block, group) if len(group) > 1 else None
            if piece is not None:
                yield piece
                continue
            for child in group:
                whole = self._uncut(child)
                yield from self._led(child) if whole is None else whole

    def _led(self, block: Block) -> list[_Piece]:
        """The pieces of a block that does not fit, each with what its first lines say; of the innermost block."""
        pieces = list(self._parts(block))
        if not block.lead:
            return pieces
        return [
            msgspec.structs.replace(piece, led_from=block.start, lead=block.lead)
            if not piece.lead and piece.path == block.path
            else piece
            for piece in pieces
        ]

    def _neighbours(self, children: Sequence[Block]) -> Iterator[list[Block]]:
        """Children one by one, save that small ones are counted together."""
        group: list[Block] = []
        for child in children:
            if group and child.end - group[0].start > self.grain:
                yield group
                group = []
            group.append(child)
        yield group

    def _joined(self, parent: Block, group: list[Block]) -> _Piece | None:
        kinds = {child.kind for child in group}
        kind = kinds.pop() if len(kinds) == 1 else parent.kind
        return self._fitting(Block(group[0].start, group[-1].end, kind, parent.path), group[0].start, group[-1].end)

    def _body(self, block: Block) -> tuple[int, int]:
        """The block without blank lines around it: these may go elsewhere when they do not fit."""
        text = self.text[block.start : block.end]
        indent = len(text) - len(text.lstrip())
        start = block.start + text.rfind("\n", 0, indent) + 1
        return start, block.start + len(text.rstrip())

    def _fitting(self, block: Block, start: int, end: int) -> _Piece | None:
        if end - start > self.max_counted:
            return None
        tokens = self.count_tokens(self.text[start:end])
        if tokens > self.max_tokens:
            return None
        return _Piece(start, end, tokens, block.kind, block.path, block.role == "heading")

    def _atoms(self, block: Block, start: int, end: int, level: int) -> Iterator[_Piece]:
        """The pieces of [start, end): cut at the borders of `level`, and finer where these do not fit."""
        if start == end:
            return
        if level == len(_BORDERS):
            yield from self._slices(block, start, end, self.grain)
            return
        borders = (match.end() for match in _BORDERS[level].finditer(self.text, start, end))
        bounds = [start, *(border for border in borders if start < border < end), end]
        if len(bounds) == 2:
            yield from self._atoms(block, start, end, level + 1)
            return
        for left, right in pairwise(self._grouped(bounds)):
            piece = self._fitting(block, left, right)
            if piece is not None:
                yield piece
            else:
                yield from self._atoms(block, left, right, level + 1)

    def _slices(self, block: Block, start: int, end: int, size: int) -> Iterator[_Piece]:
        for left in range(start, end, size):
            right = min(left + size, end)
            piece = self._fitting(block, left, right)
            if piece is not None:
                yield piece
            elif size > 1:
                yield from self._slices(block, left, right, size // 2)
            else:
                raise ValueError(f"character {left} alone has more than {self.max_tokens} tokens")

    def _grouped(self, bounds: Sequence[int]) -> list[int]:
        kept = [bounds[0]]
        for before, bound in pairwise(bounds):
            if bound - kept[-1] > self.grain and before > kept[-1]:
                kept.append(before)
        return [*kept, bounds[-1]]

    def _fill(self, pieces: list[_Piece]) -> list[Passage]:
        passages: list[Passage] = []
        first = 0
        while first < len(pieces):
            last, total = first + 1, pieces[first].tokens
            while last < len(pieces) and total + pieces[last].tokens <= self.max_tokens:
                total += pieces[last].tokens
                last += 1
            passage = self._passage(pieces[first:last])
            # Joined text can have more tokens than its pieces: drop pieces in proportion until it fits.
            while passage.tokens > self.max_tokens:
                target = total * self.max_tokens / passage.tokens
                last, total = last - 1, total - pieces[last - 1].tokens
                while last > first + 1 and total > target:
                    last, total = last - 1, total - pieces[last - 1].tokens
                passage = self._passage(pieces[first:last])
            passages.append(passage)
            first = last
        return passages

    def _passage(self, pieces: Sequence[_Piece]) -> Passage:
        start, end = pieces[0].start, pieces[-1].end
        text = self.text[start:end]
        return Passage(
            text=text,
            kind=_main_kind(pieces),
            heading=_heading(pieces),
            start=start,
            end=end,
            tokens=pieces[0].tokens if len(pieces) == 1 else self.count_tokens(text),
        )


def _heading(pieces: Sequence[_Piece]) -> str:
    """The longest path where the others lead to it, else what all have in common; of headings alone, the last's.

    A passage that begins inside a table or a definition says what was before.
    """
    if pieces[0].lead and pieces[0].start > pieces[0].led_from:
        return " > ".join(pieces[0].lead)
    paths = [piece.path for piece in pieces if not piece.leads] or [pieces[-1].path]
    path = max(paths, key=len)
    if any(other != path[: len(other)] for other in paths):
        levels = zip(*paths, strict=False)
        path = tuple(level[0] for level in takewhile(lambda titles: len(set(titles)) == 1, levels))
    return " > ".join(path)


def _main_kind(pieces: Sequence[_Piece]) -> Kind:
    tokens: Counter[Kind] = Counter()
    for piece in pieces:
        tokens[piece.kind] += piece.tokens
    kind, most = tokens.most_common(1)[0]
    return kind if len(tokens) == 1 or most * 2 > tokens.total() else "prose"


def _numbered(passages: list[Passage], start: int) -> list[Passage]:
    """Mark as parts the passages that hold text after `start`: a heading alone before it is no part."""
    whole = [passage for passage in passages if passage.end <= start]
    parts = passages[len(whole) :]
    if len(parts) == 1:
        return passages
    return whole + [
        msgspec.structs.replace(part, part=f"{number}/{len(parts)}") for number, part in enumerate(parts, 1)
    ]
