from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlite_utils
from hypothesis import given
from hypothesis import strategies as st
from sqlite_utils.migrations import Migrations

from ingest.database import CannotOpen, Database, decode_cursor, encode_cursor
from ingest.errors import InvalidInput


def notes(*extra: str) -> Migrations:
    migrations = Migrations("notes")

    @migrations(name="notes")
    def create(db: sqlite_utils.Database) -> None:
        db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")

    for name in extra:
        migrations(name=name)(lambda db: None)
    return migrations


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "a.db", notes())
    yield database
    database.close()


def add(text: str):
    return lambda db: db.execute("INSERT INTO notes (text) VALUES (?)", [text]).lastrowid


def texts(db: sqlite_utils.Database) -> list[str]:
    return [row[0] for row in db.execute("SELECT text FROM notes ORDER BY id")]


def stored(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [row[0] for row in connection.execute("SELECT text FROM notes ORDER BY id")]
    finally:
        connection.close()


def test_a_write_is_committed_before_its_future_resolves(database):
    assert database.write(add("one")).result() == 1
    assert stored(database.path) == ["one"]


def test_writes_run_in_order(database):
    futures = [database.write(add(str(n))) for n in range(50)]
    assert [future.result() for future in futures] == list(range(1, 51))
    assert database.read(texts) == [str(n) for n in range(50)]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_a_failing_write_is_rolled_back_and_the_writer_survives(database, error):
    def fail(db: sqlite_utils.Database) -> None:
        add("lost")(db)
        raise error

    assert database.write(fail).exception() is error
    database.write(add("kept")).result()
    assert stored(database.path) == ["kept"]


def test_a_statement_error_lands_in_the_future(database):
    assert isinstance(database.write(lambda db: db.execute("nonsense")).exception(), sqlite3.OperationalError)
    database.write(add("kept")).result()


def test_a_write_is_done_though_nobody_waits_for_it_any_more(database):
    started, release = threading.Event(), threading.Event()

    def hold(db):
        started.set()
        assert release.wait(10)

    async def leave() -> None:
        # As a request does whose client is gone.
        waiting = asyncio.ensure_future(asyncio.wrap_future(second))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    first = database.write(hold)
    assert started.wait(10)
    second = database.write(add("left"))
    asyncio.run(leave())
    assert not second.cancel()
    release.set()
    first.result(10)
    second.result(10)
    assert database.read(texts) == ["left"]


def test_reading_does_not_wait_for_a_running_write(database):
    started, release = threading.Event(), threading.Event()

    def slow(db: sqlite_utils.Database) -> None:
        add("unseen")(db)
        started.set()
        assert release.wait(5)

    future = database.write(slow)
    assert started.wait(5)
    assert database.read(texts) == []
    release.set()
    future.result()
    assert database.read(texts) == ["unseen"]


def test_one_read_sees_one_snapshot(database):
    def twice(db: sqlite_utils.Database) -> tuple[list[str], list[str]]:
        before = texts(db)
        database.write(add("later")).result()
        return before, texts(db)

    assert database.read(twice) == ([], [])


def test_readers_cannot_write(database):
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.read(add("no"))


def test_connections_are_set_up(database):
    def pragmas(db: sqlite_utils.Database) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in names]

    assert database.write(pragmas).result() == ["wal", 1, 1, 10_000]
    assert database.read(pragmas) == ["wal", 1, 1, 10_000]


def test_close_drains_the_queue_and_refuses_more(tmp_path):
    database = Database(tmp_path / "a.db", notes())
    futures = [database.write(add(str(n))) for n in range(20)]
    database.close()
    database.close()
    assert all(future.done() for future in futures)
    assert len(stored(database.path)) == 20
    with pytest.raises(RuntimeError, match=r"a\.db is closed"):
        database.write(add("late"))
    with pytest.raises(RuntimeError, match=r"a\.db is closed"):
        database.read(texts)


def test_close_closes_other_threads_connections(tmp_path):
    database = Database(tmp_path / "a.db", notes())
    connections: list[sqlite3.Connection] = []
    leave = threading.Event()

    def read() -> None:
        connections.append(database.read(lambda db: db.conn))
        leave.wait(5)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(connections) < 3:
        threading.Event().wait(0.01)
    database.close()
    leave.set()
    for thread in threads:
        thread.join()
    for connection in connections:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.db"]


def test_close_waits_for_a_running_read(tmp_path):
    database = Database(tmp_path / "a.db", notes())
    database.write(add("one")).result()
    started = threading.Event()
    seen: list[list[str]] = []

    def slow(db: sqlite_utils.Database) -> list[str]:
        started.set()
        threading.Event().wait(0.1)
        return texts(db)

    thread = threading.Thread(target=lambda: seen.append(database.read(slow)))
    thread.start()
    assert started.wait(5)
    database.close()
    thread.join()
    assert seen == [["one"]]


def test_connections_of_finished_threads_are_closed(database):
    connections: list[sqlite3.Connection] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: connections.append(database.read(lambda db: db.conn)))
        thread.start()
        thread.join()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connections[0].execute("SELECT 1")


def test_reopening_keeps_rows_and_applies_new_migrations(tmp_path):
    first = Database(tmp_path / "a.db", notes())
    first.write(add("kept")).result()
    first.close()
    second = Database(tmp_path / "a.db", notes("more"))
    assert second.read(texts) == ["kept"]
    second.close()


def test_refuses_a_newer_schema(tmp_path):
    Database(tmp_path / "a.db", notes("from_the_future")).close()
    with pytest.raises(CannotOpen, match=r"a\.db.*newer.*from_the_future"):
        Database(tmp_path / "a.db", notes())


def test_refuses_what_is_not_a_database(tmp_path):
    path = tmp_path / "a.db"
    path.write_text("no database " * 100)
    with pytest.raises(CannotOpen, match=r"a\.db.*not a database"):
        Database(path, notes())
    assert path.read_text().startswith("no database")


def test_refuses_a_place_it_cannot_write(tmp_path):
    with pytest.raises(CannotOpen, match="unable to open"):
        Database(tmp_path / "missing" / "a.db", notes())


def test_a_failing_migration_changes_nothing(tmp_path):
    migrations = notes()

    @migrations()
    def broken(db: sqlite_utils.Database) -> None:
        db.execute("nonsense")

    with pytest.raises(CannotOpen, match="syntax error"):
        Database(tmp_path / "a.db", migrations)
    connection = sqlite3.connect(tmp_path / "a.db")
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()


def test_two_databases_on_one_file_take_turns(tmp_path):
    first, second = Database(tmp_path / "a.db", notes()), Database(tmp_path / "a.db", notes())
    futures = [database.write(add("x")) for _ in range(20) for database in (first, second)]
    for future in futures:
        future.result()
    assert len(first.read(texts)) == 40
    first.close()
    second.close()


@given(st.integers(0, 2**63 - 1))
def test_cursors_come_back(rowid):
    assert decode_cursor(encode_cursor(rowid)) == rowid


@given(st.text(max_size=30) | st.text(alphabet="MTIzNA=-_+/", max_size=12))
def test_any_other_cursor_is_invalid_input(cursor):
    with contextlib.suppress(InvalidInput):
        assert encode_cursor(decode_cursor(cursor)) == cursor


@pytest.mark.parametrize("cursor", ["", "bogus", "MTA=", "é", encode_cursor(1)[:-1], encode_cursor(2**63)])
def test_a_bad_cursor_names_its_field(cursor):
    with pytest.raises(InvalidInput, match="cursor") as caught:
        decode_cursor(cursor)
    assert caught.value.field == "cursor"
