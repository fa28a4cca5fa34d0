"""`POST /v1/search` and what a turn says of its sources."""

from __future__ import annotations

import pytest

from tests.app.service import Service

pytestmark = [pytest.mark.service, pytest.mark.model]


def test_a_search_says_why_it_found_what_and_whether_vectors_are_complete(service: Service) -> None:
    answer = service.http.post("/v1/search", json={"query": "When does the ferry to Bodo leave?", "top_k": 3}).json()
    assert answer["vectors"] == {"embedder": "wordllama-256", "ready": True, "missing": 0}
    first = answer["items"][0]
    assert (first["name"], first["ranks"]["bm25"]) == ("Bodo.md", 1)
    assert all(0 < item["score"] <= 1 and set(item["ranks"]) == {"bm25", "vector"} for item in answer["items"])
    assert [item["score"] for item in answer["items"]] == sorted((i["score"] for i in answer["items"]), reverse=True)


def test_a_path_limits_a_search(service: Service) -> None:
    body = {"query": "ferry", "top_k": 50, "filter": {"path": "B*.md"}}
    assert {item["name"] for item in service.http.post("/v1/search", json=body).json()["items"]} == {"Bodo.md"}
    problem = service.http.post("/v1/search", json={"query": "ferry", "filter": {"path": ""}})
    assert (problem.status_code, problem.json()["field"]) == (422, "filter.path")
    assert "1 to 512 characters" in problem.json()["detail"]


def test_the_sources_of_a_turn_are_those_of_the_search_best_first(service: Service) -> None:
    question = "What does a ticket to Piran cost?"
    found = service.http.post("/v1/search", json={"query": question, "top_k": 2}).json()["items"]
    (_, retrieval), *_ = service.ask(service.session(), question, top_k=2, max_tokens=1)
    keys = ("name", "score", "ranks")
    assert [[source[key] for key in keys] for source in retrieval["sources"]] == [
        [item[key] for key in keys] for item in found
    ]
