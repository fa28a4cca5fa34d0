"""The library: documents submitted, cut and indexed in the background, listed, searched and deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import sqlite_utils

from ingest import retrieval
from ingest.database import Database, Page, decode_cursor, encode_cursor
from ingest.documents import Upload, printable_name
from ingest.embedders import Embedder
from ingest.embedding import Change, Vectors, VectorsState
from ingest.errors import InvalidInput, NotFound
from ingest.jobs import Worker, new_id, now, remove_document
from ingest.records import PASSAGE_COLUMNS, Document, Filter, Job, JobDocument, StoredPassage, to_passage
from ingest.schema import migrations

__all__ = [
    "Document",
    "Filter",
    "Job",
    "JobDocument",
    "Library",
    "StoredPassage",
    "migrations",
]

MAX_LIMIT = 200
MAX_TOP_K = 50

_MAX_REASON = 500

_DOCUMENT = "number, id, name, media_type, metadata, sha256, size, tokens, passages, status, error, created_at"


class Library:
    """Documents and their passages in one database, with one background worker that ingests them.

    `count_tokens` measures text in model tokens, on the worker's thread; no passage has more than
    `passage_tokens`. `embedder` gives passages their vectors; None leaves search to full text. Jobs that an earlier
    process left unfinished are resumed, and passages without a vector of this embedder are embedded in the background.
    Every method blocks; a write returns when it is committed. Close the library before its database.
    """

    def __init__(
        self,
        database: Database,
        count_tokens: Callable[[str], int],
        passage_tokens: int,
        embedder: Embedder | None = None,
    ) -> None:
        self._database = database
        self._vectors = None if embedder is None else Vectors(database, embedder)
        self._worker = Worker(database, count_tokens, passage_tokens, self._vectors)

    @property
    def vectors(self) -> VectorsState | None:
        """How far search by vectors is; None without an embedder."""
        return None if self._vectors is None else self._vectors.state

    def wait_for_vectors(self, timeout: float | None = None) -> bool:
        """Block until every passage has its vector: True, also without an embedder; or for `timeout` seconds: False."""
        return self._vectors is None or self._vectors.wait(timeout)

    def submit(self, uploads: Sequence[Upload], failed: Sequence[tuple[str, str]] = ()) -> Job:
        """Record documents and the job that will ingest them, in one transaction; returns the queued job.

        `failed` are (name, reason) of files that could not be read: recorded as failed documents. A job of
        nothing else is failed at once. Raises InvalidInput for no file at all.
        """
        if not uploads and not failed:
            raise InvalidInput("files", "nothing", "a submission needs at least one document")
        job = self._database.write(lambda db: _submit(db, uploads, failed)).result()
        self._worker.wake()
        return job

    def job(self, id: str) -> Job:
        """The job and the state of each of its documents. Raises NotFound."""
        jobs = self._database.read(lambda db: _jobs(db, "WHERE id = ?", [id]))
        if not jobs:
            raise NotFound("job", id)
        return jobs[0][1]

    def jobs(self, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        """Jobs, newest first. Raises InvalidInput for a bad cursor or a limit outside 1..200."""
        where, bound = _before(cursor)
        _check_count("limit", limit, MAX_LIMIT)
        rows = self._database.read(lambda db: _jobs(db, f"{where} ORDER BY number DESC LIMIT ?", [*bound, limit + 1]))
        return _page(rows, limit)

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The job once it is finished. Raises TimeoutError after `timeout` seconds, NotFound, or RuntimeError
        when the library is closed meanwhile."""
        if not self._worker.wait_until(lambda: self.job(job_id).finished_at is not None, timeout):
            raise TimeoutError(f"job {job_id} is not finished after {timeout} s")
        return self.job(job_id)

    def document(self, id: str) -> Document:
        """The record of one document. Raises NotFound."""
        rows = self._database.read(
            lambda db: db.execute(f"SELECT {_DOCUMENT} FROM documents WHERE id = ?", [id]).fetchall()
        )
        if not rows:
            raise NotFound("document", id)
        return _document(rows[0])

    def documents(self, cursor: str | None = None, limit: int = 50) -> Page[Document]:
        """Documents, newest first. Raises InvalidInput for a bad cursor or a limit outside 1..200."""
        where, bound = _before(cursor)
        _check_count("limit", limit, MAX_LIMIT)
        sql = f"SELECT {_DOCUMENT} FROM documents {where} ORDER BY number DESC LIMIT ?"
        rows = self._database.read(lambda db: db.execute(sql, [*bound, limit + 1]).fetchall())
        return _page([(row[0], _document(row)) for row in rows], limit)

    def document_ids(self) -> set[str]:
        """Every document's id."""
        rows = self._database.read(lambda db: db.execute("SELECT id FROM documents").fetchall())
        return {row[0] for row in rows}

    def passages(self, document_id: str, cursor: str | None = None, limit: int = 50) -> Page[StoredPassage]:
        """A document's passages in reading order; none before it is done. Raises NotFound, InvalidInput."""
        after = -1 if cursor is None else decode_cursor(cursor)
        _check_count("limit", limit, MAX_LIMIT)
        self.document(document_id)
        sql = (
            f"SELECT ordinal, {PASSAGE_COLUMNS} FROM passages JOIN documents ON documents.id = document_id"
            " WHERE document_id = ? AND ordinal > ? ORDER BY ordinal LIMIT ?"
        )
        rows = self._database.read(lambda db: db.execute(sql, [document_id, after, limit + 1]).fetchall())
        return _page([(row[0], to_passage(row[1:])) for row in rows], limit)

    def delete(self, document_id: str) -> None:
        """Delete a document, its passages and its index rows, ingested or not. Raises NotFound."""
        number = self._database.write(lambda db: remove_document(db, document_id), self._forget).result()
        if number is None:
            raise NotFound("document", document_id)

    def _forget(self, document: int | None) -> None:
        if self._vectors is not None and document is not None:
            self._vectors.apply(Change([document], []))

    def search(self, query: str, top_k: int, filter: Filter | None = None) -> list[StoredPassage]:
        """The `top_k` passages that match `query` best, best first; [] for a query without a word. Any text is a query.

        Full text (bm25, any word of the query) and, with an embedder, vectors are searched, and fused by rank; each
        passage says its rank in both. A passage without a vector as yet is found by its words. Only ingested documents
        have passages; of these, `filter` says which are searched. Raises InvalidInput for a `top_k` outside 1..50 or a
        bad filter.
        """
        _check_count("top_k", top_k, MAX_TOP_K)
        return retrieval.search(self._database, self._vectors, query, top_k, filter or Filter())

    def close(self) -> None:
        """Stop the background threads. Unfinished jobs are resumed by the next library on this database."""
        self._worker.stop()
        if self._vectors is not None:
            self._vectors.stop()


