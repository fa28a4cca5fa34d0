"""Jobs: versions, unchanged files, copies, cancelling, time limits, crashes, and what deletion leaves."""

from __future__ import annotations

import io
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import docx
import pytest
import sqlite_utils
from reportlab.pdfgen.canvas import Canvas
from sqlite_utils.migrations import Migrations

from ingest import schema
from ingest.database import Database
from ingest.documents import Upload
from ingest.errors import InvalidInput, NotFound, TooLarge, Unreadable
from ingest.library import Library, migrations
from ingest.reading import Interrupted, Reader
from ingest.records import Job
from ingest.uploads import READ_AT_ONCE, StoredUpload
from tests.ingest.helpers import Gate, eventually, words

MAX = 10_000_000


def pdf(text: str) -> bytes:
    file = io.BytesIO()
    canvas = Canvas(file)
    canvas.drawString(72, 700, text)
    canvas.save()
    return file.getvalue()


def word_document(text: str) -> bytes:
    document = docx.Document()
    document.add_paragraph(text)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


class Shelf:
    """A library whose counter is a gate, in a folder; opened as often as a test likes."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.path = folder / "library.db"
        self.waiting = folder / "library.db-uploads"
        self.replaced: list[str] = []
        self.open(**options)

    def open(self, passage_tokens: int = 40, **options: object) -> None:
        self.gate = Gate()
        self.database = Database(self.path, migrations)
        self.library = Library(self.database, self.gate, passage_tokens, on_stored=self.note, **options)

    def note(self, _document_id: str, replaced: list[str]) -> None:
        self.replaced.extend(replaced)

    def close(self) -> None:
        self.gate.open.set()
        self.library.close()
        self.database.close()

    def reopen(self, **options: object) -> None:
        self.close()
        self.open(**options)

    def send(self, *files: tuple[str, bytes | str], metadata: dict[str, object] | None = None) -> Job:
        received = [
            self.library.receive(
                name, io.BytesIO(data.encode() if isinstance(data, str) else data), None, metadata, max_bytes=MAX
            )
            for name, data in files
        ]
        return self.library.submit(received)

    def ingest(self, *files: tuple[str, bytes | str], metadata: dict[str, object] | None = None) -> Job:
        return self.library.wait(self.send(*files, metadata=metadata).id, 20)

    def names(self, query: str) -> list[str]:
        return sorted(passage.name for passage in self.library.search(query, 50))

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        with sqlite3.connect(self.path) as db:
            return db.execute(sql).fetchall()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()


def states(job: Job) -> list[str]:
    return [document.status for document in job.documents]


BIG = "The walrus naps.\n\n" * (READ_AT_ONCE // 16)


def test_files_stream_to_disk_and_are_read_by_the_worker(shelf: Shelf) -> None:
    job = shelf.send(("wait", "wait"), ("walrus.txt", BIG), ("seal.pdf", pdf("The seal dives.")),
                     ("otter.docx", word_document("The otter swims.")))  # fmt: skip
    assert shelf.gate.reached.wait(5)
    assert {path.name for path in shelf.waiting.iterdir()} == {document.id for document in job.documents[1:]}
    shelf.gate.open.set()
    done = shelf.library.wait(job.id, 20)
    assert states(done) == ["done"] * 4
    for name, query in (("walrus.txt", "walrus"), ("seal.pdf", "seal"), ("otter.docx", "otter")):
        assert set(shelf.names(query)) == {name}
    walrus = shelf.library.document(job.documents[1].id)
    assert (walrus.size, walrus.media_type) == (len(BIG), "text/plain")
    assert shelf.rows("SELECT text FROM documents WHERE name = 'walrus.txt'") == [(BIG,)]
    assert not shelf.waiting.exists()
    assert shelf.rows("SELECT * FROM uploads") == []


def test_what_can_be_told_at_once_is_refused_at_once_and_leaves_nothing(shelf: Shelf) -> None:
    for name, data, limit, reason in (
        ("a.txt", b"text\0", MAX, "byte 4"),
        ("a.txt", b"", MAX, "blank"),
        ("a.txt", b" \n", MAX, "blank"),
        ("a.txt", b"\x89PNG\r\n" + b"x" * READ_AT_ONCE, MAX, "PNG image"),
        ("a.zip", b"PK\x03\x04" + b"x" * READ_AT_ONCE, MAX, "supported"),
        ("a.pdf", b"text", MAX, "not a PDF document"),
        ("a.docx", b"text", MAX, "not a DOCX document"),
        ("a\n", b"text", MAX, "control character"),
        ("a.txt", b"x" * 3_000_000, 2_999_999, "the limit is 2999999 bytes and this has 3000000"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            shelf.library.receive(name, io.BytesIO(data), max_bytes=limit)
        assert not shelf.waiting.exists()
    with pytest.raises(TooLarge):
        shelf.library.receive_text("a.txt", "x" * 3_000_000, max_bytes=2_999_999)
    with pytest.raises(InvalidInput, match="character 1 is NUL"):
        shelf.library.receive_text("a.txt", "a\0", max_bytes=MAX)


def test_a_file_that_cannot_be_read_fails_alone_with_the_reason(shelf: Shelf) -> None:
    damaged = pdf("x" * 100)[:200] + b"%%EOF"
    job = shelf.ingest(("a.pdf", damaged), ("b.txt", BIG.encode() + b"\0"), ("c.pdf", pdf("good")), ("d", "good"))
    assert states(job) == ["failed", "failed", "done", "done"]
    assert "damaged" in str(job.documents[0].error)
    assert f"byte {len(BIG)} is NUL" in str(job.documents[1].error)
    assert shelf.names("good") == ["c.pdf", "d"]
    assert not shelf.waiting.exists()


def test_a_file_over_the_time_limit_fails_and_the_rest_goes_on(tmp_path: Path) -> None:
    # No process starts that fast.
    shelf = Shelf(tmp_path, seconds=0.01)
    job = shelf.ingest(("slow.pdf", pdf("slow")), ("quick.txt", "quick"))
    assert states(job) == ["failed", "done"]
    assert job.documents[0].error == "reading and cutting it took more than 0.01 s, the limit"
    shelf.close()


def test_cutting_counts_against_the_time_limit(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, seconds=0.2)
    job = shelf.send(("slow.txt", "wait\n\n" * 50), ("quick.txt", "quick"))
    assert shelf.gate.reached.wait(5)
    threading.Event().wait(0.3)
    shelf.gate.open.set()
    done = shelf.library.wait(job.id, 10)
    assert states(done) == ["failed", "done"]
    assert "0.2 s, the limit" in str(done.documents[0].error)
    shelf.close()


def test_a_parser_that_crashes_is_said_and_another_is_started(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(pdf("fine"))
    reader = Reader()

    def crash() -> bool:
        os.kill(reader._process.pid, signal.SIGSEGV)  # type: ignore[union-attr]
        return False

    with pytest.raises(Unreadable, match=r"crashed \(signal 11\)"):
        reader.read(path, "x.pdf", None, seconds=10, stop=crash)
    with pytest.raises(Interrupted):
        reader.read(path, "x.pdf", None, seconds=10, stop=lambda: True)
    assert "fine" in reader.read(path, "x.pdf", None, seconds=10, stop=lambda: False).text
    with pytest.raises(Unreadable, match="upload it again"):
        reader.read(tmp_path / "gone", "x.pdf", None, seconds=10, stop=lambda: False)
    reader.rest()


def test_the_same_bytes_under_the_same_name_are_unchanged(shelf: Shelf) -> None:
    for name, data in (("a.txt", "honey"), ("a.pdf", pdf("honey"))):
        first = shelf.ingest((name, data), metadata={"draft": True}).documents[0]
        again = shelf.send((name, data), metadata={"draft": True})
        assert (again.status, states(again)) == ("done", ["unchanged"])
        assert again.documents[0].id == first.id
        assert again.documents[0].version == 1
        assert shelf.library.job(again.id) == again
        # Other metadata, and be it 1 for true, is a change.
        changed = shelf.ingest((name, data), metadata={"draft": 1})
        assert states(changed) == ["done"]
        assert (changed.documents[0].version, changed.documents[0].replaces) == (2, first.id)
    assert shelf.names("honey") == ["a.pdf", "a.txt"]
    assert not shelf.waiting.exists()


def test_the_same_bytes_that_still_wait_are_not_ingested_twice(shelf: Shelf) -> None:
    blocker, honey = shelf.send(("blocker", "wait")), pdf("honey")
    first = shelf.send(("a.pdf", honey), ("b", "poison"))
    second = shelf.send(("a.pdf", honey), ("b", "poison"))
    third = shelf.send(("a.pdf", honey))
    ids = [document.id for document in first.documents]
    assert [document.id for document in second.documents] == ids
    assert [path.name for path in shelf.waiting.iterdir()] == [ids[0]]
    # Another job wants it still.
    assert states(shelf.library.cancel(first.id)) == ["cancelled", "cancelled"]
    shelf.gate.open.set()
    assert states(shelf.library.wait(second.id, 10)) == ["done", "failed"]
    assert states(shelf.library.wait(third.id, 10)) == ["unchanged"]
    assert shelf.library.job(blocker.id).status == "done"
    assert (shelf.names("honey"), shelf.replaced) == (["a.pdf"], [])
    assert not shelf.waiting.exists()


@pytest.mark.parametrize("data", ["wait honey", pdf("wait honey")], ids=["text", "file"])
def test_a_running_document_goes_on_for_the_other_job_that_wants_it(shelf: Shelf, data: str | bytes) -> None:
    first, second = shelf.send(("a", data)), shelf.send(("a", data))
    assert shelf.gate.reached.wait(5)
    shelf.library.cancel(first.id)
    shelf.gate.open.set()
    assert states(shelf.library.wait(second.id, 10)) == ["done"]
    assert shelf.names("honey") == ["a"]


def test_another_passage_size_is_a_change(shelf: Shelf) -> None:
    shelf.ingest(("a", "honey"))
    shelf.reopen(passage_tokens=20)
    assert states(shelf.ingest(("a", "honey"))) == ["done"]
    shelf.reopen(passage_tokens=20, tokenizer="another")
    assert states(shelf.ingest(("a", "honey"))) == ["done"]
    assert states(shelf.ingest(("a", "honey"))) == ["unchanged"]


def test_the_same_bytes_are_cut_once(shelf: Shelf) -> None:
    text = "# Bees\n\nBees make honey.\n"
    first = shelf.ingest(("one.md", text)).documents[0]
    counted = len(shelf.gate.counted)
    second = shelf.ingest(("two.md", text)).documents[0]
    assert len(shelf.gate.counted) == counted
    assert second.id != first.id
    one, two = (shelf.library.passages(document.id).items for document in (first, second))
    assert [(p.text, p.heading, p.start, p.tokens) for p in one] == [
        (p.text, p.heading, p.start, p.tokens) for p in two
    ]
    assert not {p.id for p in one} & {p.id for p in two}
    assert shelf.library.document(second.id).tokens == shelf.library.document(first.id).tokens
    # Of another media type it is another text.
    assert states(shelf.ingest(("three.txt", text))) == ["done"]
    assert len(shelf.gate.counted) > counted
    shelf.library.delete(first.id)
    assert shelf.names("honey") == ["three.txt", "two.md"]


def test_a_new_version_says_which_it_is_and_what_it_replaced(shelf: Shelf) -> None:
    first = shelf.ingest(("a", "honey one")).documents[0]
    assert (first.version, first.replaces) == (1, None)
    job = shelf.send(("a", "wait honey two"), ("a", "honey three"))
    assert [(d.version, d.replaces) for d in job.documents] == [(2, first.id), (3, first.id)]
    assert shelf.gate.reached.wait(5)
    assert [p.document_id for p in shelf.library.search("honey", 5)] == [first.id]
    assert shelf.replaced == []
    shelf.gate.open.set()
    two, three = shelf.library.wait(job.id, 10).documents
    assert (two.replaces, three.replaces) == (first.id, two.id)
    assert shelf.replaced == [first.id, two.id]
    assert [p.document_id for p in shelf.library.search("honey", 5)] == [three.id]
    record = shelf.library.document(three.id)
    assert (record.version, record.replaces) == (3, two.id)
    failed = shelf.ingest(("a", "poison honey")).documents[0]
    assert (failed.status, failed.version) == ("failed", 4)
    assert [p.document_id for p in shelf.library.search("honey", 5)] == [three.id]
    assert states(shelf.ingest(("a", "honey three"))) == ["unchanged"]
    assert shelf.ingest(("a", "honey five")).documents[0].version == 5
    assert len(shelf.library.documents().items) == 1


@pytest.mark.parametrize("queued", ["honey", pdf("honey")], ids=["text", "file"])
def test_a_cancelled_job_keeps_what_is_done_and_leaves_the_rest_out(shelf: Shelf, queued: str | bytes) -> None:
    old = shelf.ingest(("c", pdf("honey old"))).documents[0]
    job = shelf.send(("a", "honey"), ("b", "wait honey"), ("c", queued))
    later = shelf.send(("d", "honey"))
    assert shelf.gate.reached.wait(5)
    cancelled = shelf.library.cancel(job.id)
    assert (cancelled.status, states(cancelled)) == ("cancelled", ["done", "cancelled", "cancelled"])
    assert cancelled.finished_at is not None
    assert not shelf.waiting.exists()
    shelf.gate.open.set()
    assert shelf.library.wait(later.id, 5).status == "done"
    assert shelf.library.job(job.id) == cancelled
    assert shelf.names("honey") == ["a", "c", "d"]
    assert shelf.library.document(old.id).status == "done"
    assert shelf.library.document(cancelled.documents[1].id).status == "cancelled"
    assert shelf.rows("SELECT count(*) FROM passages JOIN documents ON documents.id = document_id"
                      " WHERE status = 'cancelled'") == [(0,)]  # fmt: skip
    # A finished job stays as it is; what was cancelled can come again.
    assert shelf.library.cancel(later.id).status == "done"
    assert states(shelf.ingest(("b", "honey"))) == ["done"]
    with pytest.raises(NotFound):
        shelf.library.cancel("job_none")


def test_cancelling_ends_the_reading_of_a_file(shelf: Shelf) -> None:
    heard = threading.Event()
    job = shelf.send(("a.pdf", pdf("honey")))
    shelf.library.subscribe(heard.set)
    eventually(lambda: states(shelf.library.job(job.id)) != ["queued"])
    shelf.library.cancel(job.id)
    assert states(shelf.ingest(("b", "honey"))) == ["done"]
    assert shelf.names("honey") == ["b"]
    assert heard.is_set()


def test_changes_are_numbered_and_resume_anywhere(shelf: Shelf) -> None:
    job = shelf.send(("a", "one"), ("b", "wait"), ("c", "poison"))
    assert shelf.gate.reached.wait(5)
    eventually(lambda: states(shelf.library.job(job.id)) == ["done", "running", "queued"])
    first = shelf.library.changes(job.id)
    assert {d.name: d.status for _, d in first.documents} == {"a": "done", "b": "running", "c": "queued"}
    assert [number for number, _ in first.documents] == sorted(number for number, _ in first.documents)
    assert first.counts == {"done": 1, "running": 1, "queued": 1}
    assert shelf.library.changes(job.id, first.last).documents == []
    shelf.gate.open.set()
    shelf.library.wait(job.id, 5)
    rest = shelf.library.changes(job.id, first.last)
    assert [(d.name, d.status) for _, d in rest.documents] == [("b", "done"), ("c", "failed")]
    assert (rest.status, rest.counts) == ("done", {"done": 2, "failed": 1})
    assert min(number for number, _ in rest.documents) > first.last
    with pytest.raises(NotFound):
        shelf.library.changes("job_none")


CRASHING = """
import io, sys, time
from pathlib import Path
from ingest.database import Database
from ingest.library import Library, migrations

