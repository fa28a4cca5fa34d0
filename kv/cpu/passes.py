"""What a forward pass is run for.

MLX lays work out, and computes what is asked for later; a layer that computes at once has to ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Wanted = Literal["all", "last", "none", "shapes"]
_wanted: ContextVar[Wanted] = ContextVar("wanted", default="all")


@contextmanager
def wanting(what: Wanted) -> Iterator[None]:
    """Within it, layers that compute at once make no more than that.

    what: the logits of "all" tokens of a pass, of its "last" one (the others' are missing from the result), of "none"
        (it is there for its keys and values); or "shapes": everything is laid out, nothing is computed.
    """
    token = _wanted.set(what)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> Wanted:
    """What the pass under way is run for."""
    return _wanted.get()
