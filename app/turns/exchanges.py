"""Old exchanges that a new question refers back to, found by their words. In the audit database, beside the history."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

import sqlite_utils

from app.audit.reading import stored_block
from app.audit.records import StoredBlock
from ingest.database import Database
from ingest.queries import content_words

# An exchange must share so much of the weight of a question's words, or it would only distract.
_SHARE = 0.75
_MOST_WORDS = 16
_MOST = 2

# Words by which people ask or refer back; they say nothing of what to.
_REFERRING = frozenset((
    "again", "ago", "answer", "answered", "ask", "asked", "before", "conversation", "discuss", "discussed", "earlier",
    "many", "mention", "mentioned", "much", "one", "please", "previous", "previously", "question", "recall",
    "remember", "remind", "said", "say", "talk", "talked", "tell", "told",
))  # fmt: skip


# With fewer words that say something, a question is taken to go on from the one before: "and who built the tower?" More
# of them are needed where one points at what was said.
_STANDING = 3
_STANDING_POINTING = 5
_POINTING = frozenset((
    "he", "her", "him", "his", "it", "its", "she", "that", "their", "them", "then", "there", "these", "they", "this",
    "those",
))  # fmt: skip
# What people ask to be done with an answer.
_ASKING = frozenset((
    "also", "bit", "briefly", "could", "detail", "details", "else", "example", "explain", "give", "into", "just",
    "list", "make", "more", "rephrase", "sentence", "sentences", "short", "shorter", "should", "show", "summarise",
    "summarize", "too", "translate", "word", "words", "would", "write",
))  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """A question and its answer, earlier in the session. turn: its turn's number. blocks: as they are when resident."""

    turn: int
    blocks: tuple[StoredBlock, ...]

    @property
    def tokens(self) -> int:
        """Tokens of both."""
        return sum(block.record.tokens for block in self.blocks)


def referred(database: Database, session_id: str, question: str) -> list[Exchange]:
    """The exchanges that a question refers back to, best first; the last one, which always stays, is not looked at.

    A word weighs the more, the fewer of the session's exchanges have it. An exchange is referred to if it has three
    quarters of the weight of the question's words, and two of them at least unless there is only one.
    """
    words = _saying(question)[:_MOST_WORDS]
    return database.read(lambda db: _referred(db, session_id, words)) if words else []


def stands_alone(question: str) -> bool:
    """Whether a question has words enough to say by itself what it is about. A guess, by English words."""
    words = [word for word in _saying(question) if word not in _ASKING]
    points = not _POINTING.isdisjoint(re.findall(r"\w+", question.lower()))
    return len(words) >= (_STANDING_POINTING if points else _STANDING)


def _saying(question: str) -> list[str]:
    return [word for word in content_words(question) if word not in _REFERRING]


def _referred(db: sqlite_utils.Database, session_id: str, words: list[str]) -> list[Exchange]:
    number = "SELECT max(number), count(*) FROM turns WHERE session_id = ? AND status = 'done'"
    last, count = db.execute(number, [session_id]).fetchone()
    if count < 2:
        return []
    shared: dict[int, list[float]] = defaultdict(list)
    total = 0.0
    for word in words:
        found = db.execute(
            """SELECT turns.number FROM exchanges JOIN turns ON turns.seq = exchanges.rowid
               WHERE exchanges MATCH ?""",
            [f'session : "{session_id}" AND {{question answer}} : "{word}"'],
        ).fetchall()
        weight = math.log(1 + count / (len(found) or 0.5))
        total += weight
        for (turn,) in found:
            shared[turn].append(weight)
    least = min(2, len(words))
    strong = {
        turn: sum(weights)
        for turn, weights in shared.items()
        if turn != last and len(weights) >= least and sum(weights) >= _SHARE * total
    }
    ranked = sorted(strong, key=lambda turn: (-strong[turn], -turn))
    exchanges = (_exchange(db, session_id, turn) for turn in ranked)
    return [exchange for exchange in exchanges if exchange is not None][:_MOST]


def _exchange(db: sqlite_utils.Database, session_id: str, turn: int) -> Exchange | None:
    """None if its K/V is gone."""
    rows = db.query(
        """SELECT * FROM blocks WHERE session_id = ? AND turn = ? AND kind IN ('question', 'answer')
           AND state != 'dropped' ORDER BY seq""",
        [session_id, turn],
    )
    blocks = tuple(stored_block({**row, "state": "resident"}) for row in rows)
    return Exchange(turn, blocks) if [block.record.kind for block in blocks] == ["question", "answer"] else None
