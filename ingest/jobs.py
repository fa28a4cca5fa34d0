"""Jobs: one thread that takes queued documents, cuts them and puts their passages into the index."""

from __future__ import annotations

import logging
import secrets
import sqlite3
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import sqlite_utils

from ingest.database import Database
from ingest.embedding import Change, Vectors
from ingest.passages import Passage, cut

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_MAX_ERROR = 500
_EMBEDDED_AT_ONCE = 64


class _Stopped(BaseException):
    """Leaves a document half cut, because the worker is to stop. Not an Exception: it is no failure."""


class _Task(NamedTuple):
    number: int
    document_id: str


def now() -> str:
    """This moment in UTC as ISO 8601 with milliseconds and Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_id(prefix: str) -> str:
    """`prefix` and 16 random hexadecimal characters."""
    return f"{prefix}_{secrets.token_hex(8)}"


class Worker:
    """Works off the jobs in the database, oldest first, one document at a time.

    Each document becomes searchable in one transaction. What an earlier process left unfinished is taken up
    again. `count_tokens` is called on the worker's thread, which embeds the passages too, if there are `vectors`.
    """

    def __init__(
        self,
        database: Database,
        count_tokens: Callable[[str], int],
        passage_tokens: int,
        vectors: Vectors | None,
    ) -> None:
        self._database = database
        self._count_tokens = count_tokens
        self._passage_tokens = passage_tokens
        self._vectors = vectors
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ingestion", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that there is a new job."""
        self._wake.set()

    def wait_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Block until `ready()`, asked after each finished job: True; or for `timeout` seconds: False.

        Raises RuntimeError when the worker stops first.
        """
        with self._progress:
            if not self._progress.wait_for(lambda: ready() or self._stopping.is_set(), timeout):
                return False
            if not ready():
                raise RuntimeError("the library is closed")
            return True

    def stop(self) -> None:
        """Stop at once. A document half cut is left as it was, for the next start to take up."""
        self._stopping.set()
        self._wake.set()
        self._announce()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                while not self._stopping.is_set() and self._finish_next_job():
                    self._announce()
            except _Stopped:
                return
            except Exception:
                # A full disk, say: the job stays as it is, so nothing is lost by waiting.
                _log.exception("ingestion failed; trying again in %s s", _RETRY_SECONDS)
                self._stopping.wait(_RETRY_SECONDS)
                self._wake.set()
            self._wake.wait()

    def _announce(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _finish_next_job(self) -> bool:
        job_id = self._database.read(_next_job)
        if job_id is None:
            return False
        while (task := self._database.write(partial(_start_next, job_id=job_id)).result()) is not None:
            self._ingest(task)
            if self._stopping.is_set():
                return False
        self._database.write(partial(_finish, job_id=job_id)).result()
        return True

    def _ingest(self, task: _Task) -> None:
        found = self._database.read(lambda db: _text(db, task))
        if found is None:
            return
        try:
            passages = cut(*found, self._count, self._passage_tokens)
            self._store(task, passages)
        except sqlite3.OperationalError:
            raise
        except Exception as error:
            _log.warning("document %s failed", task.document_id, exc_info=True)
            reason = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
            self._database.write(lambda db: _settle(db, task, "failed", reason)).result()

    def _store(self, task: _Task, passages: list[Passage]) -> None:
        """Record passages and vectors in one transaction."""
        vectors = self._vectors
        if vectors is None:
            self._database.write(lambda db: _store(db, task, passages)).result()
            return
        embedded: list[bytes] = []
        for start in range(0, len(passages), _EMBEDDED_AT_ONCE):
            if self._stopping.is_set():
                raise _Stopped
            batch = passages[start : start + _EMBEDDED_AT_ONCE]
            embedded += vectors.embed((passage.heading, passage.text) for passage in batch)

        def work(db: sqlite_utils.Database) -> Change:
            ids, replaced = _store(db, task, passages)
            return Change(replaced, vectors.insert(db, zip(ids, embedded, strict=False)))

        self._database.write(work, vectors.apply).result()

    def _count(self, text: str) -> int:
        if self._stopping.is_set():
            raise _Stopped
        return self._count_tokens(text)


def remove_document(db: sqlite_utils.Database, document_id: str) -> int | None:
    """Delete a document with its passages, index rows and vectors. Inside a write.

    Returns its number, None if there is no such document.
    """
    db.execute(
        "UPDATE job_documents SET status = 'cancelled', error = 'deleted before it was ingested'"
        " WHERE document_id = ? AND status IN ('queued', 'running')",
        [document_id],
    )
    db.execute("DELETE FROM passages WHERE document_id = ?", [document_id])
    row = db.execute("SELECT number FROM documents WHERE id = ?", [document_id]).fetchone()
    db.execute("DELETE FROM documents WHERE id = ?", [document_id])
    return None if row is None else row[0]


def _next_job(db: sqlite_utils.Database) -> str | None:
    row = db.execute("SELECT id FROM jobs WHERE finished_at IS NULL ORDER BY number LIMIT 1").fetchone()
    return None if row is None else row[0]


def _start_next(db: sqlite_utils.Database, job_id: str) -> _Task | None:
    # `running` is what a process that stopped half way left behind.
    row = db.execute(
        "SELECT number, document_id FROM job_documents"
        " WHERE job_id = ? AND status IN ('queued', 'running') ORDER BY number LIMIT 1",
        [job_id],
    ).fetchone()
    if row is None:
        return None
    task = _Task(*row)
    db.execute("UPDATE jobs SET status = 'running' WHERE id = ?", [job_id])
    _settle(db, task, "running", None)
    return task


def _text(db: sqlite_utils.Database, task: _Task) -> tuple[str, str] | None:
    row = db.execute("SELECT text, media_type FROM documents WHERE id = ?", [task.document_id]).fetchone()
    return None if row is None else (row[0], row[1])


def _store(db: sqlite_utils.Database, task: _Task, passages: list[Passage]) -> tuple[list[str], list[int]]:
    """(the passages' ids, the numbers of the documents they replace); nothing if the document is gone meanwhile."""
    row = db.execute("SELECT number, name FROM documents WHERE id = ?", [task.document_id]).fetchone()
    if row is None:
        return [], []
    older = db.execute("SELECT id, number FROM documents WHERE name = ? AND number < ?", [row[1], row[0]]).fetchall()
    for document_id, _ in older:
        remove_document(db, document_id)
    ids = [new_id("pas") for _ in passages]
    db.conn.executemany(
        'INSERT INTO passages (id, document_id, ordinal, kind, heading, "start", "end", tokens, part, text)'
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (id, task.document_id, n, p.kind, p.heading, p.start, p.end, p.tokens, p.part, p.text)
            for n, (id, p) in enumerate(zip(ids, passages, strict=True))
        ),
    )
    db.execute(
        "UPDATE documents SET tokens = ?, passages = ? WHERE id = ?",
        [sum(passage.tokens for passage in passages), len(passages), task.document_id],
    )
    _settle(db, task, "done", None)
    return ids, [number for _, number in older]


def _settle(db: sqlite_utils.Database, task: _Task, status: str, error: str | None) -> None:
    db.execute("UPDATE documents SET status = ?, error = ? WHERE id = ?", [status, error, task.document_id])
    db.execute(
        "UPDATE job_documents SET status = ?, error = ? WHERE number = ? AND status != 'cancelled'",
        [status, error, task.number],
    )


def _finish(db: sqlite_utils.Database, job_id: str) -> None:
    db.execute(
        """
        UPDATE jobs SET finished_at = ?, status = (
            SELECT CASE
                WHEN SUM(status = 'done') > 0 THEN 'done'
                WHEN SUM(status = 'failed') > 0 THEN 'failed'
                ELSE 'cancelled'
            END
            FROM job_documents WHERE job_id = jobs.id
        )
        WHERE id = ?
        """,
        [now(), job_id],
    )