def count(text):
    with open(sys.argv[2], "a") as log:
        log.write(text.strip() + "\\n")
    if "wait" in text:
        time.sleep(60)
    return len(text.split())

library = Library(Database(Path(sys.argv[1]), migrations), count, 40)
files = {"a": b"first", "b.pdf": Path(sys.argv[3]).read_bytes(), "c": b"wait", "d.pdf": b"%PDF-\\n%%EOF", "e": b"last"}
print(library.submit([library.receive(n, io.BytesIO(d), max_bytes=10**7) for n, d in files.items()]).id, flush=True)
time.sleep(60)
"""


def test_after_kill_9_a_job_goes_on_and_repeats_no_finished_file(tmp_path: Path) -> None:
    log = tmp_path / "counted"
    source = tmp_path / "source.pdf"
    source.write_bytes(pdf("second"))
    command = [sys.executable, "-c", CRASHING, str(tmp_path / "library.db"), str(log), str(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    job_id = process.stdout.readline().strip()
    eventually(lambda: log.exists() and "wait" in log.read_text())
    (tmp_path / "library.db-uploads" / "doc_of_nobody").write_bytes(b"cut off")
    process.kill()
    process.wait()
    assert re.fullmatch(r"job_\w+", job_id)
    before = log.read_text().split()
    assert {"first", "second"} <= set(before)

    shelf = Shelf(tmp_path)
    shelf.gate.open.set()
    job = shelf.library.wait(job_id, 20)
    assert states(job) == ["done", "done", "done", "failed", "done"]
    assert {text.strip() for text in shelf.gate.counted} == {"wait", "last"}
    assert not shelf.waiting.exists()
    shelf.close()


def test_bytes_that_were_lost_are_said(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    job = shelf.send(("a", "wait"), ("b.pdf", pdf("x")))
    assert shelf.gate.reached.wait(5)
    for path in shelf.waiting.iterdir():
        path.unlink()
    shelf.gate.open.set()
    assert shelf.library.wait(job.id, 10).documents[1].error == "its bytes are lost; upload it again"
    shelf.close()


def test_deletion_leaves_nothing_in_any_table_or_file(shelf: Shelf) -> None:
    secret = "xyzzyplugh"
    shelf.ingest(("kept.txt", "honey stays"))
    before = shelf.ingest((f"{secret}.txt", f"{secret} one"), metadata={secret: secret})
    shelf.ingest((f"{secret}.txt", f"{secret} two\n\n" * 300), metadata={secret: secret})
    other = shelf.ingest((f"{secret}.pdf", pdf(secret)))
    failed = shelf.ingest((f"{secret}.md", f"{secret} poison"))
    gone = shelf.send(("wait", "wait"), (f"{secret}.docx", word_document(secret)))
    assert shelf.gate.reached.wait(5)
    shelf.library.cancel(gone.id)
    shelf.gate.open.set()
    for document in shelf.library.documents(limit=200).items:
        if secret in document.name:
            shelf.library.delete(document.id)
    files = [path for path in shelf.path.parent.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"library.db", "library.db-wal", "library.db-shm"}

    def absent() -> bool:
        return not any(secret.encode() in path.read_bytes() for path in files)

    eventually(absent)
    tables = [name for (name,) in shelf.rows("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    assert len(tables) > 8
    for table in tables:
        assert secret not in str(shelf.rows(f"SELECT * FROM {table}")), table
    # The index stores terms stemmed, and only what differs from the term before: bytes alone would not show them.
    with sqlite3.connect(shelf.path) as db:
        db.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab (main, passages_fts, row)")
        assert {term for (term,) in db.execute("SELECT term FROM temp.terms")} == {"honei", "stai", "kept", "txt"}
    # What stays of it in its jobs: ids and states.
    for job in (before, other, failed, gone):
        for line in shelf.library.job(job.id).documents:
            assert line.name in ("(deleted)", "wait")
    assert shelf.names("honey") == ["kept.txt"]


def test_a_database_from_before_is_taken_over(tmp_path: Path) -> None:
    before = Migrations("ingest")
    for step in (schema.m001_documents, schema.m002_full_text, schema.m003_jobs):
        before()(step)
    database = Database(tmp_path / "library.db", before)

    def fill(db: sqlite_utils.Database) -> None:
        db.execute("INSERT INTO jobs (id, status, created_at) VALUES ('job_1', 'running', 'then')")
        for id, name, status in (("doc_1", "old", "done"), ("doc_2", "later", "queued")):
            db.execute(
                "INSERT INTO documents (id, name, media_type, metadata, sha256, size, status, created_at, text)"
                " VALUES (?, ?, 'text/plain', '{}', 'x', 5, ?, 'then', ?)",
                [id, name, status, f"honey {name}"],
            )
            db.execute(
                "INSERT INTO job_documents (job_id, document_id, name, status) VALUES ('job_1', ?, ?, ?)",
                [id, name, status],
            )

    database.write(fill).result()
    database.close()
    shelf = Shelf(tmp_path)
    assert states(shelf.library.wait("job_1", 10)) == ["done", "done"]
    assert shelf.names("honey") == ["later"]
    assert {(d.name, d.version, d.replaces) for d in shelf.library.documents().items} == {
        ("old", 1, None),
        ("later", 1, None),
    }
    # How it was cut is not known, so it is cut anew.
    again = shelf.ingest(("old", "honey old")).documents[0]
    assert (again.version, again.replaces) == (2, "doc_1")
    shelf.close()


def test_receive_gives_text_that_is_small_and_stores_the_rest(shelf: Shelf) -> None:
    small = shelf.library.receive("a.txt", io.BytesIO(b"x"), max_bytes=MAX)
    large = shelf.library.receive("b.txt", io.BytesIO(BIG.encode()), "text/plain; charset=latin-1", max_bytes=MAX)
    assert isinstance(small, Upload)
    assert isinstance(large, StoredUpload)
    assert (large.charset, large.size) == ("latin-1", len(BIG))
    shelf.library.discard([small, large])
    assert not shelf.waiting.exists()
    assert words("a b") == 3


def test_what_was_left_out_is_on_the_job_and_the_document_and_stays(shelf: Shelf) -> None:
    # A small text is read at once, and a large one by the worker.
    run = "".join(chr(65 + n % 26) + chr(97 + n % 7) + str(n % 10) for n in range(100_000))
    for size in (2000, 300_000):
        text = f"A picture: {run[:size]}\n"
        job = shelf.ingest((f"{size}.txt", text))
        (document,) = job.documents
        (warning,) = document.warnings
        assert "1 piece of base64" in warning
        assert shelf.library.document(document.id).warnings == [warning]
        # The same bytes again, and under another name.
        for name in (f"{size}.txt", f"{size}-copy.txt"):
            assert shelf.ingest((name, text)).documents[0].warnings == [warning]
    assert shelf.ingest(("plain.txt", "honey")).documents[0].warnings == []
