"""Whatever is wrong with a request, the answer is a problem detail that says what, and nothing has changed."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from tests.app.service import Service

pytestmark = [pytest.mark.service, pytest.mark.model]


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail"} <= set(body)
    assert body["status"] == status
    return body


@pytest.fixture(scope="module")
def session(service: Service) -> str:
    return service.session(budget_tokens=256)


@pytest.mark.parametrize(
    ("body", "field", "shown"),
    [
        ({"content": ""}, "content", "''"),
        ({"content": " \n\t "}, "content", "visible"),
        ({"content": 5}, "content", "str"),
        ({"content": None}, "content", "str"),
        ({}, "content", "required"),
        ([], "body", "object"),
        ({"content": "x", "bogus": 1}, "bogus", "unknown field"),
        ({"content": "x", "top_k": -1}, "top_k", "-1"),
        ({"content": "x", "top_k": 99}, "top_k", "20"),
        ({"content": "x", "top_k": 1.5}, "top_k", "int"),
        ({"content": "x", "max_tokens": 0}, "max_tokens", "1"),
        ({"content": "x", "max_tokens": 9000}, "max_tokens", "256"),
        ({"content": "x", "temperature": 2.1}, "temperature", "2"),
        ({"content": "x", "temperature": -0.1}, "temperature", "0"),
        ({"content": "x", "stop": [""]}, "stop", "1"),
        ({"content": "x", "stop": ["a"] * 5}, "stop", "4"),
        ({"content": "x", "stop": "a" * 65}, "stop", "64"),
        ({"content": "x", "stream": "yes"}, "stream", "bool"),
        ({"content": "x", "filter": {"bogus": 1}}, "filter.bogus", "unknown field"),
        ({"content": "x", "filter": {"kind": "poem"}}, "filter.kind", "prose"),
        ({"content": "word " * 9000}, "content", "256"),
    ],
)
def test_a_bad_message(service: Service, session: str, body: Any, field: str, shown: str) -> None:
    answer = problem(service.http.post(f"/v1/sessions/{session}/messages", json=body), 422)
    assert answer["field"] == field
    assert field in answer["detail"]
    assert shown in answer["detail"]
    assert service.items(f"/v1/sessions/{session}/messages") == []
    assert [block["kind"] for block in service.blocks(session)] == ["system"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"budget_tokens": 20}, "budget_tokens"),
        ({"budget_tokens": 0}, "budget_tokens"),
        ({"budget_tokens": 100_000}, "budget_tokens"),
        ({"budget_tokens": "many"}, "budget_tokens"),
        ({"budget_tokens": 64, "system_prompt": "word " * 100}, "budget_tokens"),
        ({"title": "t" * 201}, "title"),
        ({"method": "magic"}, "method"),
        ({"score": "magic"}, "score"),
        ({"name": "x"}, "name"),
    ],
)
def test_a_bad_session(service: Service, body: dict[str, Any], field: str) -> None:
    before = service.items("/v1/sessions")
    assert problem(service.http.post("/v1/sessions", json=body), 422)["field"] == field
    assert service.items("/v1/sessions") == before


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "query"),
        ({"query": 1}, "query"),
        ({"query": "x", "top_k": 0}, "top_k"),
        ({"query": "x", "top_k": 51}, "top_k"),
        ({"query": "x", "limit": 1}, "limit"),
        ({"query": "x", "filter": {"kind": "poem"}}, "filter.kind"),
        ({"query": "x", "filter": {"metadata": {"a": [1]}}}, "filter.metadata.a"),
    ],
)
def test_a_bad_search(service: Service, body: dict[str, Any], field: str) -> None:
    assert problem(service.http.post("/v1/search", json=body), 422)["field"] == field


QUERIES = ["", " ", '"', "'", '"a', "a AND", "NEAR(", "a*", "-a", "*", "name:x", "^", "(", "\0", "a\0b", "😀", "%", "_",
           "a OR b NOT c", "x" * 10_000, "{a b}: c", ";DROP TABLE passages"]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_any_text_is_a_query(service: Service, query: str) -> None:
    assert service.http.post("/v1/search", json={"query": query}).status_code == 200
    assert service.http.post("/v1/search", json={"query": f"{query} ferry Bodo"}).json()["items"][0]["name"]


@pytest.mark.parametrize(
    ("files", "status", "field", "shown"),
    [
        ({"files": ("a.md", b"")}, 422, "files", "blank"),
        ({"files": ("a.md", b" \n ")}, 422, "files", "blank"),
        ({"files": ("a.txt", b"text\x00more")}, 415, "files", "byte 4"),
        ({"files": ("a.txt", b"\xff\xfe\x00")}, 415, "files", "UTF-16"),
        ({"files": ("a.png", b"\x89PNG\r\n")}, 415, "files", "png"),
        ({"files": ("a.md", b"text", "application/pdf")}, 415, "files", "application/pdf"),
        ({"files": ("n" * 600 + ".md", b"text")}, 422, "files", "512"),
        ({"file": ("a.md", b"text")}, 422, "file", "files"),
        ({"metadata": (None, "{}")}, 422, "files", "one or more"),
        ({"files": ("a.md", b"text"), "metadata": (None, "{")}, 422, "metadata", "JSON"),
        ({"files": ("a.md", b"text"), "metadata": (None, "[1]")}, 422, "metadata", "object"),
        ({"files": ("a.md", b"text"), "metadata": (None, '{"a": {"b": 1}}')}, 422, "metadata.a", "text, a number"),
    ],
)
def test_a_bad_upload(service: Service, files: Any, status: int, field: str, shown: str) -> None:
    before = service.items("/v1/documents")
    answer = problem(service.http.post("/v1/documents", files=files), status)
    assert answer["field"] == field
    assert shown in answer["detail"]
    assert service.items("/v1/documents") == before


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"name": "a.md"}, 422, "text"),
        ({"name": "a.md", "text": 5}, 422, "text"),
        ([], 422, "body"),
        ({"name": "a.md", "text": ""}, 422, "text"),
        ({"name": "a.md", "text": "a\0b"}, 415, "text"),
        ({"name": "", "text": "a"}, 422, "name"),
        ({"name": "a\nb", "text": "a"}, 422, "name"),
        ({"name": "a", "text": "a", "bogus": 1}, 422, "bogus"),
        ({"name": "a", "text": "a", "metadata": {"k": [1]}}, 422, "metadata.k"),
        ({"name": "a", "text": "a", "media_type": "image/png"}, 415, "media_type"),
    ],
)
def test_a_bad_document(service: Service, body: Any, status: int, field: str) -> None:
    before = service.items("/v1/documents")
    assert problem(service.http.post("/v1/documents", json=body), status)["field"] == field
    assert service.items("/v1/documents") == before


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/search", "/v1/documents"])
@pytest.mark.parametrize("body", [b"", b"{", b'{"title": "\\ud800"}', b"\xff", b"nonsense", b'{"a":1}}'])
def test_a_body_that_is_not_json(service: Service, path: str, body: bytes) -> None:
    answer = service.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    # A typed decoder may find a wrong field before it finds that the text is not JSON.
    assert problem(answer, answer.status_code)["field"] in ("body", "title", "a")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/sessions/ses_none", 404),
        ("DELETE", "/v1/sessions/ses_none", 404),
        ("POST", "/v1/sessions/ses_none/cancel", 404),
        ("GET", "/v1/sessions/ses_none/messages", 404),
        ("GET", "/v1/sessions/ses_none/cache", 404),
        ("GET", "/v1/sessions/ses_none/evictions", 404),
        ("GET", "/v1/sessions/ses_none/compression", 404),
        ("GET", "/v1/documents/doc_none", 404),
        ("DELETE", "/v1/documents/doc_none", 404),
        ("GET", "/v1/documents/doc_none/passages", 404),
        ("GET", "/v1/jobs/job_none", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/sessions/%00", 404),
        ("PUT", "/v1/sessions", 405),
        ("GET", "/v1/search", 405),
        ("GET", "/v1/sessions?limit=0", 422),
        ("GET", "/v1/sessions?limit=100000", 422),
        ("GET", "/v1/sessions?limit=many", 422),
        ("GET", "/v1/sessions?cursor=nonsense", 422),
        ("GET", "/v1/sessions?offset=3", 422),
        ("GET", "/v1/documents?limit=-1", 422),
        ("GET", "/v1/jobs?cursor=%F0", 422),
        ("GET", "/v1/audit/evictions?since=yesterday", 422),
        ("GET", "/v1/audit/evictions?resaon=room_for_turn", 422),
        ("GET", "/v1/audit/evictions?reason=zzz", 422),
        ("GET", "/v1/audit/evictions?kind=zzz", 422),
        ("GET", "/v1/sessions?cursor=", 422),
        ("GET", "/v1/documents?cursor=", 422),
        ("GET", "/v1/sessions?limit=1&limit=2", 422),
    ],
)
def test_no_such_thing(service: Service, method: str, path: str, status: int) -> None:
    answer = problem(service.http.request(method, path), status)
    if status == 422:
        assert answer["field"] == path.partition("?")[2].partition("=")[0]


def test_an_unknown_session_cannot_be_asked(service: Service) -> None:
    assert "ses_none" in problem(service.tell("ses_none", "Hello"), 404)["detail"]


def test_a_wrong_content_type(service: Service) -> None:
    answer = service.http.post("/v1/documents", content=b"text", headers={"content-type": "text/plain"})
    assert "text/plain" in problem(answer, 415)["detail"]
    answer = service.http.post("/v1/documents", content=b"x", headers={"content-type": "multipart/form-data"})
    assert problem(answer, 400)["field"] == "body"


def test_a_body_larger_than_the_limit_says_the_limit(service: Service) -> None:
    # The server may close the connection before all of it was sent.
    body = json.dumps({"name": "big.txt", "text": "x" * 21_000_000})
    answer = service.http.post("/v1/documents", content=body, headers={"content-type": "application/json"})
    assert "20000000" in problem(answer, 413)["detail"]
    answer = service.http.post("/v1/documents", files={"files": ("big.txt", b"x" * 21_000_000)})
    assert "20000000" in problem(answer, 413)["detail"]


def test_of_several_files_the_good_ones_go_on(service: Service) -> None:
    files = [("files", ("good.md", b"# Good\n\nA bongo is an antelope.\n")), ("files", ("bad.bin", b"\x00\x01"))]
    answer = service.http.post("/v1/documents", files=files)
    assert answer.status_code == 202
    job = service.finish(answer.json()["job_id"])
    assert {d["name"]: d["status"] for d in job["documents"]} == {"good.md": "done", "bad.bin": "failed"}
    assert "media_type" in next(d["error"] for d in job["documents"] if d["status"] == "failed")


def test_two_files_of_one_name_are_not_taken_for_one(service: Service) -> None:
    files = [("files", ("twin.md", b"# One\n\nA gerenuk.\n")), ("files", ("twin.md", b"# Two\n\nA dibatag.\n"))]
    job = service.finish(service.http.post("/v1/documents", files=files).json()["job_id"])
    assert [document["status"] for document in job["documents"]] == ["done", "failed"]
    assert "one request takes one file of a name" in job["documents"][1]["error"]


def test_a_request_takes_thousands_of_files_and_names_the_limit(service: Service) -> None:
    def files(count: int) -> list[tuple[str, tuple[str, bytes]]]:
        return [("files", (f"many/{n}.bin", b"\0")) for n in range(count)]

    answer = problem(service.http.post("/v1/documents", files=files(1200)), 415)
    assert len(answer["files"]) == 1200
    answer = problem(service.http.post("/v1/documents", files=files(5002)), 413)
    assert (answer["field"], "5000 files" in answer["detail"]) == ("files", True)


def test_a_name_is_data_and_never_a_path(service: Service) -> None:
    files = [("files", ("../../etc/passwd", b"The okapi lives in the Congo."))]
    job = service.finish(service.http.post("/v1/documents", files=files).json()["job_id"])
    assert job["status"] == "done"
    assert sorted(path.name for path in service.folder.iterdir() if "db" not in path.suffix) == [
        "bank",
        "server.log",
        "sessions",
    ]
    found = service.http.post("/v1/search", json={"query": "okapi"}).json()["items"]
    assert found[0]["document_id"] == job["documents"][0]["id"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sessions", "[" * 100_000),
        ("/v1/search", '{"query":' + "[" * 100_000),
        ("/v1/documents", '{"name": "a", "text": "x", "metadata": ' + '{"a":' * 5000),
    ],
)
def test_a_body_nested_too_deeply(service: Service, path: str, body: str) -> None:
    answer = service.http.post(path, content=body, headers={"content-type": "application/json"})
    assert problem(answer, 400)["field"] == "body"


def test_metadata_nested_too_deeply(service: Service) -> None:
    form = {"files": ("a.md", b"text"), "metadata": (None, '{"a":' + "[" * 5000)}
    problem(service.http.post("/v1/documents", files=form), 400)


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "multipart/form-data; boundary=x", ""])
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/search", "/v1/sessions/ses_none/messages"])
def test_json_is_read_only_where_it_is_said_to_be_json(service: Service, path: str, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = service.http.post(path, content=b'{"query": "x", "content": "x"}', headers=headers)
    assert problem(answer, 415)["field"] == "Content-Type"


def test_what_another_sites_page_sends_is_refused(service: Service) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        answer = service.http.post("/v1/sessions", json={}, headers={"origin": origin})
        assert "another site" in problem(answer, 403)["detail"]
    assert service.http.post("/v1/sessions", json={}, headers={"origin": service.url}).status_code == 201


def test_hopeless_text_is_refused_before_it_is_encoded(service: Service, session: str) -> None:
    waits: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=service.url) as client:
            while not over.is_set():
                started = time.monotonic()
                client.get("/health")
                waits.append(time.monotonic() - started)
                time.sleep(0.01)

    prober = threading.Thread(target=probe)
    prober.start()
    huge = "hello wörld " * 600_000
    answer = service.tell(session, huge)
    refused = service.http.post("/v1/sessions", json={"system_prompt": huge})
    over.set()
    prober.join()
    assert problem(answer, 422)["field"] == "content"
    assert problem(refused, 422)["field"] == "system_prompt"
    # Encoding it would take 6 seconds, and the event loop with it.
    assert max(waits) < 2


def test_a_client_that_hangs_up_is_no_error_of_ours(service: Service) -> None:
    before = service.log_path.read_text()
    host, port = service.url.removeprefix("http://").split(":")
    for path in ("/v1/sessions", "/v1/documents"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{{"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode())
    time.sleep(0.3)
    assert service.http.get("/health").status_code == 200
    assert service.log_path.read_text() == before
