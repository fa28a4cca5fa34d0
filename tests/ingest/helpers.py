"""What tests of the library share."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable


def words(text: str) -> int:
    return len(re.findall(r"\w+|\W", text))


class Gate:
    """A token counter that holds the worker at texts containing "wait", and fails at "poison"."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.counted: list[str] = []

    def __call__(self, text: str) -> int:
        self.counted.append(text)
        if "wait" in text:
            self.reached.set()
            assert self.open.wait(10)
        if "poison" in text:
            raise MemoryError("too much")
        return words(text)


def eventually(true: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until `true()`, or fail."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
