"""What the library hands out: documents, jobs, stored passages, and the filter a search takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ingest.blocks import Kind

Status = Literal["queued", "running", "done", "failed", "cancelled"]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document's record. `size` is bytes as uploaded; `tokens` and `passages` are 0 until it is done.

    `version` counts the documents of this name from 1. `replaces` is the id of the one whose place it takes: that one
    is searched until this one is done, and is then gone. `warnings`: what of the file could not be read and was left
    out, such as charts.
    """

    id: str
    name: str
    media_type: str
    metadata: dict[str, Any]
    sha256: str
    size: int
    tokens: int
    passages: int
    status: Status
    error: str | None
    created_at: str
    version: int
    replaces: str | None
    warnings: list[str]


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One document of a job. It stays after the document is deleted, without its name; `cancelled` if that came first.

    `unchanged`: the same bytes under the same name with the same metadata were there already; `id` is theirs, and
    nothing was done. `version`, `replaces` and `warnings` are those of the document.
    """

    id: str
    name: str
    status: Literal[Status, "unchanged"]
    error: str | None
    version: int
    replaces: str | None = None
    warnings: list[str] = []


class JobChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in a job: documents with the number of their latest change, in its order.

    `counts`: documents by state. `last`: the number of the job's latest change.
    """

    documents: list[tuple[int, JobDocument]]
    status: Status
    finished_at: str | None
    counts: dict[str, int]
    last: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The ingestion of one submission. `failed` only when no document of it is there."""

    id: str
    status: Status
    documents: list[JobDocument]
    created_at: str
    finished_at: str | None


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Why a search found a passage: its rank in each list, from 1; None where that list does not have it."""

    bm25: int | None = None
    vector: int | None = None


class StoredPassage(msgspec.Struct, frozen=True, kw_only=True):
    """A passage of the document `name`, with exact character offsets.

    A search adds `ranks` and `score`, fused from them: 1 for the first of every list that was searched, towards 0
    further down. It says where a passage stands among all for one query, not how well it matches.
    """

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
    ranks: Ranks | None = None


# What a query selects to make a passage of, from passages and documents.
PASSAGE_COLUMNS = (
    "passages.id, document_id, documents.name, passages.text, kind, passages.heading,"
    ' "start", "end", passages.tokens, part'
)


def to_passage(row: Sequence[Any], score: float | None = None, ranks: Ranks | None = None) -> StoredPassage:
    """The passage of a row of PASSAGE_COLUMNS."""
    fields = dict(zip(StoredPassage.__struct_fields__, row, strict=False))
    return StoredPassage(**fields, score=score, ranks=ranks)


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """What a search is limited to; every condition given must hold. `metadata` matches values exactly.

    path: of the document's name, upper and lower case told apart. With a `*` (any characters, `/` among them, or none)
    or a `?` (any one character) the whole name must match; `docs/*.md` finds docs/a.md and docs/old/b.md. Without, it
    is a file or a folder: `docs` finds docs and docs/a.md, not docs2/a.md. Every other character stands for itself.
    """

    document_id: str | list[str] | None = None
    name: str | None = None
    path: str | None = None
    kind: str | None = None
    metadata: dict[str, Any] = {}
