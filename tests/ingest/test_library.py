from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.database import Database
from ingest.errors import InvalidInput, NotFound
from ingest.library import Filter, Library, migrations
from tests.ingest.helpers import Gate, ingest, upload, words


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database(path, migrations)
    yield database
    database.close()


@pytest.fixture
def library(database: Database) -> Iterator[Library]:
    library = Library(database, words, 40)
    yield library
    library.close()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(database: Database, gate: Gate) -> Iterator[Library]:
    library = Library(database, gate, 40)
    yield library
    gate.open.set()
    library.close()


def query(path: Path, sql: str, *bound: object) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql, bound).fetchall()
    finally:
        connection.close()


def check_index(path: Path) -> None:
    """FTS5 compares its whole index with the passages; an error means that they differ."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("INSERT INTO passages_fts (passages_fts, rank) VALUES ('integrity-check', 1)")
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finally:
        connection.close()


GUIDE = "# Guide\n\n" + "Bees make honey in spring.\n\n" * 4 + "## Code\n\n```py\nx = 1\n```\n"


def test_a_document_becomes_passages_that_join_to_its_text(library, path):
    (id,) = ingest(library, upload("guide.md", GUIDE))
    document = library.document(id)
    passages = library.passages(id).items
    assert (document.status, document.error, document.passages) == ("done", None, len(passages))
    assert len(passages) > 2
    assert "".join(p.text for p in passages) == GUIDE
    assert all(GUIDE[p.start : p.end] == p.text and p.tokens == words(p.text) <= 40 for p in passages)
    assert document.tokens == sum(p.tokens for p in passages)
    assert {(p.document_id, p.name, p.score) for p in passages} == {(id, "guide.md", None)}
    assert (passages[-1].kind, passages[-1].heading) == ("code", "Guide > Code")
    assert query(path, "SELECT text FROM documents") == [(GUIDE,)]
    check_index(path)


def test_ids_and_times_have_their_shapes(library):
    (id,) = ingest(library, upload("a", "text"))
    job = library.jobs().items[0]
    assert re.fullmatch(r"doc_[0-9a-f]{16}", id)
    assert re.fullmatch(r"job_[0-9a-f]{16}", job.id)
    assert re.fullmatch(r"pas_[0-9a-f]{16}", library.passages(id).items[0].id)
    for moment in (job.created_at, job.finished_at, library.document(id).created_at):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)


def test_submit_returns_at_once_and_the_job_goes_through_its_states(gated, gate):
    job = gated.submit([upload("a", "wait here"), upload("b", "later")])
    assert (job.status, [d.status for d in job.documents]) == ("queued", ["queued", "queued"])
    assert gate.reached.wait(5)
    running = gated.job(job.id)
    assert (running.status, [d.status for d in running.documents]) == ("running", ["running", "queued"])
    assert running.finished_at is None
    with pytest.raises(TimeoutError):
        gated.wait(job.id, 0.01)
    gate.open.set()
    done = gated.wait(job.id, 5)
    assert (done.status, [d.status for d in done.documents]) == ("done", ["done", "done"])


def test_a_failing_file_never_stops_the_rest(gated, gate):
    job = gated.submit([upload("bad", "poison"), upload("good", "fine")], [("x.pdf", "not text")])
    done = gated.wait(job.id, 5)
    assert done.status == "done"
    assert [(d.name, d.status, d.error) for d in done.documents] == [
        ("bad", "failed", "MemoryError: too much"),
        ("good", "done", None),
        ("x.pdf", "failed", "not text"),
    ]
    assert gated.document(done.documents[0].id).error == "MemoryError: too much"
    assert gated.document(done.documents[2].id).status == "failed"


def test_a_job_fails_when_every_document_does(gated):
    assert gated.wait(gated.submit([upload("bad", "poison")]).id, 5).status == "failed"
    only_unreadable = gated.submit([], [("a\0\ud800" * 400, "bad \udcff name")])
    assert only_unreadable.status == "failed"
    assert gated.job(only_unreadable.id) == only_unreadable
    assert only_unreadable.finished_at is not None


def test_an_empty_submission_is_refused(library):
    with pytest.raises(InvalidInput, match="at least one document"):
        library.submit([])


def test_search_ranks_the_best_match_first(library):
    ingest(
        library,
        upload("a.txt", "Honey is sweet. Cats sleep."),
        upload("b.txt", "Honey, honey and more honey."),
        upload("c.txt", "Nothing of interest."),
    )
    found = library.search("Where is honey?", 5)
    assert [p.name for p in found] == ["b.txt", "a.txt"]
    assert found[0].score > found[1].score > 0
    assert [p.name for p in library.search("honey", 1)] == ["b.txt"]


def test_search_finds_by_heading_name_and_word_stem(library):
    ingest(library, upload("zebra.md", "# Animals\n\nThey were running.\n"))
    for text in ("animal", "zebra", "run", "runs"):
        assert [p.name for p in library.search(text, 5)] == ["zebra.md"]


def test_search_without_a_word_finds_nothing(library):
    ingest(library, upload("a", "text"))
    assert library.search('"*" \0', 5) == []


def test_search_sees_only_finished_documents(gated, gate):
    job = gated.submit([upload("a", "wait honey")])
    assert gate.reached.wait(5)
    assert gated.search("honey", 5) == []
    gate.open.set()
    gated.wait(job.id, 5)
    assert len(gated.search("honey", 5)) == 1


ODD_KEY = "a.b\"c'\\d]é\n"


@pytest.fixture
def shelf(library: Library) -> dict[str, str]:
    uploads = [
        upload("one", "honey one", year=2020, draft=True, lang="en"),
        upload("two", "honey two", year=2021.0, draft=False, lang=None),
        upload("code.md", "```\nhoney\n```", year="2020", draft=1, **{ODD_KEY: "odd"}),
    ]
    return dict(zip(["one", "two", "code.md"], ingest(library, *uploads), strict=True))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda ids: Filter(), ["code.md", "one", "two"]),
        (lambda ids: Filter(document_id=ids["one"]), ["one"]),
        (lambda ids: Filter(document_id=[ids["one"], ids["two"], "x"]), ["one", "two"]),
        (lambda ids: Filter(document_id=[]), []),
        (lambda ids: Filter(name="two"), ["two"]),
        (lambda ids: Filter(kind="code"), ["code.md"]),
        (lambda ids: Filter(metadata={"year": 2020}), ["one"]),
        (lambda ids: Filter(metadata={"year": 2021}), ["two"]),
        (lambda ids: Filter(metadata={"year": "2020"}), ["code.md"]),
        (lambda ids: Filter(metadata={"draft": True}), ["one"]),
        (lambda ids: Filter(metadata={"draft": False}), ["two"]),
        (lambda ids: Filter(metadata={"draft": 1}), ["code.md"]),
        (lambda ids: Filter(metadata={"lang": None}), ["two"]),
        (lambda ids: Filter(metadata={"lang": "en", "year": 2020}), ["one"]),
        (lambda ids: Filter(metadata={"lang": "en", "year": 2021}), []),
        (lambda ids: Filter(metadata={ODD_KEY: "odd"}), ["code.md"]),
        (lambda ids: Filter(metadata={"year": "en"}), []),
        (lambda ids: Filter(metadata={"lang": 2020}), []),
        (lambda ids: Filter(metadata={"x' OR 1=1 --": "'"}), []),
    ],
)
def test_filters_apply_inside_the_search(library, shelf, make: Callable[[dict[str, str]], Filter], names):
    assert sorted(p.name for p in library.search("honey", 10, make(shelf))) == names
    # Not after it: even the least of the matches is found when only one is asked for.
    assert len(library.search("honey", 1, make(shelf))) == min(1, len(names))


def test_refuses_bad_filters_and_counts(library):
    with pytest.raises(InvalidInput, match=r"filter\.kind.*prose"):
        library.search("x", 5, Filter(kind="poem"))
    with pytest.raises(InvalidInput, match="64 bits"):
        library.search("x", 5, Filter(metadata={"a": 2**70}))
    for top_k in (0, 51):
        with pytest.raises(InvalidInput, match="between 1 and 50"):
            library.search("x", top_k)
    for call in (library.documents, library.jobs, lambda limit: library.passages("x", limit=limit)):
        for limit in (0, 201):
            with pytest.raises(InvalidInput, match="between 1 and 200"):
                call(limit=limit)


def test_unknown_ids_are_not_found(library):
    for call, what in [
        (library.job, "job"),
        (library.document, "document"),
        (library.passages, "document"),
        (library.delete, "document"),
        (library.wait, "job"),
    ]:
        with pytest.raises(NotFound) as caught:
            call("nope")
        assert (caught.value.what, caught.value.id) == (what, "nope")


def test_delete_removes_document_passages_and_index_rows(library, path):
    first, second = ingest(library, upload("a.md", GUIDE), upload("b.md", "honey stays"))
    library.delete(first)
    with pytest.raises(NotFound):
        library.document(first)
    assert [p.document_id for p in library.search("honey", 10)] == [second]
    assert query(path, "SELECT count(*) FROM passages WHERE document_id = ?", first) == [(0,)]
    assert query(path, "SELECT count(*) FROM passages_fts WHERE passages_fts MATCH 'bee'") == [(0,)]
    check_index(path)
    assert library.jobs().items[0].documents[0].status == "done"


@pytest.mark.parametrize("which", [0, 1], ids=["running", "queued"])
def test_a_document_deleted_before_it_is_ingested_never_appears(gated, gate, path, which):
    job = gated.submit([upload("a", "wait honey"), upload("b", "honey")])
    assert gate.reached.wait(5)
    gated.delete(job.documents[which].id)
    gate.open.set()
    done = gated.wait(job.id, 5)
    assert done.status == "done"
    assert [d.status for d in done.documents] == (["cancelled", "done"] if which == 0 else ["done", "cancelled"])
    assert [p.document_id for p in gated.search("honey", 5)] == [job.documents[1 - which].id]
    check_index(path)


@pytest.mark.parametrize("text", ["wait", "wait poison"])
def test_a_job_whose_documents_are_all_deleted_is_cancelled(gated, gate, text):
    job = gated.submit([upload("a", text)])
    assert gate.reached.wait(5)
    gated.delete(job.documents[0].id)
    gate.open.set()
    done = gated.wait(job.id, 5)
    assert (done.status, done.documents[0].status) == ("cancelled", "cancelled")


def test_the_same_bytes_under_two_names_are_two_documents(library):
    first, second = ingest(library, upload("a", "honey"), upload("b", "honey"))
    assert library.document(first).sha256 == library.document(second).sha256
    assert len(library.search("honey", 5)) == 2


def test_the_same_name_again_replaces_the_document_when_done(gated, gate, path):
    old = ingest(gated, upload("a", "old honey"))[0]
    job = gated.submit([upload("a", "wait new honey")])
    assert gate.reached.wait(5)
    assert [p.document_id for p in gated.search("honey", 5)] == [old]
    gate.open.set()
    gated.wait(job.id, 5)
    assert [p.text for p in gated.search("honey", 5)] == ["wait new honey"]
    assert [d.id for d in gated.documents().items] == [job.documents[0].id]
    check_index(path)


def test_a_failed_replacement_keeps_the_old_document(gated):
    old = ingest(gated, upload("a", "honey"))[0]
    gated.wait(gated.submit([upload("a", "poison honey")]).id, 5)
    assert [p.document_id for p in gated.search("honey", 5)] == [old]


def test_lists_page_newest_first_without_gaps_while_documents_come_and_go(library):
    ids = [ingest(library, upload(f"n{n}", "text"))[0] for n in range(7)]
    first = library.documents(limit=3)
    assert [d.id for d in first.items] == ids[:3:-1]
    library.delete(ids[4])
    ingest(library, upload("new", "text"))
    second = library.documents(first.next_cursor, 3)
    assert [d.id for d in second.items] == ids[3:0:-1]
    third = library.documents(second.next_cursor, 3)
    assert ([d.id for d in third.items], third.next_cursor) == ([ids[0]], None)


def test_jobs_page_newest_first(library):
    ids = [library.submit([upload(f"n{n}", "text")]).id for n in range(4)]
    first = library.jobs(limit=2)
    second = library.jobs(first.next_cursor, 2)
    assert [j.id for j in first.items + second.items] == ids[::-1]
    assert second.next_cursor is None
    assert [len(j.documents) for j in first.items] == [1, 1]


def test_passages_page_in_reading_order(library):
    text = "\n\n".join(f"paragraph {n} " + "word " * 12 for n in range(9))
    (id,) = ingest(library, upload("a.txt", text))
    seen, cursor = "", None
    while True:
        page = library.passages(id, cursor, 2)
        seen += "".join(p.text for p in page.items)
        cursor = page.next_cursor
        if cursor is None:
            break
        assert len(page.items) == 2
    assert seen == text


def test_a_bad_cursor_is_invalid_input(library):
    for call in (library.documents, library.jobs):
        with pytest.raises(InvalidInput, match="cursor"):
            call("bogus")


def test_closing_stops_half_way_and_the_next_library_resumes(path, gate):
    database = Database(path, migrations)
    library = Library(database, gate, 40)
    job = library.submit([upload("a", "done first"), upload("b", "wait\n\n" * 30), upload("c", "third")])
    assert gate.reached.wait(5)
    closing = threading.Thread(target=library.close)
    closing.start()
    gate.open.set()
    closing.join(5)
    assert not closing.is_alive()
    database.close()
    assert query(path, "SELECT status FROM documents ORDER BY number") == [("done",), ("running",), ("queued",)]
    before = query(path, "SELECT id FROM passages")

    counted: list[str] = []
    database = Database(path, migrations)
    library = Library(database, lambda text: counted.append(text) or words(text), 40)
    assert [d.status for d in library.wait(job.id, 5).documents] == ["done"] * 3
    assert not any("done first" in text for text in counted)
    assert query(path, "SELECT id FROM passages WHERE text = 'done first'") == before
    library.close()
    database.close()
    check_index(path)


def test_waiting_ends_when_the_library_closes(gated, gate):
    job = gated.submit([upload("a", "wait")])
    assert gate.reached.wait(5)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            gated.wait(job.id)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.open.set()
    gated.close()
    waiting.join(5)
    assert not waiting.is_alive()
    assert errors or gated.job(job.id).status == "done"


def test_many_threads_submit_search_and_delete_together(library, path):
    def use(n: int) -> None:
        for turn in range(5):
            job = library.submit([upload(f"{n}/{turn}", f"honey {n}")])
            library.search("honey", 5)
            library.delete(job.documents[0].id)
            ids.append(library.submit([upload(f"kept {n}/{turn}", "honey")]).id)

    ids: list[str] = []
    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for id in ids:
        assert library.wait(id, 10).status == "done"
    assert len(library.documents(limit=200).items) == 20
    assert len(library.search("honey", 50)) == 20
    check_index(path)
