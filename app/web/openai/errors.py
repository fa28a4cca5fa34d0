"""Errors in OpenAI's shape, for its routes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

_PATHS = ("/v1/chat/", "/v1/models", "/v1/embeddings")
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def speaks(path: str) -> bool:
    """Whether a path is one of OpenAI's."""
    return path.startswith(_PATHS)


def status_of(status: int) -> int:
    """The status that OpenAI has for it: bad values are 400 there."""
    return HTTPStatus.BAD_REQUEST if status == HTTPStatus.UNPROCESSABLE_ENTITY else status


def as_error(status: int, detail: str, field: str | None) -> dict[str, Any]:
    """An error's body. field: what of the request is wrong."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    code = None
    if status == HTTPStatus.UNAUTHORIZED:
        code = "invalid_api_key"
    elif status == HTTPStatus.NOT_FOUND and field == "model":
        code = "model_not_found"
    return {"error": {"message": detail, "type": _TYPES.get(HTTPStatus(status), kind), "param": field, "code": code}}
