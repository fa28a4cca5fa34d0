"""What the library hands out: documents, jobs, stored passages, and the filter a search takes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ingest.blocks import Kind

DocumentStatus = Literal["queued", "running", "done", "failed"]
JobStatus = Literal["queued", "running", "done", "failed", "cancelled"]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document's record. `size` is bytes as uploaded; `tokens` and `passages` are 0 until it is done."""

    id: str
    name: str
    media_type: str
    metadata: dict[str, Any]
    sha256: str
    size: int
    tokens: int
    passages: int
    status: DocumentStatus
    error: str | None
    created_at: str


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One document of a job. It stays after the document is deleted; `cancelled` if that came first."""

    id: str
    name: str
    status: JobStatus
    error: str | None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The ingestion of one submission. `failed` only when no document of it was ingested."""

    id: str
    status: JobStatus
    documents: list[JobDocument]
    created_at: str
    finished_at: str | None


class StoredPassage(msgspec.Struct, frozen=True, kw_only=True):
    """A passage of the document `name`, with exact character offsets. `score`: larger is better."""

    id: str
    document_id: str
    name: str
    text: str
    kind: Kind
    heading: str
    start: int
    end: int
    tokens: int
    part: str | None
    score: float | None = None


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """What a search is limited to; every condition given must hold. `metadata` matches values exactly."""

    document_id: str | list[str] | None = None
    name: str | None = None
    kind: str | None = None
    metadata: dict[str, Any] = {}
