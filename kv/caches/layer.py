"""What a group asks of its layers, and a batch of its streams: so that neither needs to know the cache that serves."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from kv.caches.policy import Policy


class Layer(Protocol):
    """One layer's rows, as the group that decides over them moves them. See `kv.caches.cache.EvictingCache`."""

    policy: Policy
    scores: mx.array

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def rows_at(self, index: mx.array | None, end: int) -> mx.array:
        """The keys of the rows of `index`, or of the first `end` rows."""

    def score_rows(self, keys: mx.array, new: int) -> None:
        """Let the last `new` rows of `keys` earn and give scores."""

    def keep_scores(self, index: mx.array) -> None:
        """Keep the scores of the rows of `index`."""

    def keep(self, index: mx.array) -> None:
        """Keep the keys and values of the rows of `index`."""

    def hold(self, array: mx.array) -> None:
        """Let `array` be worked out whenever the keys are."""

    def lift(self, begin: int, end: int) -> tuple[mx.array, mx.array]:
        """Copies of the keys and values of rows [begin, end)."""

    def insert(self, keys: mx.array, values: mx.array) -> None:
        """Store rows that no pass has made."""

    def fold(self, lost: mx.array, kept: mx.array, lost_scores: mx.array, kept_scores: mx.array) -> None:
        """Fold the values of rows `lost` into those of `kept`."""

    def truncate(self, rows: int, position: int) -> None:
        """Forget rows from `rows` on; the next token is at `position`."""

    def rotate(self, deltas: mx.array, rope: nn.Module, position: int) -> None:
        """Move each row's key by so many positions; the next token is at `position`."""


class Stream(Protocol):
    """One stream's cache of a layer, as a batch passes on what comes for it."""

    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def observes(self) -> bool:
        """Whether it wants to see queries."""

    @property
    def tokens_kept(self) -> int:
        """Tokens stored now."""

    @property
    def arrays(self) -> tuple[mx.array | None, mx.array | None, mx.array]:
        """Keys, values and scores."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store a pass."""

    def observe(self, queries: mx.array, scale: float) -> None:
        """Be shown the queries of the pass that has just been stored."""

    def copied(self) -> Any:
        """A copy that goes its own way."""

    def empty(self) -> bool:
        """True while nothing was stored."""
