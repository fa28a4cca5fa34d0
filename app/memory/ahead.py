"""Passages read into the bank ahead of the first question that needs them, while there is nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence

import structlog

from app.memory.bank import Bank

log = structlog.get_logger()


class Ahead:
    """The documents whose passages are still to be computed, oldest first. On the MLX thread.

    bank: where they go, as long as nothing has to leave for them. system: tokens of the system prompt that they are
    computed behind. passages_of: a document's passages as messages, in tokens; none if it is gone.
    """

    def __init__(self, bank: Bank, system: Sequence[int], passages_of: Callable[[str], Iterable[list[int]]]) -> None:
        self._bank = bank
        self._system = system
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
        """Do one forward pass at most."""
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
                key = self._bank.key(self._system, passage)
                if document_id in self._bank.deleted:
                    return
                if self._bank.where(key) is not None:
                    continue
                if not self._bank.has_room(len(self._system) + len(passage)):
                    log.info("the bank is full: what is still to be read ahead is read when it is asked for")
                    self._documents.clear()
                    return
                for _ in self._bank.compute(key, self._system, passage, document_id, ahead=True):
                    yield
        except Exception as error:
            # It is read when it is asked for, and whatever is wrong is said to who asks.
            log.warning("passages could not be read ahead", document_id=document_id, exc_info=error)
