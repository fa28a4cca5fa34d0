"""How a process takes less of the machine while others need it: it works and rests by turns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Short against the time between two tokens of an answer, so that each gap has its share of rest.
WORK_SECONDS = 0.015
REST_SECONDS = 0.045
# Of the time that passes while it is to rest.
SHARE = WORK_SECONDS / (WORK_SECONDS + REST_SECONDS)

HURRY, REST = b"\0", b"\1"


class Pace:
    """Rests by what its parent last wrote to a pipe, HURRY or REST. For the main thread, whose alarm it takes.

    A lower priority alone does not do: what runs beside an answer's single threads slows them down all the same where
    two processors are halves of one, or share its caches.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._rests = False
        os.set_blocking(words, False)
        signal.signal(signal.SIGALRM, self._on_alarm)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep to the pace inside."""
        signal.setitimer(signal.ITIMER_REAL, WORK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        try:
            if heard := os.read(self._words, 1024):
                self._rests = heard.endswith(REST)
        except BlockingIOError:
            # Nothing new.
            pass
        if self._rests:
            time.sleep(REST_SECONDS)
        # Anew each time: a rest must be followed by work, not by the alarm that it has missed.
        signal.setitimer(signal.ITIMER_REAL, WORK_SECONDS)
