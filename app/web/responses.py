"""Whatever is raised under a route, as a problem response: Litestar's own errors are told apart here."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import structlog
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, InternalServerException, SerializationException, ValidationException

from app.problems import Problem, as_problem, invalid
from app.web.openai import errors as openai

log = structlog.get_logger()


def problem_of(error: Exception) -> Problem:
    """The problem that an exception is for the client, the framework's among them."""
    if isinstance(error, ValidationException):
        return _from_validation(error)
    if isinstance(error, RecursionError) and "deserializing" in str(error):
        return not_json("nested too deeply")
    if isinstance(error, InternalServerException) and "disconnected" in error.detail:
        return Problem(HTTPStatus.BAD_REQUEST, "body: the client left before it was read", field="body")
    if isinstance(error.__cause__, SerializationException):
        return not_json(error.__cause__)
    if isinstance(error, HTTPException) and error.status_code < 500:
        return Problem(HTTPStatus(error.status_code), error.detail, headers=dict(error.headers or {}))
    return as_problem(error)


def not_json(reason: object) -> Problem:
    """400: the body is not JSON. `reason` is the parser's."""
    text = str(reason)
    if "truncated" in text:
        # msgspec says the same of half a surrogate pair, which JSON's grammar allows and Unicode does not.
        text += ' (it ends too early, or has half of a surrogate pair, such as "\\ud800" alone)'
    return Problem(HTTPStatus.BAD_REQUEST, f"body: not JSON: {text}", field="body")


def _from_validation(error: ValidationException) -> Problem:
    parts: list[str] = []
    fields: list[str] = []
    for item in error.extra if isinstance(error.extra, list) else []:
        key, message = str(item.get("key") or ""), str(item.get("message"))
        if key == "data":
            key = _field_of(message)
            if message == "'data'":
                message = "a JSON object is required"
        elif unknown := re.search(r"unknown field `(\w+)`", message):
            key = f"{key}.{unknown[1]}"
        parts.append(message if message.startswith(f"{key}: ") else f"{key}: {message}")
        fields.append(key)
    extra: dict[str, Any] = {"field": fields[0]} if fields else {}
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(parts) or error.detail, **extra)


def wrong_body(message: str) -> Problem:
    """422: the body is JSON, but not of the right form. `message` is msgspec's."""
    return invalid(_field_of(message), message)


def _field_of(message: str) -> str:
    """The field that a message about a body is about: our own start with it, msgspec's put it in backquotes."""
    patterns = (r"^([\w.]+): ", r"field `(\w+)`", r"`\$\.(.+)`$")
    return next((found[1] for pattern in patterns if (found := re.search(pattern, message))), "body")


def to_response(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """Litestar's exception handler."""
    problem = problem_of(error)
    given = request.query_params.get(problem.fields.get("field", ""))
    if given is not None and isinstance(error, ValidationException):
        problem.detail += f", not {given[:40]!r}"
    if problem.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and "field" not in problem.fields:
        limit = request.app.state.settings.max_upload_bytes
        problem.detail, problem.fields = f"body: larger than the limit of {limit} bytes", {"field": "body"}
    if problem.status >= 500 and not isinstance(error, Problem):
        log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
    if openai.speaks(request.scope["path"]):
        return Response(
            openai.as_error(problem.status, problem.detail, problem.fields.get("field")),
            status_code=openai.status_of(problem.status),
            headers=problem.headers,
        )
    return Response(
        problem.body(),
        status_code=problem.status,
        headers=problem.headers,
        media_type="application/problem+json" if request.method != "HEAD" else MediaType.JSON,
    )
