"""The command line's side of the HTTP API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import quote

import click
import httpx

_PAGE = 200
_READY_SECONDS = 0.5
# A server that starts again loads its model first.
_RESTART_SECONDS = 60.0


class ServerError(click.ClickException):
    """The server answered with a problem; the message is for a person. problem: the problem detail itself."""

    def __init__(self, message: str, problem: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.problem = problem or {}


class Unreachable(ServerError):
    """The server cannot be reached, or broke off."""


class Client:
    """Calls a running server. url: its address. api_key: its key, if it has one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if api_key is not None and not api_key.isascii():
            raise ServerError("an API key is ASCII; this one is not")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(60.0, read=None))
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerError(f"{url!r} is not an address: {error}") from error

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One request. Returns its JSON, or None for an empty answer. Raises ServerError."""
        try:
            response = self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _error(response)
        return response.json() if response.content else None

    def upload(self, files: Sequence[tuple[str, BinaryIO]], metadata: dict[str, Any]) -> Any:
        """Upload files, each (name, content), in one request."""
        parts: list[tuple[str, Any]] = [("files", (name, file, "application/octet-stream")) for name, file in files]
        if metadata:
            parts.append(("metadata", (None, json.dumps(metadata).encode())))
        return self.call("POST", "/v1/documents", files=parts)

    def items(self, path: str, **conditions: str) -> Iterator[Any]:
        """Every item of a list, page by page."""
        for page in self.pages(path, None, **conditions):
            yield from page["items"]

    def pages(self, path: str, cursor: str | None = None, **conditions: str) -> Iterator[Any]:
        """The pages of a list, from `cursor` on."""
        while True:
            parameters = {**conditions, "limit": _PAGE, **({"cursor": cursor} if cursor else {})}
            page = self.call("GET", path, params=parameters)
            yield page
            if (cursor := page["next_cursor"]) is None:
                return

    def download(self, path: str, **parameters: str) -> Iterator[bytes]:
        """A file, piece by piece. Raises ServerError."""
        try:
            with self._http.stream("GET", path, params=parameters) as response:
                if response.is_error:
                    response.read()
                    raise _error(response)
                yield from response.iter_bytes()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    @staticmethod
    def quoted(id: str) -> str:
        """An id that somebody typed, as a part of a path."""
        return quote(id, safe="")

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def wait_until_ready(self, seconds: float, *, is_starting: bool = False) -> None:
        """Return once the model is loaded. Raises Unreachable, or ServerError after so many seconds.

        is_starting: so long it need not answer either.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("GET", "/ready")
                return
            except ServerError as error:
                waits = error.problem.get("status") == HTTPStatus.SERVICE_UNAVAILABLE
                if isinstance(error, Unreachable):
                    waits = is_starting
                if not waits or time.monotonic() > deadline:
                    raise
                time.sleep(_READY_SECONDS)

    def ask(
        self, session_id: str, body: dict[str, Any], *, on_lost: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ask; yields (event, data) as they come. A server that is lost in the middle is waited for, and asked for the
        rest. Raises ServerError.

        on_lost: called when the line breaks.
        """
        place, path = None, f"/v1/sessions/{session_id}"
        body = {**body, "on_disconnect": "finish"}
        while True:
            try:
                if place is None:
                    opened = self._http.stream("POST", f"{path}/messages", json=body)
                else:
                    opened = self._http.stream("GET", f"{path}/events", headers={"Last-Event-ID": place})
                with opened as response:
                    if response.is_error:
                        response.read()
                        raise _error(response)
                    for behind, event, data in _events(response):
                        place = behind
                        yield event, data
                        if event in ("done", "error"):
                            return
                if place is None or response.status_code == HTTPStatus.NO_CONTENT:
                    return
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if place is None:
                    raise self._unreachable(error) from error
            on_lost()
            self.wait_until_ready(_RESTART_SECONDS, is_starting=True)

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"no answer from {self._url} ({error}); is `keepwhole serve` running?")


def _events(response: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, event, data) of each frame. httpx's own lines end at U+2028 and others too, inside what somebody wrote."""
    place, event, held = "", "", b""
    for piece in response.iter_bytes():
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b": ")
            if name == b"id":
                place = value.decode()
            elif name == b"event":
                event = value.decode()
            elif name == b"data":
                yield place, event, json.loads(value)


def _error(response: httpx.Response) -> ServerError:
    try:
        problem = response.json()
        return ServerError(str(problem["detail"]), problem)
    except (ValueError, KeyError, TypeError):
        return ServerError(f"HTTP {response.status_code}")
