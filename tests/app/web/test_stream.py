"""A turn's stream: its ids, coming back to it while it runs, after it has ended, and after a restart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.service import Service, towns

pytestmark = [pytest.mark.model, pytest.mark.service]

Frame = tuple[str, str, dict[str, Any]]


def frames(response: httpx.Response) -> Iterator[Frame]:
    """(id, event, data) of each frame, by the rules of the HTML standard and none of our code."""
    text = ""
    for piece in response.iter_text():
        text += piece
        *whole, text = text.replace("\r\n", "\n").split("\n\n")
        for frame in whole:
            fields = dict(line.split(": ", 1) for line in frame.split("\n") if line and not line.startswith(":"))
            if "data" in fields:
                yield fields["id"], fields["event"], json.loads(fields["data"])


def ask(service: Service, session: str, stop_after: int | None = None, **body: Any) -> list[Frame]:
    """What comes of asking; with `stop_after`, the client is gone after so many tokens."""
    seen: list[Frame] = []
    with service.http.stream("POST", f"/v1/sessions/{session}/messages", json=body) as response:
        for frame in frames(response):
            seen.append(frame)
            if stop_after is not None and sum(event == "token" for _, event, _ in seen) == stop_after:
                break
    return seen


def resume(service: Service, session: str, **options: Any) -> list[Frame]:
    """What `/events` tells."""
    with service.http.stream("GET", f"/v1/sessions/{session}/events", **options) as response:
        assert response.status_code == 200, response.read()
        return list(frames(response))


def text(seen: list[Frame]) -> str:
    """The answer as it was streamed."""
    return "".join(data["text"] for _, event, data in seen if event == "token")


QUESTION = {"content": "When does the ferry to Narva leave?", "max_tokens": 24, "temperature": 0}


def test_a_lost_stream_goes_on_where_it_was_and_can_be_told_again(service: Service) -> None:
    whole = text(ask(service, service.session(), **QUESTION))
    session = service.session()
    seen = ask(service, session, stop_after=3, on_disconnect="finish", **QUESTION)
    rest = resume(service, session, headers={"Last-Event-ID": seen[-1][0]})
    assert text(seen) + text(rest) == whole
    ids = [frame[0] for frame in seen + rest]
    assert len(set(ids)) == len(ids)
    assert rest[-1][1] == "done"
    assert rest[-1][2]["content"] == whole
    # From the start, by either way of saying so, and from its end.
    assert resume(service, session) == seen + rest
    assert resume(service, session, params={"after": ids[0]}) == (seen + rest)[1:]
    answer = service.http.get(f"/v1/sessions/{session}/events", headers={"Last-Event-ID": ids[-1]})
    assert answer.status_code == 204


def test_two_listen_to_a_turn_that_runs_and_leaving_takes_nothing_from_the_other(service: Service) -> None:
    session = service.session()
    url = f"/v1/sessions/{session}/events"
    with service.http.stream("POST", f"/v1/sessions/{session}/messages", json=QUESTION) as asked:
        told = frames(asked)
        first = next(told)
        with service.http.stream("GET", url) as other:
            assert next(frames(other)) == first
        assert [first, *told] == resume(service, session)


def test_by_default_who_leaves_ends_the_turn(service: Service) -> None:
    session = service.session()
    ask(service, session, stop_after=1, content="Count to a thousand.", max_tokens=400)
    deadline = time.monotonic() + 20
    while service.http.get("/ready").json()["turns"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert service.items(f"/v1/sessions/{session}/turns")[0]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("given", ["nonsense", "trn_x.1", "trn_x.1.2.3", "trn_x.-1.2", "a b.1.2", "trn_x.1.²"])
def test_an_id_that_is_none_is_refused_by_name(service: Service, given: str) -> None:
    answer = service.http.get(f"/v1/sessions/{service.session()}/events", params={"after": given})
    assert answer.status_code == 422
    assert answer.json()["field"] == "after"


def test_an_id_of_another_session_is_not_found_and_a_session_without_turns_has_nothing(service: Service) -> None:
    session, other = service.session(), service.session()
    place = ask(service, session, **QUESTION)[-1][0]
    assert service.http.get(f"/v1/sessions/{other}/events", params={"after": place}).status_code == 404
    assert service.http.get(f"/v1/sessions/{other}/events").status_code == 204
    assert service.http.get("/v1/sessions/ses_none/events").status_code == 404


def test_frames_say_when_to_come_back_and_that_nobody_is_to_keep_them(service: Service) -> None:
    session = service.session()
    with service.http.stream("POST", f"/v1/sessions/{session}/messages", json=QUESTION) as response:
        assert "no-cache" in response.headers["Cache-Control"]
        assert "no-transform" in response.headers["Cache-Control"]
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.read().startswith(b"retry: ")


def test_characters_at_which_clients_split_lines_are_written_otherwise(service: Service) -> None:
    odd = "One.\u2028Two.\u2029Three.\x85Four.\rFive: the zorbfish sings at noon."
    document = service.ingest(("odd.md", odd))[0]
    session = service.session()
    body = {"content": "When does the zorbfish sing?", "max_tokens": 4, "top_k": 1}
    with service.http.stream("POST", f"/v1/sessions/{session}/messages", json=body) as response:
        raw = response.read().decode()
    assert not set("\u2028\u2029\x85") & set(raw)
    sources = next(json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: "))["sources"]
    assert "\u2028" in sources[0]["text"]
    chat = service.run("chat", "--session", session, input="When does the zorbfish sing?\n")
    assert "Traceback" not in chat.stderr, chat.stderr
    service.http.delete(f"/v1/documents/{document}")


def test_after_a_restart_a_turn_is_told_by_the_log(tmp_path_factory: pytest.TempPathFactory) -> None:
    service = Service(tmp_path_factory.mktemp("data"))
    try:
        service.ingest(*towns())
        session = service.session()
        seen = ask(service, session, **QUESTION)
        tokens = [frame for frame in seen if frame[1] == "token"]
        service.stop()
        service.start()
        rest = resume(service, session, headers={"Last-Event-ID": tokens[2][0]})
        assert text(tokens[:3]) + text(rest) == text(seen)
        assert rest[-1][2] == seen[-1][2]
        again = resume(service, session)
        assert again[0][1:] == seen[0][1:]
        assert text(again) == text(seen)
        assert service.http.get(f"/v1/sessions/{session}/events", params={"after": seen[-1][0]}).status_code == 204
    finally:
        service.stop()
