"""Layers that share one eviction decision: one layer each (`scope="head"|"layer"`) or the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from kv.config import ChunkKVOptions
from kv.units import Unit, UnitTable

if TYPE_CHECKING:
    from kv.chunkkv import ChunkKVCache

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Evicted:
    """One unit that left the cache.

    block: its declared name, None for a chunk. start: its first position. tokens: its length.
    score: the pooled token score it was judged by. relevance: the caller's. lane: the head, with scope="head".
    """

    block: str | None
    start: int
    tokens: int
    score: float
    relevance: float
    lane: int = 0


class CacheGroup:
    """The unit tables and the layers they decide for.

    With scope "layer" or "model" there is one table. With "head" there is one a head (and batch row), a "lane",
    and only chunks of equal size leave, so every lane always holds equally many rows and none is cut to align.
    """

    def __init__(self, options: ChunkKVOptions, *, on_evict: Callable[[Evicted], None] | None = None) -> None:
        self.options = options
        self.layers: list[ChunkKVCache] = []
        self.tables = [UnitTable(options)]
        self._on_evict = on_evict

    # What is held

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self.tables[0].position

    @property
    def rows(self) -> int:
        """Tokens kept per layer."""
        return self.tables[0].rows

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers of the group."""
        return sum(layer.nbytes for layer in self.layers)

    def units(self) -> list[Unit]:
        """The resident units in position order. Raises ValueError with scope="head", where heads differ."""
        return list(self._table().units)

    def scores(self) -> list[float]:
        """The pooled score of each of `units()`. Waits for the device."""
        table = self._table()
        if not table.rows:
            return []
        return self._unit_scores(table, self._token_scores()[0])

    # Declaring blocks

    def declare(self, start: int, end: int, block: str, *, pinned: bool = False, relevance: float = 0.0) -> None:
        """Declare positions [start, end), yet to be streamed, as one block. See `UnitTable.declare`."""
        self._table().declare(start, end, block, pinned=pinned, relevance=relevance)

    def open_block(self, block: str, *, at: int | None = None, pinned: bool = False, relevance: float = 0.0) -> None:
        """Start a block of unknown length at position `at`, or here. See `UnitTable.open_block`."""
        self._table().open_block(block, at=at, pinned=pinned, relevance=relevance)

    def close_block(self) -> None:
        """End the open block."""
        self._table().close_block()

    def find(self, block: str) -> Unit:
        """The resident unit of a declared block. Raises KeyError if it is not resident."""
        return self._table().find(block)

    def pin(self, block: str, pinned: bool) -> None:
        """Pin or unpin a resident block."""
        self._table().pin(block, pinned)

    def set_relevance(self, block: str, relevance: float) -> None:
        """Give a resident block the caller's score. Raises KeyError if it is not resident."""
        self._table().find(block).relevance = relevance

    # Streaming

    def join(self, layer: ChunkKVCache) -> None:
        """Add a layer. The group acts when the layer that joined last has taken a pass in."""
        self.layers.append(layer)

    def set_lanes(self, lanes: int) -> None:
        """Give each of `lanes` heads a table of its own, before anything was stored."""
        self.tables = [UnitTable(self.options) for _ in range(lanes)]

    def settle(self, count: int) -> None:
        """Score and account for the pass of `count` tokens that every layer has just stored, then evict.

        Done as if the tokens had come one by one, so that survivors do not depend on how the stream was sliced:
        a stretch is scored up to the very token that passes the budget, then whole units leave, and so on.
        """
        table, budget = self.tables[0], self.options.budget
        first = table.rows
        total = first + count
        for layer in self.layers:
            layer.begin_scores(total)
        alive: list[Rows] | None = None
        row = first
        while row < total:
            take = min(total - row, max(0, budget - table.rows) + 1)
            mask = self._alive_mask(alive, total)
            for layer in self.layers:
                layer.score_rows(row, take, mask)
            for each in self.tables:
                each.append(take)
            row += take
            while table.rows > budget:
                if alive is None:
                    alive = [np.arange(total) for _ in self.tables]
                alive = self._evict_least(alive, row)
        if alive is not None:
            self._keep(alive)

    # Evicting

    def evict(self, block: str) -> Evicted:
        """Take one resident block out, whatever its score. Raises KeyError, or ValueError if it may not leave."""
        table = self._table()
        unit = table.find(block)
        if unit.pinned or not unit.complete or unit.start < self.options.n_sink:
            raise ValueError(f"block {block!r} is pinned, unfinished, or holds sinks; it cannot be evicted")
        index = table.units.index(unit)
        score = self.scores()[index]
        alive = self._remove(0, index, np.arange(table.rows))
        self._keep([alive])
        return self._report(unit, score, 0)

    def truncate(self, position: int) -> None:
        """Forget every token from `position` on, as if it had not been streamed.

        Scores that those tokens gave to others stay. Raises ValueError if it would cut a finished block.
        """
        rows = self._table().truncate(position)
        for layer in self.layers:
            layer.truncate(rows, self.position)

    def rebase(self, ropes: list[nn.Module]) -> None:
        """Renumber the resident tokens 0, 1, 2, … and rotate their keys to match, one rope module a layer.

        For streams longer than the model's trained context. Keys are stored rotated; the model's own rope, given
        the change of position as its offset, moves them, so scaled variants stay right.
        """
        deltas = mx.array(self._table().rebase())
        for layer, rope in zip(self.layers, ropes, strict=True):
            layer.rotate(deltas, rope, self.position)

    # Internals

    def _table(self) -> UnitTable:
        if self.options.scope == "head":
            raise ValueError('scope="head" keeps other rows in every head; declared blocks need "layer" or "model"')
        return self.tables[0]

    def _evict_least(self, alive: list[Rows], stored: int) -> list[Rows]:
        scores = self._token_scores()
        kept = []
        for lane, (table, rows) in enumerate(zip(self.tables, alive, strict=True)):
            unit_scores = self._unit_scores(table, scores[lane][rows[: table.rows]])
            index = table.pick(unit_scores)
            if index is None:
                raise RuntimeError(
                    f"kept tokens passed budget {self.options.budget} with every block pinned or unfinished"
                )
            unit = table.units[index]
            kept.append(self._remove(lane, index, rows))
            self._report(unit, unit_scores[index], lane)
        return kept

    def _remove(self, lane: int, index: int, rows: Rows) -> Rows:
        table = self.tables[lane]
        begin, end = table.row_spans()[index]
        table.remove(index)
        return np.concatenate([rows[:begin], rows[end:]])

    def _report(self, unit: Unit, score: float, lane: int) -> Evicted:
        evicted = Evicted(unit.block, unit.start, unit.seen, score, unit.relevance, lane)
        if self._on_evict is not None:
            self._on_evict(evicted)
        return evicted

    def _keep(self, alive: list[Rows]) -> None:
        index = mx.array(alive[0] if len(alive) == 1 else np.stack(alive))
        for layer in self.layers:
            layer.keep(index)

    def _token_scores(self) -> NDArray[np.float32]:
        """[lanes, R], pooled over what shares a decision."""
        if self.options.scope == "head":
            scores = self.layers[0].scores
            return np.array(scores.reshape(-1, scores.shape[-1]))
        pooled = mx.stack([layer.scores.mean(axis=(0, 1)) for layer in self.layers]).mean(axis=0)
        return np.array(pooled)[None]

    def _unit_scores(self, table: UnitTable, token_scores: NDArray[np.float32]) -> list[float]:
        pool = np.mean if self.options.pool == "mean" else np.max
        return [float(pool(token_scores[a:b])) if b > a else 0.0 for a, b in table.row_spans()]

    def _alive_mask(self, alive: list[Rows] | None, total: int) -> mx.array | None:
        if alive is None:
            return None
        mask = np.zeros((len(alive), total), dtype=bool)
        for lane, rows in enumerate(alive):
            mask[lane, rows] = True
        if len(alive) == 1:
            return mx.array(mask[None, None])
        heads = self.layers[0].scores.shape[1]
        return mx.array(mask.reshape(-1, heads, 1, total))