def _submit(db: sqlite_utils.Database, uploads: Sequence[Upload], failed: Sequence[tuple[str, str]]) -> Job:
    created_at = now()
    refused = [
        (Upload(name=printable_name(name), text="", media_type="", metadata={}, size=0, sha256=""), reason)
        for name, reason in failed
    ]
    job = Job(
        id=new_id("job"),
        status="queued" if uploads else "failed",
        documents=[_record(db, upload, None, created_at) for upload in uploads]
        + [_record(db, upload, _encodable(reason), created_at) for upload, reason in refused],
        created_at=created_at,
        finished_at=None if uploads else created_at,
    )
    db.execute(
        "INSERT INTO jobs (id, status, created_at, finished_at) VALUES (?, ?, ?, ?)",
        [job.id, job.status, job.created_at, job.finished_at],
    )
    db.conn.executemany(
        "INSERT INTO job_documents (job_id, document_id, name, status, error) VALUES (?, ?, ?, ?, ?)",
        [(job.id, document.id, document.name, document.status, document.error) for document in job.documents],
    )
    return job


def _record(db: sqlite_utils.Database, upload: Upload, error: str | None, created_at: str) -> JobDocument:
    document = JobDocument(
        id=new_id("doc"), name=upload.name, status="queued" if error is None else "failed", error=error
    )
    db.execute(
        "INSERT INTO documents"
        " (id, name, media_type, metadata, sha256, size, status, error, created_at, text)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            document.id,
            upload.name,
            upload.media_type,
            json.dumps(upload.metadata, ensure_ascii=False),
            upload.sha256,
            upload.size,
            document.status,
            error,
            created_at,
            upload.text,
        ],
    )
    return document


def _encodable(reason: str) -> str:
    return reason[:_MAX_REASON].encode(errors="replace").decode()


def _jobs(db: sqlite_utils.Database, clause: str, bound: list[Any]) -> list[tuple[int, Job]]:
    rows = db.execute(f"SELECT number, id, status, created_at, finished_at FROM jobs {clause}", bound).fetchall()
    documents: dict[str, list[JobDocument]] = {row[1]: [] for row in rows}
    for job_id, id, name, status, error in db.execute(
        "SELECT job_id, document_id, name, status, error FROM job_documents"
        " WHERE job_id IN (SELECT value FROM json_each(?)) ORDER BY number",
        [json.dumps(list(documents))],
    ):
        documents[job_id].append(JobDocument(id=id, name=name, status=status, error=error))
    return [
        (number, Job(id=id, status=status, documents=documents[id], created_at=created, finished_at=finished))
        for number, id, status, created, finished in rows
    ]


def _document(row: tuple[Any, ...]) -> Document:
    fields = dict(zip(Document.__struct_fields__, row[1:], strict=True))
    return Document(**{**fields, "metadata": json.loads(fields["metadata"])})


def _before(cursor: str | None) -> tuple[str, list[int]]:
    return ("", []) if cursor is None else ("WHERE number < ?", [decode_cursor(cursor)])


def _check_count(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidInput(field, count, f"it must be between 1 and {most}")


def _page(rows: list[tuple[int, Any]], limit: int) -> Page[Any]:
    """A page of `limit` from numbered rows, of which one more was asked for to see whether others follow."""
    more = len(rows) > limit
    return Page([row for _, row in rows[:limit]], encode_cursor(rows[limit - 1][0]) if more else None)
