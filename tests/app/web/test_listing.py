"""Lists, pages and filters over HTTP, checked against the SQLite file itself; probes; the API's page."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.app.service import TOWNS, Service

pytestmark = [pytest.mark.service, pytest.mark.model]


@pytest.fixture(scope="module")
def session(service: Service) -> str:
    """A session that has evicted blocks of several kinds, for several reasons."""
    session = service.session(budget_tokens=160, title="Ferries")
    for number, town in enumerate((*TOWNS, *TOWNS[:2])):
        # The last ones are so long that they need room while they are written.
        question = f"When does the ferry to {town} leave? Tell a long story of it."
        answer = service.tell(session, question, top_k=1, max_tokens=16 if number < 6 else 60)
        assert answer.status_code == 200
    return session


def rows(service: Service, sql: str, *bound: Any) -> list[dict[str, Any]]:
    with sqlite3.connect(service.folder / "audit.db") as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(sql, bound)]


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
@pytest.mark.parametrize(("list_", "table"), [("evictions", "evictions"), ("compression", "compression"),
                                              ("cache", "blocks")])  # fmt: skip
def test_pages_are_the_rows_of_the_table_in_order(
    service: Service, session: str, list_: str, table: str, limit: int
) -> None:
    listed = service.items(f"/v1/sessions/{session}/{list_}", limit=limit)
    stored = rows(service, f"SELECT * FROM {table} WHERE session_id = ? ORDER BY seq", session)
    assert len(listed) == len(stored) > 5
    assert listed == [{name: row[name] for name in item} for item, row in zip(listed, stored, strict=True)]


@pytest.mark.parametrize("name", ["turn_id", "kind", "reason", "document_id", "passage_id", "session_id"])
def test_each_filter_of_the_audit_log(service: Service, session: str, name: str) -> None:
    every = rows(service, "SELECT * FROM evictions ORDER BY seq")
    for value in {row[name] for row in every if row[name] is not None}:
        found = service.items("/v1/audit/evictions", **{name: value})
        assert [row["id"] for row in found] == [row["id"] for row in every if row[name] == value]
        if name != "session_id":
            found = service.items(f"/v1/sessions/{session}/evictions", **{name: value})
            mine = [row["id"] for row in every if row[name] == value and row["session_id"] == session]
            assert [row["id"] for row in found] == mine
    if name not in ("kind", "reason"):
        assert service.items("/v1/audit/evictions", **{name: "none"}) == []


def test_the_time_filters_are_inclusive(service: Service, session: str) -> None:
    every = service.items(f"/v1/sessions/{session}/evictions")
    middle = every[len(every) // 2]["created_at"]
    early = service.items(f"/v1/sessions/{session}/evictions", until=middle)
    late = service.items(f"/v1/sessions/{session}/evictions", since=middle)
    assert [row["id"] for row in early] == [row["id"] for row in every if row["created_at"] <= middle]
    assert [row["id"] for row in late] == [row["id"] for row in every if row["created_at"] >= middle]


def test_the_log_has_both_reasons_and_sums_that_hold(service: Service, session: str) -> None:
    evictions = service.items(f"/v1/sessions/{session}/evictions")
    assert {row["reason"] for row in evictions} == {"not_relevant", "room_for_turn", "room_for_answer"}
    assert {"prose", "question", "answer"} <= {row["kind"] for row in evictions}
    for row in evictions:
        assert row["resident_before"] - row["tokens"] == row["resident_after"]
    points = service.items(f"/v1/sessions/{session}/compression")
    for point in points:
        assert point["compression_ratio"] == pytest.approx(point["seen_tokens"] / point["resident_tokens"])
        assert point["resident_tokens"] <= point["budget_tokens"] == 160
    assert [p["phase"] for p in points].count("turn_end") == 8
    assert points[-1]["compression_ratio"] > 2
    shown = service.http.get(f"/v1/sessions/{session}").json()
    assert shown["resident_tokens"] == points[-1]["resident_tokens"]
    assert shown["seen_tokens"] == points[-1]["seen_tokens"]
    assert (shown["title"], shown["turns"]) == ("Ferries", 8)


def test_the_cache_list_filters_by_state_and_kind(service: Service, session: str) -> None:
    every = service.blocks(session)
    for state in ("resident", "offloaded", "dropped"):
        assert service.blocks(session, state=state) == [block for block in every if block["state"] == state]
    assert service.blocks(session, kind="question") == [block for block in every if block["kind"] == "question"]


def test_the_history_has_every_message_with_its_sources(service: Service, session: str) -> None:
    history = service.items(f"/v1/sessions/{session}/messages")
    assert [message["role"] for message in history] == ["user", "assistant"] * 8
    for question, answer in zip(history[::2], history[1::2], strict=True):
        assert question["turn_id"] == answer["turn_id"]
        assert answer["sources"][0]["name"].removesuffix(".md") in question["content"]


def test_documents_passages_and_jobs_are_listed(service: Service) -> None:
    (document,) = service.ingest(
        ("zebra.md", "# Zebra\n\nStriped.\n\n## Food\n\nGrass.\n\n```py\nprint('zebra')\n```\n")
    )
    assert service.items("/v1/documents")[0]["id"] == document
    assert service.http.get(f"/v1/documents/{document}").json()["status"] == "done"
    passages = service.items(f"/v1/documents/{document}/passages")
    assert "".join(passage["text"] for passage in passages).startswith("# Zebra")
    assert "```py\nprint('zebra')\n```" in "".join(passage["text"] for passage in passages)
    assert service.items("/v1/jobs")[0]["documents"][0]["id"] == document
    found = service.http.post("/v1/search", json={"query": "zebra", "filter": {"document_id": document}}).json()
    assert {passage["document_id"] for passage in found["items"]} == {document}


def test_probes(service: Service) -> None:
    for path in ("/health", "/ready"):
        assert service.http.get(path).status_code == service.http.head(path).status_code == 200
    assert service.http.get("/ready").json()["model"] == "smollm2-135m-instruct"


def test_the_api_page_asks_nothing_of_the_internet(service: Service) -> None:
    page = service.http.get("/schema", follow_redirects=True)
    assert page.status_code == 200
    assert "http" not in re.sub(r"<!--.*?-->", "", re.sub(r"<script>.*?</script>", "", page.text, flags=re.S))
    for path in re.findall(r'(?:src|href)=["\'](/schema/[^"\']+)', page.text):
        assert service.http.get(path).status_code == 200, path


@pytest.mark.browser
def test_the_api_page_works_in_a_browser_without_internet(service: Service, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
               "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}",
               "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
               "--virtual-time-budget=10000", "--dump-dom", f"{service.url}/schema"]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    for operation in ("/v1/sessions", "/v1/audit", "/v1/documents"):
        # Swagger breaks paths at slashes with zero-width spaces.
        assert operation in page.replace("\u200b", "").replace("<wbr>", ""), operation
