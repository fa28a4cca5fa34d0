"""One SQLite file: a writer thread fed by a queue, and a read-only connection for each reading thread."""

from __future__ import annotations

import base64
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import sqlite_utils
from sqlite_utils.migrations import Migrations

from ingest.errors import InvalidInput

T = TypeVar("T")

_BUSY_SECONDS = 10.0
_MAX_ROWID = 2**63 - 1


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list. `next_cursor` asks for the page after it, and is None on the last one."""

    items: list[T]
    next_cursor: str | None


class CannotOpen(RuntimeError):
    """The file is unwritable, not a database, or written by a newer version of this program."""


def encode_cursor(rowid: int) -> str:
    """The opaque cursor for the row after which the next page starts."""
    return base64.urlsafe_b64encode(str(rowid).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> int:
    """The rowid inside a cursor made by `encode_cursor`. Raises InvalidInput for anything else."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        rowid = int(base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii"))
    except ValueError:
        rowid = -1
    if not 0 <= rowid <= _MAX_ROWID or encode_cursor(rowid) != cursor:
        raise InvalidInput("cursor", cursor, "it must be a next_cursor that a list returned")
    return rowid


class _Write(Generic[T]):
    def __init__(self, work: Callable[[sqlite_utils.Database], T], then: Callable[[T], None] | None) -> None:
        self.work = work
        self.then = then
        self.future: Future[T] = Future()
        # From the start: who no longer waits for a write, such as a client that is gone, must not make it vanish.
        self.future.set_running_or_notify_cancel()

    def run(self, db: sqlite_utils.Database) -> None:
        try:
            db.execute("BEGIN IMMEDIATE")
            result = self.work(db)
            db.commit()
            if self.then is not None:
                self.then(result)
        except BaseException as error:
            db.rollback()
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _EmptyLog(_Write[bool]):
    """Copies the write-ahead log into the database's file and empties it; False if a reader is in the way."""

    def __init__(self) -> None:
        super().__init__(lambda db: bool(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0), None)

    def run(self, db: sqlite_utils.Database) -> None:
        try:
            # Not inside a transaction, and without the writers behind it waiting for a reader.
            db.execute("PRAGMA busy_timeout = 0")
            self.future.set_result(self.work(db))
        except BaseException as error:
            self.future.set_exception(error)
        finally:
            db.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")


class _Reader:
    def __init__(self, db: sqlite_utils.Database) -> None:
        self.db = db
        self.thread = threading.current_thread()
        # Held while reading, so that close() never pulls a connection from under a running statement.
        self.lock = threading.RLock()


class Database:
    """One SQLite file: one writer thread fed by a queue, thread-local read-only connections.

    Opening creates the file when absent (not its folder), switches it to WAL and applies `migrations`.
    Raises CannotOpen, naming the path and the reason.
    """

    def __init__(self, path: Path, migrations: Migrations) -> None:
        self.path = path
        self._migrations = migrations
        self._queue: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._readers: list[_Reader] = []
        self._local = threading.local()
        opened: Future[None] = Future()
        self._writer = threading.Thread(target=self._run, args=(opened,), name=f"writer {path.name}", daemon=True)
        self._writer.start()
        try:
            opened.result()
        except (sqlite3.Error, OSError, CannotOpen) as error:
            self._closed = True
            self._writer.join()
            raise CannotOpen(f"cannot open database {path}: {error}") from error

    def write(self, work: Callable[[sqlite_utils.Database], T], then: Callable[[T], None] | None = None) -> Future[T]:
        """Queue `work` for the writer thread, which runs it inside BEGIN IMMEDIATE, first come first served.

        The future resolves after the commit, and after `then`, which the writer thread calls with the result once it
        is committed: what is held in memory follows the database in the order of commits. Whatever `work` raises rolls
        the transaction back and lands in the future. `work` must return values, not cursors. Raises RuntimeError once
        closed.
        """
        return self._enqueue(_Write(work, then))

    def empty_log(self) -> Future[bool]:
        """Queue that the write-ahead log is emptied, so that nothing deleted is left in it.

        False if a reader was in the way. Raises RuntimeError once closed.
        """
        return self._enqueue(_EmptyLog())

    def _enqueue(self, item: _Write[T]) -> Future[T]:
        with self._lock:
            self._refuse_if_closed()
            self._queue.put(item)
        return item.future

    def read(self, work: Callable[[sqlite_utils.Database], T]) -> T:
        """Run `work` on the calling thread's own read-only connection, over one consistent snapshot.

        Never waits for the writer. `work` must return values, not cursors. Raises RuntimeError once closed.
        """
        reader = self._reader()
        with reader.lock:
            self._refuse_if_closed()
            if reader.db.conn.in_transaction:
                return work(reader.db)
            reader.db.execute("BEGIN")
            try:
                return work(reader.db)
            finally:
                reader.db.rollback()

    def close(self) -> None:
        """Finish every queued write, stop the writer, close all connections. Again: does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
            readers, self._readers = self._readers, []
        self._writer.join()
        for reader in readers:
            with reader.lock:
                reader.db.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"database {self.path} is closed")

    def _run(self, opened: Future[None]) -> None:
        try:
            db = self._open()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        while (item := self._queue.get()) is not None:
            item.run(db)
        db.close()

    def _open(self) -> sqlite_utils.Database:
        db = self._connect()
        try:
            db.enable_wal()
            # IMMEDIATE also refuses a read-only file now rather than at the first write, and makes two
            # processes that start together migrate one after the other.
            db.execute("BEGIN IMMEDIATE")
            self._migrate(db)
            db.commit()
        except BaseException:
            db.close()
            raise
        return db

    def _migrate(self, db: sqlite_utils.Database) -> None:
        # Against an empty database every registered migration is pending.
        known = {migration.name for migration in self._migrations.pending(sqlite_utils.Database(memory=True))}
        unknown = {migration.name for migration in self._migrations.applied(db)} - known
        if unknown:
            raise CannotOpen(f"its schema is newer than this program: {', '.join(sorted(unknown))}")
        self._migrations.apply(db)

    def _connect(self) -> sqlite_utils.Database:
        # No implicit transactions: every BEGIN here is spelled out.
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            # What is deleted is overwritten with zeros, so that it is gone from the file as well.
            connection.execute("PRAGMA secure_delete = ON")
            return sqlite_utils.Database(connection)
        except BaseException:
            connection.close()
            raise

    def _reader(self) -> _Reader:
        reader: _Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            db = self._connect()
            db.execute("PRAGMA query_only = ON")
            reader = self._local.reader = _Reader(db)
            self._adopt(reader)
        return reader

    def _adopt(self, reader: _Reader) -> None:
        with self._lock:
            if self._closed:
                reader.db.close()
                self._refuse_if_closed()
            dead = [other for other in self._readers if not other.thread.is_alive()]
            self._readers = [other for other in self._readers if other.thread.is_alive()] + [reader]
        for other in dead:
            other.db.close()
