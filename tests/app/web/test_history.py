"""What a session was: its turns, what the model saw at each, the story of a block, forks that begin earlier, search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.service import Service

pytestmark = [pytest.mark.model, pytest.mark.service]

ASKED = [
    "When does the ferry to Narva leave?",
    "What do tickets to Lecce cost?",
    "From which pier goes the Piran ferry?",
]


@pytest.fixture(scope="module")
def told(service: Service) -> Iterator[tuple[str, list[list[str]]]]:
    """A session of small budget, and the blocks it held after each of three turns."""
    session = service.session(budget_tokens=220)
    held = []
    for question in ASKED:
        assert service.tell(session, question, max_tokens=8, top_k=2).status_code == 200
        held.append([block["id"] for block in service.blocks(session, state="resident")])
    yield session, held
    service.http.delete(f"/v1/sessions/{session}")


def test_every_moment_can_be_looked_at_again(service: Service, told: tuple[str, list[list[str]]]) -> None:
    session, held = told
    turns = service.items(f"/v1/sessions/{session}/turns")
    assert [turn["question"] for turn in turns] == ASKED
    for turn, blocks in zip(turns, held, strict=True):
        then = service.http.get(f"/v1/sessions/{session}/cache", params={"turn": turn["id"]}).json()["items"]
        assert [block["id"] for block in then] == blocks
        assert {block["state"] for block in then} == {"resident"}
        assert sum(block["tokens"] for block in then) == turn["cache"]["resident_tokens"]
    assert service.http.get(f"/v1/sessions/{session}/cache", params={"turn": "trn_none"}).status_code == 404


def test_a_block_tells_its_story_with_the_rows_of_the_log(service: Service, told: tuple[str, list[list[str]]]) -> None:
    session, _ = told
    rows = service.items(f"/v1/sessions/{session}/evictions")
    assert rows
    row = rows[0]
    story = service.http.get(f"/v1/sessions/{session}/cache/{row['block_id']}").json()
    assert story["block"]["id"] == row["block_id"]
    assert "ferry" in story["text"] or "?" in story["text"]
    assert "system" not in story["text"].splitlines()[0]
    assert story["history"][0]["what"] in ("read", "recalled")
    assert row in [episode["eviction"] for episode in story["history"]]
    assert 1 <= row["rank"] <= row["candidates"]
    times = [episode["created_at"] for episode in story["history"]]
    assert times == sorted(times)
    assert service.http.get(f"/v1/sessions/{session}/cache/none").status_code == 404


def test_a_fork_from_before_a_turn_has_nothing_of_it_and_answers(
    service: Service, told: tuple[str, list[list[str]]]
) -> None:
    session, _ = told
    second = service.items(f"/v1/sessions/{session}/turns")[1]
    answer = service.http.post(f"/v1/sessions/{session}/fork", json={"before_turn": second["id"], "title": "again"})
    assert answer.status_code == 201, answer.text
    fork = answer.json()["id"]
    assert [turn["question"] for turn in service.items(f"/v1/sessions/{fork}/turns")] == ASKED[:1]
    assert all(block["turn"] <= 1 for block in service.blocks(fork))
    done = service.tell(fork, "What do tickets to Tarifa cost?", max_tokens=8).json()
    assert done["committed"]
    kept = sum(block["tokens"] for block in service.blocks(fork, state="resident"))
    assert kept == done["cache"]["resident_tokens"] <= 220
    assert len(service.items(f"/v1/sessions/{session}/turns")) == 3
    bad = service.http.post(f"/v1/sessions/{session}/fork", json={"before_turn": "trn_none"})
    assert bad.status_code == 404


def test_sessions_are_found_by_the_words_of_title_and_messages(service: Service) -> None:
    session = service.session(title="Harbour plans")
    service.tell(session, "Which quayside crane is the tallest?", max_tokens=4, top_k=0)

    def found(query: str) -> bool:
        return session in [one["id"] for one in service.items("/v1/sessions", query=query)]

    assert found("quayside")
    assert found("crane quaysi")
    assert found("harbour")
    assert not found("quayside zebra")
    assert not found("helicopter")
    assert found('"')
    renamed = service.http.patch(f"/v1/sessions/{session}", json={"title": "Helicopter"}).json()
    assert renamed["title"] == "Helicopter"
    assert renamed["preview"] == "Which quayside crane is the tallest?"
    assert found("helicopter")
    assert service.http.patch(f"/v1/sessions/{session}", json={"title": "x" * 201}).json()["field"] == "title"
    assert service.http.patch("/v1/sessions/none", json={"title": "x"}).status_code == 404
