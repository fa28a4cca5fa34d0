"""What meets in the middle: deletions, forks and messages of one session at once, and what a stop leaves half done."""

from __future__ import annotations

import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from app.library import open_documents, open_library
from app.settings import Settings
from tests.app.service import Service, towns

pytestmark = [pytest.mark.service, pytest.mark.model]

LONG = "Write a long story about a cat who sails around the world."


def orphans(folder: Path) -> int:
    """Rows of sessions that are not there."""
    with sqlite3.connect(folder / "audit.db") as db:
        return sum(
            db.execute(f"SELECT count(*) FROM {table} WHERE session_id NOT IN (SELECT id FROM sessions)").fetchone()[0]
            for table in ("blocks", "turns")
        )


def test_a_fork_of_a_session_whose_only_turn_was_cancelled(tmp_path: Path) -> None:
    service = Service(tmp_path)
    document, _ = service.ingest(*towns()[:2])
    session, bystander = service.session(), service.session()
    service.tell(bystander, "When does the ferry to Bodo leave?", top_k=1, max_tokens=4)
    for event, _ in service.ask(session, "When does the ferry to Bodo leave? " + "x y z " * 60, top_k=2, max_tokens=4):
        if event == "prefill" and len(service.blocks(session)) > 1:
            service.http.post(f"/v1/sessions/{session}/cancel")
    assert service.items(f"/v1/sessions/{session}/messages") == []
    fork = service.http.post(f"/v1/sessions/{session}/fork", json={}).json()["id"]
    assert document in {block["document_id"] for block in service.blocks(fork)}

    assert service.http.delete(f"/v1/documents/{document}").status_code == 204
    for held in (session, bystander, fork):
        (row,) = service.items(f"/v1/sessions/{held}/evictions")
        assert (row["document_id"], bool(row["turn_id"])) == (document, held != fork)
        assert document not in {block["document_id"] for block in service.blocks(held, state="resident")}
    too_long = service.tell(fork, "hi", max_tokens=5000)
    assert too_long.status_code == 422
    assert service.tell(fork, "When does the ferry to Narva leave?", top_k=1, max_tokens=4).status_code == 200
    assert service.http.get("/ready").json()["turns"] == 0
    service.stop()


def test_what_meets_a_deletion_is_refused_or_gone_with_it(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.ingest(*towns()[:1])
    # Something that keeps the MLX thread busy, so that all of it has to wait.
    busy = service.ask(service.session(), LONG, top_k=0, max_tokens=250)
    next(busy)

    def later(seconds: float, method: str, path: str, body: object) -> int:
        time.sleep(seconds)
        return service.http.request(method, path, json=body).status_code

    with ThreadPoolExecutor(4) as pool:
        for wait in (0.0, 0.005, 0.02, 0.05):
            session = service.session()
            path = f"/v1/sessions/{session}"
            question = {"content": "When does the ferry leave?", "stream": False, "max_tokens": 2}
            gone = [pool.submit(service.http.delete, path) for _ in range(2)]
            fork = pool.submit(later, wait, "POST", f"{path}/fork", {})
            asked = pool.submit(later, wait, "POST", f"{path}/messages", question)
            assert {answer.result().status_code for answer in gone} <= {204, 404}
            assert fork.result() in (201, 404, 409)
            assert asked.result() in (200, 404, 409)
            assert service.http.get(path).status_code == 404
    busy.close()
    while service.http.get("/ready").json()["turns"]:
        time.sleep(0.05)
    service.stop()
    assert orphans(tmp_path) == 0
    with sqlite3.connect(tmp_path / "audit.db") as db:
        known = {session for (session,) in db.execute("SELECT id FROM sessions")}
    assert {path.name.partition(".")[0] for path in (tmp_path / "sessions").iterdir()} <= known


def test_a_turn_that_has_to_wait_does_not_cite_what_was_deleted_meanwhile(tmp_path: Path) -> None:
    # Room for one session at a time.
    service = Service(tmp_path, KV_MEMORY_MB="8")
    document, other = service.ingest(*towns()[:2])
    first, second = service.session(budget_tokens=1024), service.session(budget_tokens=1024)
    running = service.ask(first, LONG, top_k=0, max_tokens=60)
    assert "token" in (event for event, _ in running)
    with ThreadPoolExecutor(1) as pool:
        question = "When does the ferry to Bodo leave?"
        waiting = pool.submit(lambda: service.tell(second, question, top_k=2, max_tokens=4).json())
        while service.http.get("/ready").json()["turns_waiting"] == 0:
            time.sleep(0.02)
        assert service.http.delete(f"/v1/documents/{document}").status_code == 204
        list(running)
        assert {source["document_id"] for source in waiting.result()["sources"]} == {other}
    assert {block["document_id"] for block in service.blocks(second)} == {None, other}
    service.stop()


@pytest.mark.slow
def test_a_start_finishes_what_a_stop_left_half_done(tmp_path: Path) -> None:
    service = Service(tmp_path)
    document, other = service.ingest(*towns()[:2])
    sessions = [service.session() for _ in range(2)]
    for session in sessions:
        service.tell(session, "When does the ferry to Bodo leave?", top_k=2, max_tokens=4)
    service.stop()
    # The library has deleted the document, and nobody has told the sessions; a session went without its snapshot.
    settings = Settings(data_dir=tmp_path)
    with (
        closing(open_documents(settings)) as documents,
        closing(open_library(documents, len, settings, at_work=False)) as library,
    ):
        library.delete(document)
    with sqlite3.connect(tmp_path / "audit.db") as db:
        db.execute("DELETE FROM sessions WHERE id = ?", [sessions[1]])
    assert len(list((tmp_path / "sessions").iterdir())) == 2
    assert orphans(tmp_path) > 0
    service.start()
    assert [path.name.partition(".")[0] for path in (tmp_path / "sessions").iterdir()] == [sessions[0]]
    assert not [path for path in (tmp_path / "bank").iterdir() if document in path.name]
    assert orphans(tmp_path) == 0
    (row,) = service.items(f"/v1/sessions/{sessions[0]}/evictions")
    assert (row["document_id"], row["reason"]) == (document, "document_deleted")
    end = service.tell(sessions[0], "When does the ferry to Narva leave?", top_k=2, max_tokens=4).json()
    assert {source["document_id"] for source in end["sources"]} == {other}
    # From its snapshot, which gave up the one block.
    assert end["usage"]["cached_tokens"] >= row["resident_after"]
    service.stop(signal.SIGTERM)


def test_who_leaves_while_passages_come_back_takes_nothing_from_the_log(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.ingest(*towns())
    asked = {"content": "Where does the ferry to Galway start?", "top_k": 6, "max_tokens": 1}
    service.tell(service.session(), asked["content"], top_k=6, max_tokens=1)
    for _ in range(6):
        session = service.session(budget_tokens=700)
        with service.http.stream("POST", f"/v1/sessions/{session}/messages", json=asked) as response:
            for line in response.iter_lines():
                if line == "event: recall":
                    break
        while service.http.get("/ready").json()["turns"]:
            time.sleep(0.02)
        # Its books are closed once it can be forked.
        fork = service.http.post(f"/v1/sessions/{session}/fork", json={})
        assert fork.status_code == 201
        (*_, last) = service.items(f"/v1/sessions/{session}/compression")
        for held in (session, fork.json()["id"]):
            resident = [block["tokens"] for block in service.blocks(held, state="resident")]
            assert (sum(resident), len(resident)) == (last["resident_tokens"], last["blocks"])
    assert len(service.http.get("/v1/sessions", params={"limit": 50}).json()["items"]) == 13
    service.stop()
