"""Texts that are UTF-8 in some places and an older encoding in others, such as logs that several programs wrote."""

from __future__ import annotations

import re
from collections.abc import Callable

_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
# In an older encoding "É»" and "É®" look like letters that no language has.
_UNLIKELY = re.compile(rb"[\xc6-\xcd][\x80-\xbf]")
# Of the runs of bytes above ASCII, so many are UTF-8. In an older encoding few are by chance: one in ten short runs of
# Chinese.
_FEWEST = 0.25
# From here on the text is UTF-8 with a flaw, whatever the rest looks like.
_MOST = 0.9
# Characters of more than two bytes, as quotes and dashes are, are not met by chance.
_SURE = 2
# Bytes in a run that is no UTF-8, on average, below which they are accents among Latin letters.
_ALONE = 1.6


def is_partly_utf8(data: bytes) -> bool:
    """Whether UTF-8 explains too many bytes above ASCII to be chance. `data` is not UTF-8 as a whole."""
    runs = _HIGH_RUN.findall(data)
    likely = [run for run in runs if _is_utf8(run) and not _UNLIKELY.fullmatch(run)]
    others = [run for run in runs if not _is_utf8(run)]
    share = len(likely) / len(runs)
    surely = sum(len(found) - 1 for run in likely for found in _CHARACTER.findall(run))
    if surely < _SURE or share < _FEWEST:
        return False
    return share >= _MOST or sum(map(len, others)) < _ALONE * len(others)


def decode_by_lines(data: bytes, guess: Callable[[bytes], str | None]) -> str:
    """Lines of UTF-8 as that, a stray byte in one of them as Windows-1252, and other lines as `guess` says of them."""
    lines = data.split(b"\n")
    older = b"\n".join(line for line in lines if not _is_utf8(line) and not _has_utf8(line))
    encoding = (guess(older) if older else None) or "cp1252"
    return "\n".join(_decoded(line, encoding) for line in lines)


def _decoded(line: bytes, encoding: str) -> str:
    if _is_utf8(line):
        return line.decode()
    if not _has_utf8(line):
        return line.decode(encoding, "replace")
    texts: list[str] = []
    position = 0
    for found in _CHARACTER.finditer(line):
        # What only looks like UTF-8, such as a surrogate, is as stray.
        texts += [line[position : found.start()].decode("cp1252", "replace"), found[0].decode(errors="replace")]
        position = found.end()
    return "".join([*texts, line[position:].decode("cp1252", "replace")])


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _has_utf8(line: bytes) -> bool:
    return any(_is_utf8(run) for run in _HIGH_RUN.findall(line))
