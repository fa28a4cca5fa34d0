"""Search queries: what a user types, as a full-text expression that SQLite accepts."""

from __future__ import annotations

import re
import unicodedata

MAX_TERMS = 64

_WORD = re.compile(r"\w+")
_STOP_WORDS = frozenset((
    "a", "about", "an", "and", "are", "as", "at", "be", "by", "can", "did", "do", "does", "for", "from",
    "had", "has", "have", "how", "i", "in", "is", "it", "its", "me", "my", "of", "on", "or", "our", "s",
    "t", "that", "the", "their", "them", "there", "these", "they", "this", "to", "was", "we", "were",
    "what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "you", "your",
))  # fmt: skip


def content_words(text: str) -> list[str]:
    """The distinct words of `text`, lower case, in order, without common English ones; at most 64."""
    return [word for word in _words(text) if word not in _STOP_WORDS][:MAX_TERMS]


def fts_query(text: str) -> str | None:
    """The FTS5 MATCH expression that looks for any word of `text`; None when it holds no word.

    Each word is quoted, so nothing the user types is read as FTS5 syntax. Common English words are left out
    unless there are no others; at most 64 distinct words are kept, in order. Never raises.
    """
    words = content_words(text) or _words(text)[:MAX_TERMS]
    return " OR ".join(f'"{word}"' for word in words) or None


def _words(text: str) -> list[str]:
    # Composed letters: the index folds é into e, but would split a query at a separate accent.
    found = (match.group().strip("_").lower() for match in _WORD.finditer(unicodedata.normalize("NFC", text)))
    return list(dict.fromkeys(word for word in found if word))
