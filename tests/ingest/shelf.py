"""What tests of the library share: counting without a model, and documents put in and waited for."""

from __future__ import annotations

import re
from typing import Any

from ingest.documents import Upload, read_text
from ingest.library import Library


def words(text: str) -> int:
    """Tokens without a model: words, and every other character."""
    return len(re.findall(r"\w+|\W", text))


def upload(name: str, text: str, **metadata: Any) -> Upload:
    """A document."""
    return read_text(name, text, metadata=metadata, max_bytes=10_000_000)


def ingest(library: Library, *uploads: Upload) -> list[str]:
    """Ingest documents in one job; returns their ids."""
    job = library.wait(library.submit(uploads).id, 30)
    assert job.status == "done", job
    return [document.id for document in job.documents]
