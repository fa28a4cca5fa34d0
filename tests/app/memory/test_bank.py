"""The passage bank in the service: K/V computed once, put into every session, gone with its document."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.app.service import TOWNS, Service, towns

pytestmark = [pytest.mark.service, pytest.mark.model]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Service]:
    """A server of the test's own."""
    service = Service(tmp_path)
    service.ingest(*towns())
    yield service
    service.stop()


def turn(service: Service, session: str, content: str, **body: Any) -> tuple[list[str], dict[str, Any]]:
    """The events of a turn by name, and the last data of each."""
    names, last = [], {}
    for name, data in service.ask(session, content, **body):
        names.append(name)
        last[name] = data
    return names, last


def test_a_passage_is_read_once_for_all_sessions(service: Service) -> None:
    question = "When does the ferry to Narva leave?"
    answers = []
    for number in range(2):
        session = service.session()
        names, last = turn(service, session, question, top_k=3, max_tokens=12)
        states = {source["state"] for source in last["retrieval"]["sources"]}
        recalls = service.items(f"/v1/sessions/{session}/recalls")
        if number == 1:
            assert states == {"recalled"}
            assert names.count("recall") == len(recalls) == 3
            assert {row["origin"] for row in recalls} == {"memory"}
            assert recalls[-1] == last["recall"]
            passages = sum(source["tokens"] for source in last["retrieval"]["sources"])
            usage = last["done"]["usage"]
            (system,) = service.blocks(session, kind="system")
            assert usage["cached_tokens"] == system["tokens"] + passages
            assert usage["prompt_tokens"] == usage["cached_tokens"] + usage["prefilled_tokens"]
            assert [row["resident_after"] - row["resident_before"] for row in recalls] == [
                row["tokens"] for row in recalls
            ]
        answers.append(last["done"]["content"])
    # Put in or read: the same K/V, so the same answer.
    assert answers[0] == answers[1]


def test_what_left_comes_back_and_the_log_says_so(service: Service) -> None:
    session = service.session(budget_tokens=224)
    seen: dict[str, list[str]] = {}
    recalled = 0
    for _ in range(2):
        for town in ("Bodo", "Narva", "Lecce", "Tarifa", "Galway"):
            _, last = turn(service, session, f"From which pier does the {town} ferry leave?", top_k=2, max_tokens=6)
            assert last["done"]["cache"]["peak_tokens"] <= 224
            for source in last["retrieval"]["sources"]:
                seen.setdefault(source["passage_id"], []).append(source["state"])
    blocks = service.blocks(session)
    passages = [block for block in blocks if block["passage_id"]]
    # A passage is one block, however often it left and came.
    assert len({block["passage_id"] for block in passages}) == len(passages)
    evictions = service.items(f"/v1/sessions/{session}/evictions")
    recalls = service.items(f"/v1/sessions/{session}/recalls")
    for block in passages:
        left = [row for row in evictions if row["block_id"] == block["id"]]
        came = [row for row in recalls if row["block_id"] == block["id"]]
        assert {row["outcome"] for row in left} <= {"offloaded"}
        times = sum(state in ("streamed", "recalled") for state in seen[block["passage_id"]])
        assert block["state"] == ("offloaded" if len(left) == times else "resident")
        assert len(left) in (times, times - 1)
        recalled += len(came)
    assert recalled > 2
    assert (
        sum(block["tokens"] for block in blocks if block["state"] == "resident")
        == (service.http.get(f"/v1/sessions/{session}").json()["resident_tokens"])
    )


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_the_bank_outlives_the_process_as_far_as_it_was_on_disk(tmp_path: Path, how: signal.Signals) -> None:
    service = Service(tmp_path, BANK_MEMORY_MB="4")
    service.ingest(*towns())
    session = service.session(budget_tokens=224)
    for town in ("Bodo", "Narva", "Lecce"):
        turn(service, session, f"When does the {town} ferry leave?", top_k=2, max_tokens=2)
    before = service.blocks(session)
    service.stop(how)
    service.start()
    after = {block["id"]: block for block in service.blocks(session)}
    for block in before:
        now = after[block["id"]]["state"]
        if block["state"] != "offloaded" or how is signal.SIGTERM:
            assert now == block["state"]
        else:
            assert now in ("offloaded", "dropped")
    origins = set()
    for town in ("Bodo", "Narva", "Lecce"):
        names, last = turn(service, session, f"When does the {town} ferry leave?", top_k=2, max_tokens=2)
        assert names[-1] == "done"
        origins |= {last["recall"]["origin"]} if "recall" in last else set()
    assert "disk" in origins
    assert not list((tmp_path / "bank").glob("*.part.*"))
    service.stop()


