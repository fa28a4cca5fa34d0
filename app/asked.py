"""What a turn is asked: the question, what was found for it, and how it is to be answered. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from app.exchanges import Exchange
from app.records import SessionRecord
from ingest.records import StoredPassage


@dataclass(frozen=True)
class Candidate:
    """A retrieved passage and its tokens as a message."""

    passage: StoredPassage
    token_ids: list[int]


@dataclass(frozen=True)
class TurnRequest:
    """What a turn needs to know. accepted_at: `time.monotonic()` when the request came.

    deleted_documents: documents with resident blocks that are no longer in the library. number: from 1.
    referred: old exchanges that the question refers back to, best first. stands_alone: whether the question says by
    itself what it is about.
    """

    session: SessionRecord
    turn_id: str
    number: int
    question_ids: list[int]
    candidates: list[Candidate]
    deleted_documents: frozenset[str]
    max_tokens: int | None
    default_max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    accepted_at: float
    retrieval_seconds: float
    referred: tuple[Exchange, ...] = ()
    stands_alone: bool = False

    @property
    def question_id(self) -> str:
        """The name of the question's block."""
        return f"{self.turn_id}.question"

    @property
    def answer_id(self) -> str:
        """The name of the answer's block."""
        return f"{self.turn_id}.answer"


@dataclass(frozen=True)
class Wish:
    """A candidate as this session would hold it.

    block_id: the name that its block has or would have. bank_key: under what the bank keeps its K/V. stored: whether
    that was there when the turn was planned.
    """

    candidate: Candidate
    block_id: str
    bank_key: str
    stored: bool
