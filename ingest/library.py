"""The library: documents submitted, cut and indexed in the background, listed, searched and deleted."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from ingest import retrieval
from ingest.database import Database, Page, decode_cursor, encode_cursor
from ingest.documents import Upload, as_utf8, encode_text
from ingest.embedder import Embedder
from ingest.embedding import Change, Vectors, VectorsState
from ingest.errors import InvalidInput, NotFound
from ingest.jobs import cancel, delete_document, read_changes, read_jobs
from ingest.records import PASSAGE_COLUMNS, Document, Filter, Job, JobChanges, JobDocument, StoredPassage, to_passage
from ingest.schema import migrations
from ingest.submissions import submit
from ingest.uploads import StoredUpload, UploadFolder
from ingest.worker import Worker

__all__ = [
    "Document",
    "Filter",
    "Job",
    "JobChanges",
    "JobDocument",
    "Library",
    "StoredPassage",
    "migrations",
]

MAX_LIMIT = 200
MAX_TOP_K = 50

# Counts up when the same bytes are read or cut otherwise than before: then they are no longer unchanged.
_READING = 2

# A book of a thousand pages is read and cut in seconds.
_SECONDS = 300.0

_DOCUMENT = (
    "number, id, name, media_type, metadata, sha256, size, tokens, passages, status, error, created_at,"
    " version, replaces, warnings"
)
_DOCUMENTS = "documents JOIN document_versions ON document_id = id"


class Library:
    """Documents and their passages in one database, with one background worker that ingests them.

    `count_tokens` measures text in model tokens, on the worker's thread; no passage has more than
    `passage_tokens`. `embedder` gives passages their vectors; None leaves search to full text. `tokenizer` names what
    counts: passages that were cut by another are not taken for these. Jobs that an earlier process left unfinished are
    resumed, and passages without a vector of this embedder are embedded in the background; uploads wait beside the
    database's file. A document that takes more than `seconds` to read and cut fails. While `busy()`, called on the
    worker's thread, reading takes a quarter of the time only, for somebody waits for an answer. `on_stored` is called,
    on that thread, with the id of each document that can be searched and those whose place it has taken. With
    `at_work` false jobs wait for another library on this database. Every method blocks; a write returns when it is
    committed. Close the library before its database.
    """

    def __init__(
        self,
        database: Database,
        count_tokens: Callable[[str], int],
        passage_tokens: int,
        embedder: Embedder | None = None,
        *,
        tokenizer: str = "",
        seconds: float = _SECONDS,
        busy: Callable[[], bool] = lambda: False,
        on_stored: Callable[[str, list[str]], None] = lambda *_: None,
        at_work: bool = True,
    ) -> None:
        self.embedder = embedder
        self._database = database
        self._cut_by = f"{passage_tokens} {tokenizer} {_READING}"
        self._uploads = UploadFolder(database.path.with_name(f"{database.path.name}-uploads"))
        waiting = database.read(lambda db: db.execute("SELECT document_id FROM uploads").fetchall())
        self._uploads.keep_only({row[0] for row in waiting})
        self._vectors = None if embedder is None else Vectors(database, embedder)
        self._worker = Worker(
            database,
            self._uploads,
            count_tokens,
            passage_tokens,
            self._vectors,
            cut_by=self._cut_by,
            seconds=seconds,
            busy=busy,
            on_stored=on_stored,
        )
        if at_work:
            self._worker.start()

    @property
    def vectors(self) -> VectorsState | None:
        """How far search by vectors is; None without an embedder."""
        return None if self._vectors is None else self._vectors.state

    def wait_for_vectors(self, timeout: float | None = None) -> bool:
        """Block until every passage has its vector: True, also without an embedder; or for `timeout` seconds: False."""
        return self._vectors is None or self._vectors.wait(timeout)

    def receive(
        self,
        name: str,
        source: BinaryIO,
        media_type: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        max_bytes: int,
    ) -> Upload | StoredUpload:
        """Take in the bytes of a file, for `submit` or `discard`. A small text is read, other files go to disk first.

        Raises as `ingest.documents.read_upload` does; what is wrong inside a large or a binary file shows when it is
        read, and is then the error of its document.
        """
        return self._uploads.take(name, source, media_type, metadata, max_bytes=max_bytes)

    def receive_text(
        self,
        name: str,
        text: str,
        media_type: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        max_bytes: int,
    ) -> Upload | StoredUpload:
        """`receive` for what arrived as text, as in `ingest.documents.read_text`."""
        source = io.BytesIO(encode_text(name, text))
        return self._uploads.take(name, source, as_utf8(media_type), metadata, max_bytes=max_bytes)

    def discard(self, uploads: Sequence[Upload | StoredUpload]) -> None:
        """Let go of uploads that will not be submitted."""
        for upload in uploads:
            if isinstance(upload, StoredUpload):
                self._uploads.remove(upload.id)

    def submit(self, uploads: Sequence[Upload | StoredUpload], failed: Sequence[tuple[str, str]] = ()) -> Job:
        """Record documents and the job that will ingest them, in one transaction; returns the queued job.

        A document of a name that is there already is its next version: it takes the place of the others once it is
        done, and not if it fails. The same bytes with the same metadata under the same name are `unchanged`, and a
        job of nothing else is done at once. `failed` are (name, reason) of files that could not be read: recorded
        as failed documents. A job of nothing else is failed at once. Raises InvalidInput for no file at all.
        """
        if not uploads and not failed:
            raise InvalidInput("files", "nothing", "a submission needs at least one document")
        job = self._database.write(lambda db: submit(db, uploads, failed, self._cut_by)).result()
        recorded = {document.id for document in job.documents}
        self.discard([u for u in uploads if isinstance(u, StoredUpload) and u.id not in recorded])
        self._worker.wake()
        return job

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: documents that are done stay, the others are `cancelled`. A finished job stays as it is.

        Raises NotFound.
        """
        if dropped := self._database.write(lambda db: cancel(db, job_id)).result():
            self._worker.drop(dropped)
        return self.job(job_id)

    def changes(self, job_id: str, after: int = 0) -> JobChanges:
        """What changed in a job after its change number `after`. Raises NotFound."""
        changes = self._database.read(lambda db: read_changes(db, job_id, after))
        if changes is None:
            raise NotFound("job", job_id)
        return changes

    def subscribe(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Have `listener` called, on any thread, after each change of any job; returns what ends that."""
        return self._worker.subscribe(listener)

    def job(self, id: str) -> Job:
        """The job and the state of each of its documents. Raises NotFound."""
        jobs = self._database.read(lambda db: read_jobs(db, "WHERE id = ?", [id]))
        if not jobs:
            raise NotFound("job", id)
        return jobs[0][1]

    def jobs(self, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        """Jobs, newest first. Raises InvalidInput for a bad cursor or a limit outside 1..200."""
        where, bound = _before(cursor)
        _check_count("limit", limit, MAX_LIMIT)
        rows = self._database.read(
            lambda db: read_jobs(db, f"{where} ORDER BY number DESC LIMIT ?", [*bound, limit + 1])
        )
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
            lambda db: db.execute(f"SELECT {_DOCUMENT} FROM {_DOCUMENTS} WHERE id = ?", [id]).fetchall()
        )
        if not rows:
            raise NotFound("document", id)
        return _document(rows[0])

    def documents(self, cursor: str | None = None, limit: int = 50) -> Page[Document]:
        """Documents, newest first. Raises InvalidInput for a bad cursor or a limit outside 1..200."""
        where, bound = _before(cursor)
        _check_count("limit", limit, MAX_LIMIT)
        sql = f"SELECT {_DOCUMENT} FROM {_DOCUMENTS} {where} ORDER BY number DESC LIMIT ?"
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
        """Delete a document, its passages and its index rows, ingested or not. Raises NotFound.

        Once the worker has nothing else to do, nothing of it is left in the database's files either; of the jobs that
        had it stay its id and its state.
        """
        number = self._database.write(lambda db: delete_document(db, document_id), self._forget).result()
        if number is None:
            raise NotFound("document", document_id)
        self._worker.drop([document_id])

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


def _document(row: tuple[Any, ...]) -> Document:
    fields = dict(zip(Document.__struct_fields__, row[1:], strict=True))
    parsed = {name: json.loads(fields[name]) for name in ("metadata", "warnings")}
    return Document(**{**fields, **parsed})


def _before(cursor: str | None) -> tuple[str, list[int]]:
    return ("", []) if cursor is None else ("WHERE number < ?", [decode_cursor(cursor)])


def _check_count(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidInput(field, count, f"it must be between 1 and {most}")


def _page(rows: list[tuple[int, Any]], limit: int) -> Page[Any]:
    """A page of `limit` from numbered rows, of which one more was asked for to see whether others follow."""
    more = len(rows) > limit
    return Page([row for _, row in rows[:limit]], encode_cursor(rows[limit - 1][0]) if more else None)