def test_sessions_that_read_new_passages_at_once_do_not_meet(own: Service) -> None:
    """Passages of one system prompt are computed in turns, a forward pass each, and still each by itself."""

    def ask(town: str) -> tuple[str, str]:
        names, last = turn(own, own.session(), f"When does the {town} ferry leave?", top_k=1, max_tokens=8)
        return names[-1], last[names[-1]].get("content", last[names[-1]])

    # From here on a session that holds the system prompt waits to be used, with room for several towns.
    own.ingest(("atlantis.md", "# Atlantis\n\n" + "The Atlantis ferry sank long ago. " * 16))
    ask("Atlantis")
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, TOWNS))
    assert [name for name, _ in together] == ["done"] * 6
    assert together == [ask(town) for town in TOWNS]


def test_a_deleted_documents_k_v_is_gone_at_once(own: Service) -> None:
    session = own.session(budget_tokens=224)
    for town in ("Bodo", "Narva", "Lecce"):
        turn(own, session, f"When does the {town} ferry leave?", top_k=2, max_tokens=4)
    offloaded = [block for block in own.blocks(session, state="offloaded")]
    assert offloaded
    document = offloaded[0]["document_id"]
    assert own.http.delete(f"/v1/documents/{document}").status_code == 204
    moves = own.items("/v1/audit/moves", document_id=document)
    assert [(move["target"], move["reason"], move["blocks_dropped"]) for move in moves] == [
        ("dropped", "document_deleted", 1)
    ]
    states = {block["id"]: block["state"] for block in own.blocks(session)}
    assert states[offloaded[0]["id"]] == "dropped"
    own.stop()
    assert not [path for path in (own.folder / "bank").iterdir() if document in path.name]
    own.start()


