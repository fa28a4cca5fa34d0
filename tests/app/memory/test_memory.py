"""The cap on K/V in memory, on a real server: who waits, who goes to disk, and what the server says of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.app.service import Service

pytestmark = [pytest.mark.service, pytest.mark.model]

QUESTION = "Tell me a story about a cat who sails around the world."


def test_turns_wait_for_room_in_the_order_they_came_and_the_cap_holds(tmp_path: Path) -> None:
    # One token takes 46 kB: of a budget of 128 and a buffer's spare rows one session takes up to 8.8 MB, two 17.7.
    service = Service(tmp_path, KV_MEMORY_MB="20", MAX_TURNS="4")
    sessions = [service.session(budget_tokens=128) for _ in range(4)]
    ended: list[int] = []
    samples: list[dict[str, Any]] = []

    def ask(number: int) -> str:
        # In this order, and each before the one before it is done.
        time.sleep(0.1 * number)
        answer = service.tell(sessions[number], QUESTION, top_k=0, max_tokens=40).json()["content"]
        ended.append(number)
        return str(answer)

    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask, number) for number in range(4)]
        while not all(answer.done() for answer in answers):
            samples.append(service.http.get("/ready").json())
            time.sleep(0.05)
    assert ended == [0, 1, 2, 3]
    assert len({answer.result() for answer in answers}) == 1
    assert max(sample["turns_at_work"] for sample in samples) == 1
    assert max(sample["turns_waiting"] for sample in samples) >= 2
    for sample in samples:
        assert sample["kv_limit_bytes"] == 20_000_000
        assert sample["session_kv_bytes"] <= 15_000_000
        assert sample["session_kv_bytes"] + sample["bank_kv_bytes"] <= sample["kv_limit_bytes"]
        assert sample["turns_at_work"] + sample["turns_waiting"] <= 4
    assert "idle sessions moved" in service.log_path.read_text()
    # Each goes on from where it was.
    for session in sessions:
        resident = service.http.get(f"/v1/sessions/{session}").json()["resident_tokens"]
        assert service.tell(session, "Go on.", top_k=0, max_tokens=2).json()["usage"]["cached_tokens"] == resident
    service.stop()


def test_one_that_waits_can_be_cancelled_and_a_session_over_the_cap_runs_alone(tmp_path: Path) -> None:
    service = Service(tmp_path, KV_MEMORY_MB="8")
    # Each may grow beyond the cap: then it is for one at a time.
    first, second = service.session(budget_tokens=1024), service.session(budget_tokens=1024)
    running = service.ask(first, QUESTION, top_k=0, max_tokens=200)
    assert "token" in (event for event, _ in running)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: service.tell(second, QUESTION, top_k=0, max_tokens=8).json())
        while service.http.get("/ready").json()["turns_waiting"] == 0:
            time.sleep(0.02)
        assert service.http.post(f"/v1/sessions/{second}/cancel").json() == {"cancelled": True}
        end = waiting.result()
    assert (end["finish_reason"], end["committed"]) == ("cancelled", False)
    assert next(event for event, _ in running) == "token"
    assert service.items(f"/v1/sessions/{second}/messages") == []
    running.close()
    assert service.tell(second, "Hello", top_k=0, max_tokens=4).json()["finish_reason"] == "length"
    assert "than all may" in service.log_path.read_text()
    service.stop()
