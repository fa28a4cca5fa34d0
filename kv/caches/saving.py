"""Groups that come back from a file: mlx-lm loads caches one by one, and knows nothing of the groups they share."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx

from kv.caches.group import CacheGroup
from kv.caches.handout import Handout
from kv.caches.ledger import Ledger
from kv.caches.literal import LiteralGroup
from kv.caches.policy import Policy


class _Loading(threading.local):
    """Groups being loaded, by thread."""

    def __init__(self) -> None:
        self.handout: Handout[CacheGroup] = Handout()


_loading = _Loading()


def restored(policy: Policy, books: dict[str, Any], positions: mx.array | None, layer: int, layers: int) -> CacheGroup:
    """The group that had those books. layer: which of its `layers` asks; all get the one that layer 0 made.

    Raises ValueError if layers do not come in order, or if layers of other groups were still to have their say.
    """
    if books["unsettled"]:
        raise ValueError("saved before its layers' budgets were settled")

    def make() -> CacheGroup:
        held = Ledger.from_builtins(policy, books, positions)
        return LiteralGroup(policy, books["literal"], held) if "literal" in books else CacheGroup(policy, held=held)

    group = _loading.handout.take(layer, layers, make)
    if len(group.layers) != layer:
        raise ValueError(f"layer {layer} of {layers} does not follow the one before it")
    return group
