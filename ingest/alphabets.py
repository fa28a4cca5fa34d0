"""Alphabets: which one-byte encoding a text in Latin letters is in, by the letters its language has."""

from __future__ import annotations

import re
from collections import Counter

# The letters beyond ASCII of languages that were written in Windows-1252, and of those that were not. Where both
# explain a text the former win: most texts with few accents are of them.
_WESTERN = (
    "àâæçéèêëîïôœùûüÿ", "äöüß", "áéíñóúü", "ãáàâçéêíóôõúü", "àèéìíîòóùú", "åäöæøé", "áæðéíóöúýþ", "éëïóöüè",
    "àçéèíïóòúü", "äåõöšüž",
)  # fmt: skip
_OTHERS = (
    ("cp1250", "iso8859_2", "ąćęłńóśźż"),
    ("cp1250", "iso8859_2", "áčďéěíňóřšťúůýž"),
    ("cp1250", "iso8859_2", "áäčďéíĺľňóôŕšťúýž"),
    ("cp1250", "iso8859_2", "áéíóöőúüű"),
    ("cp1250", "iso8859_2", "ćčđšž"),
    ("cp1250", "iso8859_2", "ăâîşţ"),
    ("cp1254", "âçğıîöşûü"),
)
# Signs, which say nothing of the language where they stand apart from letters, or are quotes and dashes; and single
# letters, which are a pound or copyright sign in another encoding.
_SIGNS = re.compile(r"(?<!\w)[^\w\x80-\x9f]+|[^\w\x80-\x9f]+(?!\w)|[\u2010-\u2026]|(?<![^\W\d])\w(?![^\W\d])")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_ENOUGH = 0.97
_BETTER_BY = 0.05
# A foreign name or two in English text are in the alphabet of some other language as well.
_FEWEST_LETTERS = 3


def encoding_of_latin(data: bytes) -> str | None:
    """The encoding in which one language other than the Western European has nearly all letters of `data`.

    None where there is none, or where a language of Western Europe explains it as well.
    """
    letters = {encoding: _letters(data, encoding) for encoding in ("cp1252", "cp1250", "iso8859_2", "cp1254")}
    western = max(_share(letters["cp1252"], alphabet) for alphabet in _WESTERN)
    best, encoding, alphabet = max(
        (_share(letters[encoding], alphabet), encoding, alphabet)
        for *encodings, alphabet in _OTHERS
        for encoding in encodings
    )
    different = sum(letters[encoding][letter] > 0 for letter in alphabet)
    is_other = best >= _ENOUGH and best > western + _BETTER_BY and different >= _FEWEST_LETTERS
    return encoding if is_other else None


def _letters(data: bytes, encoding: str) -> Counter[str]:
    """The letters beyond ASCII, and what stands between letters, in small letters."""
    text = _SIGNS.sub(" ", data.decode(encoding, "replace").replace("\ufffd", "\x80"))
    # The dot of İ is a character of its own in lower case.
    return Counter(_BEYOND_ASCII.findall(text.replace("İ", "i").lower()))


def _share(letters: Counter[str], alphabet: str) -> float:
    return sum(letters[letter] for letter in alphabet) / max(1, letters.total())
