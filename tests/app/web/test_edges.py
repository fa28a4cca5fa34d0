"""Retrieval at its edges: nothing that helps, more than fits, and passages that are all as good as each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.app.service import Service, towns

pytestmark = [pytest.mark.service, pytest.mark.model]


def states(end: dict[str, Any]) -> list[str]:
    return [source["state"] for source in end["sources"]]


def check(service: Service, session: str, end: dict[str, Any], budget: int) -> None:
    assert end["finish_reason"] in ("stop", "length")
    assert end["content"]
    assert end["cache"]["peak_tokens"] <= budget
    resident = service.blocks(session, state="resident")
    assert sum(block["tokens"] for block in resident) == end["cache"]["resident_tokens"] <= budget
    held = {block["passage_id"] for block in resident}
    for source in end["sources"]:
        # What was skipped was not read; of what was not, some may have made room for a long answer since.
        assert source["state"] != "skipped" or source["passage_id"] not in held


def test_passages_that_do_not_help_push_no_exchange_out(service: Service) -> None:
    budget = 320
    session = service.session(budget_tokens=budget)
    told = service.tell(session, "My parrot is called Kiwi.", top_k=0, max_tokens=12).json()
    end = service.tell(session, "What is my parrot on the ferry called?", top_k=4, max_tokens=12).json()
    check(service, session, end, budget)
    assert end["sources"]
    # They take what room there is; what was said last stays.
    assert end["usage"]["cached_tokens"] >= told["cache"]["resident_tokens"]
    assert not [row for row in end["evictions"] if row["kind"] in ("question", "answer")]


def test_a_passage_larger_than_the_budget_is_skipped_and_said_so(tmp_path: Path) -> None:
    service = Service(tmp_path, PASSAGE_TOKENS="512")
    prose = " ".join(f"The ferry to Narva passed buoy number {i} in the fog." for i in range(30))
    service.ingest(("log.md", f"# Log\n\n{prose}\n"), *towns(["Narva"]))
    session = service.session(budget_tokens=192)
    end = service.tell(session, "When does the ferry to Narva leave?", top_k=2, max_tokens=16).json()
    check(service, session, end, 192)
    by_name = {source["name"]: source for source in end["sources"]}
    assert by_name["log.md"]["tokens"] > 192
    assert (by_name["log.md"]["state"], by_name["Narva.md"]["state"]) == ("skipped", "streamed")
    assert ":15" in end["content"]
    # Alone, it leaves the question without a passage, and with an answer all the same.
    alone = service.tell(session, "Which buoy was in the fog?", top_k=1, max_tokens=8).json()
    check(service, session, alone, 192)
    assert states(alone) == ["skipped"]
    service.stop()


@pytest.mark.slow
def test_twenty_passages_that_are_equally_relevant(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.ingest(*((f"note{i:02}.md", "The ferry to Narva leaves at 7:15 from pier 3.\n") for i in range(20)))
    budget = 320
    session = service.session(budget_tokens=budget)
    question = "When does the ferry to Narva leave?"
    ends = [service.tell(session, question, top_k=20, max_tokens=16).json() for _ in range(3)]
    for end in ends:
        check(service, session, end, budget)
        assert len(end["sources"]) == 20
        assert "7:15" in end["content"]
    # As many as fit, the first ones, and the same ones each time, so that nothing comes and goes for nothing.
    fitting = [i for i, state in enumerate(states(ends[0])) if state != "skipped"]
    assert fitting == list(range(len(fitting)))
    assert 5 <= len(fitting) < 20
    order = [source["passage_id"] for source in ends[0]["sources"]]
    for end in ends[1:]:
        assert [source["passage_id"] for source in end["sources"]] == order
        assert set(states(end)[: len(fitting) - 1]) == {"resident"}
        assert all(row["passage_id"] not in order[: len(fitting) - 1] for row in end["evictions"])
    service.stop()
