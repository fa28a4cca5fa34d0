"""Base64 inside text: pictures and fonts that would fill the index with what nobody can search or read."""

from __future__ import annotations

import re

_DATA_URI = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,([A-Za-z0-9+/=_%-]{64,})")
# Without a word on what it is: a run so long, and of capitals, small letters and digits, is neither a word nor a gene.
_BARE = re.compile(r"[A-Za-z0-9+/]{1000,}={0,2}")
# Exporters wrap it at 64 or 76 characters.
_WRAPPED = re.compile(r"(?:^[^\S\n]*[A-Za-z0-9+/]{60,}\n){10,}(?:[^\S\n]*[A-Za-z0-9+/]+={0,2}(?=\s|$))?", re.MULTILINE)


def without_base64(text: str, warnings: list[str]) -> str:
    """`text` with a short note in the place of each long run of base64; `warnings` are told how many and how much."""
    left_out: list[int] = []

    def noted(run: re.Match[str]) -> str:
        if run.re is not _DATA_URI and not _is_mixed(run[0]):
            return run[0]
        left_out.append(len(run[0]))
        return f"data:{run[1]}" if run.re is _DATA_URI else f"[{len(run[0])} characters of base64]"

    if "base64," in text:
        text = _DATA_URI.sub(noted, text)
    text = _WRAPPED.sub(noted, _BARE.sub(noted, text))
    if left_out:
        pieces = f"{len(left_out)} piece{'s' * (len(left_out) > 1)}"
        warnings.append(f"{pieces} of base64, {sum(left_out)} characters, such as pictures")
    return text


def _is_mixed(run: str) -> bool:
    start = run[:200]
    kinds = (str.isupper, str.islower, str.isdigit)
    return all(sum(map(kind, start)) >= len(start) // 40 for kind in kinds)