def test_a_damaged_file_is_read_anew(tmp_path: Path) -> None:
    service = Service(tmp_path, BANK_MEMORY_MB="0")
    service.ingest(*towns())
    first = service.session()
    _, last = turn(service, first, "When does the Narva ferry leave?", top_k=1, max_tokens=8)
    answer = last["done"]["content"]
    (file,) = (path for path in (tmp_path / "bank").iterdir() if ".doc_" in path.name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    _, last = turn(service, service.session(), "When does the Narva ferry leave?", top_k=1, max_tokens=8)
    assert "recall" not in last
    assert last["done"]["content"] == answer
    moves = [(m["target"], m["reason"]) for m in service.items("/v1/audit/moves") if m["document_id"]]
    assert moves == [("disk", "memory_cap"), ("dropped", "damaged"), ("disk", "memory_cap")]
    _, last = turn(service, service.session(), "When does the Narva ferry leave?", top_k=1, max_tokens=8)
    assert last["recall"]["origin"] == "disk"
    service.stop()


@pytest.mark.slow
def test_without_a_bank_every_session_reads_for_itself(tmp_path: Path) -> None:
    service = Service(tmp_path, BANK_MEMORY_MB="0", BANK_DISK_MB="0")
    service.ingest(*towns())
    for _ in range(2):
        session = service.session(budget_tokens=224)
        for town in ("Bodo", "Narva", "Lecce"):
            names, _ = turn(service, session, f"When does the {town} ferry leave?", top_k=2, max_tokens=2)
            assert "recall" not in names
        assert {row["outcome"] for row in service.items(f"/v1/sessions/{session}/evictions")} == {"dropped"}
    service.stop()
    with sqlite3.connect(tmp_path / "audit.db") as db:
        assert db.execute("SELECT count(*) FROM blocks WHERE bank_key IS NOT NULL").fetchone() == (0,)


@pytest.mark.slow
def test_first_tokens_may_be_read_anew(tmp_path: Path) -> None:
    service = Service(tmp_path, BANK_RECOMPUTE="5")
    service.ingest(*towns())
    for number in range(2):
        _, last = turn(service, service.session(), "When does the Narva ferry leave?", top_k=2, max_tokens=4)
        if number:
            assert last["recall"]["recomputed"] == 5
            assert last["done"]["usage"]["prefilled_tokens"] > 10
    service.stop()


def test_an_old_exchange_comes_back_when_a_question_refers_to_it(own: Service) -> None:
    session = own.session(budget_tokens=192)
    turn(own, session, "My dog is called Bramble. Please remember that.", top_k=0, max_tokens=16)
    told = [block["id"] for block in own.blocks(session)][1:]
    for number, town in enumerate(TOWNS):
        turn(own, session, f"When does the ferry to {town} leave?", top_k=1, max_tokens=12)
        if number == 3:
            # What left is kept through a restart.
            own.stop()
            own.start()
    states = {block["id"]: block["state"] for block in own.blocks(session)}
    assert {states[block_id] for block_id in told} == {"offloaded"}
    seen = own.http.get(f"/v1/sessions/{session}").json()["seen_tokens"]
    names, last = turn(own, session, "What is my dog called?", top_k=0, max_tokens=16)
    assert "Bramble" in last["done"]["content"]
    assert names.count("recall") == 2
    recalls = own.items(f"/v1/sessions/{session}/recalls")[-2:]
    assert [(row["block_id"], row["kind"], row["recomputed"]) for row in recalls] == [
        (told[0], "question", 0),
        (told[1], "answer", 0),
    ]
    assert [row["resident_after"] - row["resident_before"] for row in recalls] == [row["tokens"] for row in recalls]
    blocks = own.blocks(session)
    assert [block["id"] for block in blocks if block["state"] == "resident"][-4:-2] == told
    # Nothing of it was read again, and nothing is counted twice.
    usage = last["done"]["usage"]
    assert usage["prefilled_tokens"] < 30
    new = sum(block["tokens"] for block in blocks[-2:])
    assert own.http.get(f"/v1/sessions/{session}").json()["seen_tokens"] == seen + new
    assert last["done"]["cache"]["seen_tokens"] == seen + new
    # When the session goes, so does what was kept of it.
    moves = own.items("/v1/audit/moves")
    assert own.http.delete(f"/v1/sessions/{session}").status_code == 204
    gone = own.items("/v1/audit/moves")[len(moves) :]
    assert {(row["session_id"], row["document_id"], row["target"], row["reason"]) for row in gone} == {
        (session, None, "dropped", "session_deleted")
    }


def test_ingested_passages_are_read_ahead_while_nothing_is_asked(tmp_path: Path) -> None:
    service = Service(tmp_path, BANK_AHEAD="1", BANK_DISK_MB="0")
    documents = service.ingest(*towns())
    session = service.session()
    (system,) = service.blocks(session)

    def banked() -> int:
        return int(service.http.get("/ready").json()["bank_kv_bytes"])

    # One token takes 46,080 bytes: each town's passage and the system prompt, which each of them begins with.
    found = service.http.post("/v1/search", json={"query": "ferry", "top_k": 6}).json()["items"]
    assert len(found) == 6
    deadline = time.monotonic() + 60
    while (held := banked()) < 46_080 * (system["tokens"] + sum(passage["tokens"] for passage in found)):
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
    names, last = turn(service, session, "When does the ferry to Narva leave?", top_k=4, max_tokens=12)
    assert {source["state"] for source in last["retrieval"]["sources"]} == {"recalled"}
    assert names.count("recall") == 4
    usage = last["done"]["usage"]
    (question,) = service.blocks(session, kind="question")
    # Only the question is read, and what the template puts before an answer.
    assert usage["prefilled_tokens"] <= question["tokens"] + 8
    # A document that is deleted is not read ahead again, nor kept.
    for document in documents:
        assert service.http.delete(f"/v1/documents/{document}").status_code == 204
    time.sleep(0.2)
    assert banked() == 46_080 * system["tokens"]
    service.stop()
