"""`kill -9` at each stage of a turn: what was committed is there after a restart, whole, and nothing else."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.service import TOWNS, Service, towns

pytestmark = [pytest.mark.service, pytest.mark.model]

# The event upon which the process is killed. Together they are every stage: planned, made room, put in, read,
# answering, committed.
STAGES = ("retrieval", "eviction", "recall", "prefill", "token", "done")


def question(number: int) -> str:
    return f"When does the ferry to {TOWNS[number % len(TOWNS)]} leave?"


def killed_upon(service: Service, session: str, stage: str, number: int) -> list[dict[str, Any]]:
    """Ask, kill the process when it says so, and return the evictions that it had told of."""
    told = []
    stream: Iterator[tuple[str, dict[str, Any]]] = service.ask(session, question(number), top_k=2, max_tokens=12)
    for event, data in stream:
        if event == "eviction":
            told.append(data)
        if event == stage:
            break
    else:
        raise AssertionError(f"no {stage} in this turn")
    service.stop(signal.SIGKILL)
    stream.close()  # type: ignore[attr-defined]
    return told


def check(service: Service, session: str, history: list[tuple[str, str]]) -> None:
    """What the tables, the API and the folder say of each other."""
    messages = [(m["role"], m["content"]) for m in service.items(f"/v1/sessions/{session}/messages")]
    assert messages == history
    blocks = service.blocks(session)
    resident = [block for block in blocks if block["state"] == "resident"]
    shown = service.http.get(f"/v1/sessions/{session}").json()
    assert shown["resident_tokens"] == sum(block["tokens"] for block in resident) <= 224
    # Of each turn both blocks are there or neither.
    turns = [block["turn"] for block in resident if block["kind"] in ("question", "answer")]
    assert all(turns.count(turn) == 2 for turn in turns)
    evictions = service.items(f"/v1/sessions/{session}/evictions")
    recalls = service.items(f"/v1/sessions/{session}/recalls")
    for block in blocks:
        # It came once, and left and came back as often as the log says.
        left = sum(row["block_id"] == block["id"] for row in evictions)
        back = sum(row["block_id"] == block["id"] for row in recalls)
        assert (block["state"] == "resident") == (left == back), block
    with sqlite3.connect(service.folder / "audit.db") as db:
        assert db.execute("SELECT count(*) FROM turns WHERE status = 'running'").fetchone() == (0,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        waiting = {key for (key,) in db.execute("SELECT DISTINCT bank_key FROM blocks WHERE state = 'offloaded'")}
    # No half-written file, no snapshot of a state that is past, and what is said to wait is there.
    names = [path.name for folder in ("bank", "sessions") for path in (service.folder / folder).iterdir()]
    assert not [name for name in names if ".part" in name]
    assert waiting <= {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("stages", [("eviction", "token"), pytest.param(STAGES, marks=pytest.mark.slow)])
def test_the_last_committed_turn_is_there_whole_whenever_the_process_is_killed(
    tmp_path: Path, stages: tuple[str, ...]
) -> None:
    # No memory for the bank: what leaves is on disk at once, and can come back after a crash.
    service = Service(tmp_path, BANK_MEMORY_MB="0")
    service.ingest(*towns())
    session = service.session(budget_tokens=224)
    history: list[tuple[str, str]] = []
    number = 0

    def tell() -> None:
        nonlocal number
        answer = service.tell(session, question(number), top_k=2, max_tokens=12)
        assert answer.status_code == 200, answer.text
        history.extend([("user", question(number)), ("assistant", answer.json()["content"])])
        number += 1

    for _ in range(len(TOWNS)):
        tell()
    for stage in stages:
        told = killed_upon(service, session, stage, number)
        service.start()
        if stage == "done":
            # The client has heard that it is committed, and so it is.
            messages = service.items(f"/v1/sessions/{session}/messages")
            history.extend((m["role"], m["content"]) for m in messages[-2:])
            assert history[-2] == ("user", question(number))
        number += 1
        check(service, session, history)
        logged = service.items(f"/v1/sessions/{session}/evictions")
        assert [row for row in logged if row["id"] in {row["id"] for row in told}] == told
        # The next message works, and the books still agree.
        tell()
        check(service, session, history)
    service.stop()
