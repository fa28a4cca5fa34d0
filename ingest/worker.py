"""The worker: one thread that takes queued documents, has them read, cuts them, and puts them into the index."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

import msgspec
import sqlite_utils

from ingest.counting import TokenizerCounter
from ingest.database import Database
from ingest.embedding import Change, Vectors
from ingest.errors import InvalidInput, Unreadable
from ingest.jobs import (
    Task,
    Work,
    deletions_to_wipe,
    finish,
    merge_index,
    next_job,
    note_wiped,
    read_work,
    settle,
    start_next,
    still_waits,
    store,
)
from ingest.passages import Passage, cut
from ingest.reading import Cutting, Interrupted, Reader, Reading
from ingest.uploads import UploadFolder

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_MAX_ERROR = 500
_EMBEDDED_AT_ONCE = 64
# Shorter texts are cut sooner than a process starts.
_CUT_HERE = 16_000
# Deletions are wiped when nothing else was to be done for so long.
_IDLE_SECONDS = 1.0


class _Stopped(BaseException):
    """Leaves a document half cut, because the worker is to stop. Not an Exception: it is no failure."""


class _Dropped(BaseException):
    """Leaves a document, because its job was cancelled or it was deleted."""


class Worker:
    """Works off the jobs in the database, oldest first, one document at a time.

    Each document becomes searchable in one transaction. What an earlier process left unfinished is taken up
    again. `count_tokens` is called on the worker's thread, or if it is a TokenizerCounter in the process that reads;
    `cut_by` names it and the size. So are the passages embedded, if there are `vectors`. A document that takes more
    than `seconds` fails. While `busy()`, called on that thread, reading takes a share of the time only.
    `on_stored` is called on that thread with the id of each document that can be searched from now on, and those of the
    documents whose place it has taken; it must not block.
    """

    def __init__(
        self,
        database: Database,
        uploads: UploadFolder,
        count_tokens: Callable[[str], int],
        passage_tokens: int,
        vectors: Vectors | None,
        *,
        cut_by: str,
        seconds: float,
        busy: Callable[[], bool],
        on_stored: Callable[[str, list[str]], None],
    ) -> None:
        self._database = database
        self._uploads = uploads
        self._count_tokens = count_tokens
        self._passage_tokens = passage_tokens
        self._vectors = vectors
        self._cut_by = cut_by
        self._seconds = seconds
        self._on_stored = on_stored
        cutting = None
        if isinstance(count_tokens, TokenizerCounter):
            setting = vectors.embedder.setting if vectors else None
            cutting = Cutting(count_tokens.recipe, passage_tokens, setting)
        self._reader = Reader(cutting, busy)
        self._cuts_elsewhere = cutting is not None
        self._current: str | None = None
        # Of ids, which never come again, so that a late word on one document does not stop the next.
        self._dropped: set[str] = set()
        self._deadline = 0.0
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._listeners: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="ingestion", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def wake(self) -> None:
        """Say that there is a new job, or something deleted."""
        self._wake.set()

    def drop(self, document_ids: Collection[str]) -> None:
        """Leave these documents, which the database no longer asks for, and remove their bytes."""
        # The worker names its document before it asks the database for it, so it is seen in one of the two places.
        if (current := self._current) in document_ids:
            self._dropped.add(str(current))
        for document_id in document_ids:
            self._uploads.remove(document_id)
        self.announce()
        self.wake()

    def wait_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Block until `ready()`, asked after each change of a document or job: True; or for `timeout` seconds: False.

        Raises RuntimeError when the worker stops first.
        """
        with self._progress:
            if not self._progress.wait_for(lambda: ready() or self._stopping.is_set(), timeout):
                return False
            if not ready():
                raise RuntimeError("the library is closed")
            return True

    def subscribe(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Have `listener` called after each change of a document or job; returns what ends that. It must not block."""
        with self._progress:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._progress:
                self._listeners.remove(listener)

        return unsubscribe

    def announce(self) -> None:
        """Tell those who wait that something changed."""
        with self._progress:
            self._progress.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def stop(self) -> None:
        """Stop at once. A document half cut is left as it was, for the next start to take up."""
        self._stopping.set()
        self._wake.set()
        self.announce()
        if self._thread.is_alive():
            self._thread.join()
        self._reader.rest()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                while not self._stopping.is_set() and self._finish_next_job():
                    self.announce()
                self._reader.rest()
                self._wipe_when_idle()
            except _Stopped:
                return
            except Exception:
                # A full disk, say: the job stays as it is, so nothing is lost by waiting.
                _log.exception("ingestion failed; trying again in %s s", _RETRY_SECONDS)
                self._stopping.wait(_RETRY_SECONDS)
                self._wake.set()
            self._wake.wait()

    def _finish_next_job(self) -> bool:
        job_id = self._database.read(next_job)
        if job_id is None:
            return False
        while (task := self._database.write(partial(start_next, job_id=job_id)).result()) is not None:
            self._current = task.document_id
            try:
                self.announce()
                self._ingest(task)
            except _Dropped:
                pass
            finally:
                self._current = None
                self._dropped.discard(task.document_id)
            if not self._database.read(partial(still_waits, document_id=task.document_id)):
                self._uploads.remove(task.document_id)
            self.announce()
            if self._stopping.is_set():
                return False
        self._database.write(partial(finish, job_id=job_id)).result()
        return True

    def _ingest(self, task: Task) -> None:
        work = self._database.read(partial(read_work, task=task, cut_by=self._cut_by))
        if work is None:
            return
        self._deadline = time.monotonic() + self._seconds
        try:
            replaced = self._store(task, self._read(task, work))
            for document_id in replaced:
                self._uploads.remove(document_id)
            self._on_stored(task.document_id, replaced)
        except sqlite3.OperationalError:
            raise
        except Exception as error:
            expected = isinstance(error, InvalidInput | Unreadable)
            # Whoever sent it is told why.
            level = logging.INFO if expected else logging.WARNING
            _log.log(level, "document %s failed", task.document_id, exc_info=not expected)
            reason = (str(error) if expected else f"{type(error).__name__}: {error}")[:_MAX_ERROR]
            self._database.write(partial(settle, task=task, status="failed", error=reason)).result()

    def _read(self, task: Task, work: Work) -> Reading:
        if (twin := work.twin) is not None:
            return Reading(text=twin.text, media_type=twin.media_type, passages=twin.passages, warnings=twin.warnings)
        far = self._cuts_elsewhere and (self._reader.awake or len(work.text or "") > _CUT_HERE)
        if work.text is not None and not far:
            reading = Reading(text=work.text, media_type=work.media_type, warnings=work.warnings)
        else:
            reading = self._read_elsewhere(task, work)
        if reading.passages is not None:
            return reading
        passages = cut(reading.text, reading.media_type, self._count, self._passage_tokens, reading.blocks)
        return msgspec.structs.replace(reading, passages=passages)

    def _read_elsewhere(self, task: Task, work: Work) -> Reading:
        def stop() -> bool:
            return self._stopping.is_set() or task.document_id in self._dropped

        try:
            if work.text is not None:
                reading = self._reader.cut(work.text, work.media_type, seconds=self._seconds, stop=stop)
                return msgspec.structs.replace(reading, warnings=work.warnings)
            path = self._uploads.path(task.document_id)
            return self._reader.read(path, work.name, work.declared, seconds=self._seconds, stop=stop)
        except Interrupted:
            raise (_Stopped if self._stopping.is_set() else _Dropped) from None

    def _embed(self, vectors: Vectors, passages: list[Passage]) -> list[bytes]:
        embedded: list[bytes] = []
        for start in range(0, len(passages), _EMBEDDED_AT_ONCE):
            self._check()
            batch = passages[start : start + _EMBEDDED_AT_ONCE]
            embedded += vectors.embed((passage.heading, passage.text) for passage in batch)
        return embedded

    def _store(self, task: Task, reading: Reading) -> list[str]:
        """Record passages and vectors in one transaction; the ids of the documents whose place they take."""
        vectors, passages = self._vectors, reading.passages or []
        embedded = reading.vectors or (self._embed(vectors, passages) if vectors else [])

        def work(db: sqlite_utils.Database) -> tuple[list[str], Change]:
            stored = store(db, task, reading.text, reading.media_type, passages, self._cut_by, reading.warnings)
            pairs = zip(stored.passage_ids, embedded, strict=False)
            added = vectors.insert(db, pairs) if vectors else []
            return [id for id, _ in stored.replaced], Change([number for _, number in stored.replaced], added)

        def apply(done: tuple[list[str], Change]) -> None:
            if vectors is not None:
                vectors.apply(done[1])

        replaced, _ = self._database.write(work, apply).result()
        return replaced

    def _count(self, text: str) -> int:
        self._check()
        return self._count_tokens(text)

    def _check(self) -> None:
        if self._stopping.is_set():
            raise _Stopped
        if self._current in self._dropped:
            raise _Dropped
        if time.monotonic() > self._deadline:
            raise Unreadable(f"reading and cutting it took more than {self._seconds:g} s, the limit")

    def _wipe_when_idle(self) -> None:
        """Make deletions true on disk as well.

        SQLite overwrites what is deleted with zeros (`PRAGMA secure_delete`), but FTS5 only marks it, and the
        write-ahead log holds it until it is begun anew. Both cost too much for each deletion.
        """
        counted = self._database.read(deletions_to_wipe)
        if counted is None or self._wake.wait(_IDLE_SECONDS):
            return
        self._database.write(merge_index).result()
        if self._database.empty_log().result():
            self._database.write(partial(note_wiped, counted=counted)).result()
        else:
            # Somebody reads just now.
            self._wake.set()
