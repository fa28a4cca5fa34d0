"""What the service refuses, as errors of its own. `app.problems` says what each is for a client."""

from __future__ import annotations


class Invalid(ValueError):
    """A value breaks a stated limit. field: of the request. The message gives the value and the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Conflict(RuntimeError):
    """A session is at work on something else."""


class Unavailable(RuntimeError):
    """The service cannot answer now. retry_after: seconds until it is worth another try; None if it is not."""

    def __init__(self, detail: str, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.retry_after = retry_after
