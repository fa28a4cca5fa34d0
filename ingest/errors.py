"""What ingestion refuses, as values that a boundary can turn into a status code."""

from __future__ import annotations

_MAX_SHOWN = 80


class InvalidInput(ValueError):
    """A caller's value breaks a stated limit. `field` names the input; the message adds value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        super().__init__(f"{field}: {_shown(value)} is not accepted; {limit}")


class TooLarge(InvalidInput):
    """A document has more bytes than the service takes. `size` and `max_bytes` are bytes."""

    def __init__(self, field: str, size: int, max_bytes: int) -> None:
        self.size = size
        self.max_bytes = max_bytes
        super().__init__(field, size, f"the limit is {max_bytes} bytes and this has {size}")


class Unsupported(InvalidInput):
    """A document whose bytes or media type cannot be read as text."""


class Unreadable(ValueError):
    """A file that its reader gave up on. The message is for the person who sent it."""


class NotFound(LookupError):
    """No such record. `what` is its kind (`document`, `job`), `id` what was asked for."""

    def __init__(self, what: str, id: str) -> None:
        self.what = what
        self.id = id
        super().__init__(f"no {what} {_shown(id)}")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
    return repr(text) if isinstance(value, str) else text
