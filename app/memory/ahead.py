"""Passages read into the bank ahead of the first question that needs them, while there is nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable

import structlog

from app.memory.bank import Bank
from app.memory.pace import Pace

log = structlog.get_logger()

# A turn that comes in the middle of a slice waits for its end.
_SLICE_SECONDS = 0.03


class Ahead:
    """The documents whose passages are still to be computed, oldest first. On the MLX thread.

    bank: where they go, as long as nothing has to leave for them. passages_of: a document's passages as messages, in
    tokens; none if it is gone. most_tokens: of a slice, which else is as long as nobody minds waiting for.
    """

    def __init__(self, bank: Bank, passages_of: Callable[[str], Iterable[list[int]]], *, most_tokens: int) -> None:
        self._bank = bank
        self._pace = Pace(_SLICE_SECONDS, most_tokens)
        self._passages_of = passages_of
        self._documents: deque[str] = deque()
        self._steps: Generator[None, None, None] | None = None

    def add(self, document_id: str) -> None:
        """Compute a document's passages when there is time."""
        self._documents.append(document_id)

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return self._steps is not None or bool(self._documents)

    def step(self) -> None:
        """Do one slice of a passage at most."""
        if self._steps is None and self._documents:
            self._steps = self._compute(self._documents.popleft())
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None

    def _compute(self, document_id: str) -> Generator[None, None, None]:
        try:
            for passage in self._passages_of(document_id):
                key = self._bank.key(passage)
                if document_id in self._bank.deleted:
                    return
                if self._bank.where(key) is not None:
                    yield
                    continue
                if not self._bank.has_room(len(passage)):
                    log.info("the bank is full: what is still to be read ahead is read when it is asked for")
                    self._documents.clear()
                    return
                for _ in self._bank.compute(key, passage, document_id, pace=self._pace):
                    yield
        except Exception as error:
            # It is read when it is asked for, and whatever is wrong is said to who asks.
            log.warning("passages could not be read ahead", document_id=document_id, exc_info=error)
