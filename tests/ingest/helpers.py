"""What tests of ingestion share: counting without a model, a gate for the worker, documents put in and waited for."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from ingest.documents import Upload, read_text
from ingest.library import Library


def words(text: str) -> int:
    """Tokens without a model: words, and every other character."""
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


def upload(name: str, text: str, **metadata: Any) -> Upload:
    """A document."""
    return read_text(name, text, metadata=metadata, max_bytes=10_000_000)


def ingest(library: Library, *uploads: Upload) -> list[str]:
    """Ingest documents in one job; returns their ids."""
    job = library.wait(library.submit(uploads).id, 30)
    assert job.status == "done", job
    return [document.id for document in job.documents]
