"""What a turn is asked: the question, what was found for it, and how it is to be answered. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.audit.records import SessionRecord
from app.turns.exchanges import Exchange
from ingest.records import Filter, StoredPassage
from kv.model.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Question:
    """What somebody asks of a session.

    top_k: passages to retrieve, of those that `filter` lets through. max_tokens: of the answer; None takes the default,
    or what fits beside the passages; at_most: a larger one is cut to what fits, instead of refused. sampling: fields of
    `kv.model.sampling.Sampling` that are to be other than the model's own. stop: strings that end the answer before
    them. allow_repetition: whether an answer that only repeats itself goes on.
    """

    content: str
    top_k: int
    filter: Filter | None
    max_tokens: int | None
    sampling: Mapping[str, Any]
    stop: tuple[str, ...]
    at_most: bool = False
    allow_repetition: bool = False


@dataclass(frozen=True)
class Candidate:
    """A retrieved passage and its tokens as a message."""

    passage: StoredPassage
    token_ids: list[int]


@dataclass(frozen=True)
class TurnRequest:
    """What a turn needs to know. accepted_at: `time.monotonic()` when the request came.

    asked: as it was asked. sampling: how tokens are chosen. question_ids: its tokens, as a message. number: from 1.
    deleted_documents: documents with resident blocks that are no longer in the library.
    referred: old exchanges that the question refers back to, best first. stands_alone: whether the question says by
    itself what it is about.
    """

    session: SessionRecord
    turn_id: str
    number: int
    asked: Question
    sampling: Sampling
    question_ids: list[int]
    candidates: list[Candidate]
    deleted_documents: frozenset[str]
    default_max_tokens: int
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
