"""Pages of other sites: refused, unless they are allowed by name."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from app.settings import Settings
from tests.app.service import Service

FRIEND, STRANGER = "http://chat.example:3000", "http://evil.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture(scope="module")
def open_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("data"), ORIGINS=f"{FRIEND}, https://other.example", API_KEY="k")
    yield service
    service.stop()


def preflight(service: Service, origin: str) -> httpx.Response:
    return httpx.options(f"{service.url}/v1/chat/completions", headers={"Origin": origin, **PREFLIGHT})


@pytest.mark.model
@pytest.mark.service
def test_an_allowed_page_is_answered_and_a_strangers_is_not(open_service: Service) -> None:
    friend = preflight(open_service, FRIEND)
    assert friend.status_code in (200, 204)
    assert friend.headers["Access-Control-Allow-Origin"] == FRIEND
    assert "POST" in friend.headers["Access-Control-Allow-Methods"]
    allowed = friend.headers["Access-Control-Allow-Headers"].lower()
    assert all(name in allowed for name in PREFLIGHT["Access-Control-Request-Headers"].split(","))
    assert "Access-Control-Allow-Origin" not in preflight(open_service, STRANGER).headers
    key = {"Authorization": "Bearer k"}
    asked = httpx.post(f"{open_service.url}/v1/search", json={"query": "x"}, headers={"Origin": FRIEND, **key})
    assert asked.status_code == 200
    assert asked.headers["Access-Control-Allow-Origin"] == FRIEND
    refused = httpx.post(f"{open_service.url}/v1/search", json={"query": "x"}, headers={"Origin": STRANGER, **key})
    assert refused.status_code == 403
    assert "KEEPWHOLE_ORIGINS" in refused.json()["detail"]


@pytest.mark.model
@pytest.mark.service
def test_nobody_elses_page_is_answered_if_none_is_allowed(service: Service) -> None:
    assert "Access-Control-Allow-Origin" not in preflight(service, FRIEND).headers
    assert service.http.post("/v1/search", json={"query": "x"}, headers={"Origin": FRIEND}).status_code == 403
    assert service.http.post("/v1/search", json={"query": "x"}, headers={"Origin": service.url}).status_code == 200


@pytest.mark.parametrize("origins", ["*", "chat.example", "http://chat.example/", "http://a b", "http://x,ftp://y"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ValueError, match="KEEPWHOLE_ORIGINS"):
        Settings(origins=origins)


def test_all_may_be_allowed_behind_a_key() -> None:
    assert Settings(origins="*", api_key="k").allowed_origins == ["*"]
    assert Settings(origins=" http://a , https://b:1 ").allowed_origins == ["http://a", "https://b:1"]
