"""Errors as values: RFC 9457 problem details, made here and only here."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from app.errors import Conflict, Invalid, Unavailable
from ingest.errors import InvalidInput, NotFound, TooLarge, Unsupported


class Problem(Exception):
    """An error with an HTTP status. `fields` are added to the problem detail beside type, title, status and detail."""

    def __init__(self, status: HTTPStatus, detail: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.fields = fields

    def body(self) -> dict[str, Any]:
        """The problem detail as JSON-ready values."""
        return {
            "type": "about:blank",
            "title": self.status.phrase,
            "status": int(self.status),
            "detail": self.detail,
            **self.fields,
        }


def invalid(field: str, detail: str) -> Problem:
    """422: the value of `field` breaks a limit. `detail` gives the value and the limit."""
    return as_problem(Invalid(field, detail))


def as_problem(error: Exception) -> Problem:
    """The problem that an exception is for the client. An unknown exception is a 500 that tells nothing."""
    match error:
        case Problem():
            return error
        case NotFound():
            return Problem(HTTPStatus.NOT_FOUND, str(error))
        case TooLarge():
            return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error), field=error.field)
        case Unsupported():
            return Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, str(error), field=error.field)
        case InvalidInput():
            return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), field=error.field)
        case Invalid():
            return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error.field}: {error}", field=error.field)
        case Conflict():
            return Problem(HTTPStatus.CONFLICT, str(error))
        case Unavailable():
            headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers)
        case _:
            return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed; its log has the reason.")
