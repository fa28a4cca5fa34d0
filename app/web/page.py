"""The page at `/`: files of the package `page/`, served from memory, with what browsers need to trust and cache them.

No key is asked for them: the page itself asks its user. All its addresses are relative, so that it works wherever a
reverse proxy mounts the server, as long as that address ends with a slash.
"""

from __future__ import annotations

import hashlib
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from litestar import HttpMethod, Request, Response, route

from app.problems import Problem

_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

# Nothing from elsewhere, nothing inline, and no text that becomes markup: the page builds every node itself.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked for every time, and answered with 304: an upgrade is seen at once.
    "Cache-Control": "no-cache",
}


class _Asset(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@route(["/", "/page/{name:str}"], http_method=[HttpMethod.GET, HttpMethod.HEAD], include_in_schema=False)
async def page(request: Request[Any, Any, Any], name: str = "index.html") -> Response[bytes]:
    """The page, or one of its files."""
    asset = _assets().get(name)
    if asset is None:
        raise Problem(HTTPStatus.NOT_FOUND, f"the page has no file {name[:80]!r}")
    headers = {**_HEADERS, "ETag": asset.etag}
    if _matches(request.headers.get("if-none-match", ""), asset.etag):
        return Response(b"", status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


@cache
def _assets() -> dict[str, _Asset]:
    files = [file for file in (Path(__file__).parent / "page").iterdir() if file.suffix in _MEDIA_TYPES]
    return {file.name: _asset(file.read_bytes(), _MEDIA_TYPES[file.suffix]) for file in files}


def _asset(content: bytes, media_type: str) -> _Asset:
    return _Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def _matches(if_none_match: str, etag: str) -> bool:
    # A proxy that compresses makes an ETag weak.
    return any(given.strip().removeprefix("W/") in (etag, "*") for given in if_none_match.split(","))
