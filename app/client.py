"""The command line's side of the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx


class ServerError(click.ClickException):
    """The server answered with a problem; the message is for a person."""


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
            raise ServerError(_problem(response))
        return response.json() if response.content else None

    def upload(self, path: Path, name: str) -> Any:
        """Upload one file under `name`."""
        with path.open("rb") as file:
            return self.call("POST", "/v1/documents", files=[("files", (name, file, "application/octet-stream"))])

    def ask(self, session_id: str, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ask; yields (event, data) as they come. Raises ServerError."""
        try:
            with self._http.stream("POST", f"/v1/sessions/{session_id}/messages", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ServerError(_problem(response))
                event = ""
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        event = value
                    elif name == "data":
                        yield event, json.loads(value)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"no answer from {self._url} ({error}); is `keepwhole serve` running?")


def _problem(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
