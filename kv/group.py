"""Layers that share one eviction decision: one layer each (`scope="head"|"layer"`) or the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kv import choosing
from kv.policy import Policy
from kv.scoring import ObservedAttention
from kv.units import Unit, UnitTable

if TYPE_CHECKING:
    from kv.cache import EvictingCache


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
    """The layers that decide together, and the books of what they hold.

    With scope "layer" a group is one layer, or one and those that follow it; with "model" it is all of them. Both have
    one lane. With "head" there is one a head (and batch row): only chunks of equal size leave then, so every lane
    always holds equally many rows and none is cut to align.

    While a stream is nothing but chunks, which of them leave is worked out on the device and never read back. Once
    blocks are declared, or someone asks for the units, unit tables on the host decide. Both decide the same.
    """

    def __init__(self, policy: Policy, *, on_evict: Callable[[Evicted], None] | None = None) -> None:
        self.policy = policy
        self.layers: list[EvictingCache] = []
        self._on_evict = on_evict
        self._tables = [UnitTable(policy)]
        # Positions of the kept rows, [lanes, rows], while the device decides; None once the tables do.
        self._positions: mx.array | None = mx.zeros((1, 0), dtype=mx.int32)
        if on_evict is not None or not policy.is_roomy:
            self._positions = None
        # Called with the size of each pass when it is accounted for.
        self.on_settled: Callable[[int], None] | None = None
        self._rows = 0
        self._position = 0
        self._read_many = False
        self._unobserved = False

    # What is held

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self._position

    @property
    def rows(self) -> int:
        """Tokens kept per layer."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers of the group."""
        return sum(layer.nbytes for layer in self.layers)

    def positions(self) -> list[list[int]]:
        """The position of each kept row, by lane. Waits for the device."""
        if self._positions is None:
            return [table.positions() for table in self._tables]
        kept: list[list[int]] = np.array(self._positions).tolist()
        return kept

    def units(self) -> list[Unit]:
        """The resident units in position order. Raises ValueError with scope="head", where heads differ."""
        return list(self._table().units)

    def scores(self) -> list[float]:
        """The pooled score of each of `units()`. Waits for the device."""
        table = self._table()
        if not table.rows:
            return []
        self._score(None, self._rows)
        return choosing.unit_scores(self.policy, table, np.array(self._lane_scores())[0])

    @property
    def judges(self) -> list[EvictingCache]:
        """The layers whose scores decide: all with scope "model", else the first, which others may follow."""
        return self.layers if self.policy.scope == "model" else self.layers[:1]

    # Saving

    @property
    def row_positions(self) -> mx.array | None:
        """The positions of the kept rows, [lanes, rows], while the device has them; None once unit tables do."""
        return self._positions

    def books(self) -> dict[str, Any]:
        """What there is to know beside tensors, as JSON-ready values."""
        tables = [] if self._positions is not None else [table.to_builtins() for table in self._tables]
        return {"rows": self._rows, "position": self._position, "read_many": self._read_many, "tables": tables}

    @classmethod
    def from_books(
        cls, policy: Policy, books: dict[str, Any], positions: mx.array | None, layer: int, layers: int
    ) -> CacheGroup:
        """The group that had those books. layer: which of its `layers` asks; all get the one that layer 0 made.

        Raises ValueError if layers do not come in order.
        """
        if layer == 0:
            group = cls(policy)
            group._rows, group._position = books["rows"], books["position"]
            group._read_many = books["read_many"]
            group._positions = positions
            if positions is None:
                group._tables = [UnitTable.from_builtins(policy, table) for table in books["tables"]]
            else:
                group._tables = [UnitTable(policy) for _ in range(positions.shape[0])]
            _restored.group = group
        shared: CacheGroup | None = getattr(_restored, "group", None)
        if shared is None or len(shared.layers) != layer:
            raise ValueError(f"layer {layer} of {layers} does not follow the one before it")
        if layer == layers - 1:
            _restored.group = None
        return shared

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

    def join(self, layer: EvictingCache) -> None:
        """Add a layer. The group acts when the layer that joined last has taken a pass in."""
        self.layers.append(layer)

    def set_lanes(self, lanes: int) -> None:
        """Give each of `lanes` heads a decision of its own, before anything was stored."""
        self._tables = [UnitTable(self.policy) for _ in range(lanes)]
        if self._positions is not None:
            self._positions = mx.zeros((lanes, 0), dtype=mx.int32)

    def settle(self, count: int) -> None:
        """Score and account for the pass of `count` tokens that every layer has just stored, then evict.

        Done as if the tokens had come one by one, so that survivors do not depend on how the stream was sliced: a
        stretch is scored up to the next position at which something must leave, whole units leave, and so on. The
        rows are gathered once, at the end.
        """
        if isinstance(self.policy.scorer, ObservedAttention):
            if self._unobserved:
                raise RuntimeError(
                    'score "observed": a pass was not shown to the cache; build it with KVCacheBuilder.for_model, or '
                    "call kv.observed.install(model)"
                )
            self._unobserved = True
            return
        row, total = self._rows, self._rows + count
        stored = self._positions
        index: mx.array | None = None
        while row < total:
            if self.policy.must_evict(self._rows, self._position):
                keep = self._evict_least(index, row)
                self._check_room(1)
                if keep is not None:
                    index = keep if index is None else _compose(index, keep)
            take = min(total - row, self.policy.until_eviction(self._rows, self._position))
            if index is not None:
                fresh = mx.arange(row, row + take)
                index = mx.concatenate([index, mx.broadcast_to(fresh, (*index.shape[:-1], take))], axis=-1)
            row += take
            self._advance(take)
        if self.policy.trigger == "prefill_end":
            index = self._compress_prompt(count)
        if index is not None:
            for layer in self.layers:
                layer.keep(index)
        if stored is not None:
            self._positions = self._followed(stored, index, count)
        if self.on_settled is not None:
            self.on_settled(count)

    def settle_observed(self, count: int) -> None:
        """Account for a pass of `count` tokens whose queries have scored every row, then evict down to the budget."""
        self._unobserved = False
        self._advance(count)
        if self._positions is not None:
            self._positions = self._followed(self._positions, None, count)
        self._shrink()
        if self.on_settled is not None:
            self.on_settled(count)

    def _shrink(self) -> None:
        """Evict what is over the budget now, whatever the stride."""
        if (wanted := self._rows - self.policy.budget) <= 0:
            return
        self._score(None, self._rows)
        keep = self._evict(wanted, None)
        self._check_room(0)
        if keep is None:
            return
        if self._positions is not None:
            self._positions = self._followed(self._positions, keep, 0)
        for layer in self.layers:
            layer.keep(keep)

    def _followed(self, stored: mx.array, index: mx.array | None, count: int) -> mx.array:
        """Positions of the kept rows after a pass: `stored` before it, of which the rows of `index` are left."""
        fresh = mx.arange(self._position - count, self._position, dtype=mx.int32)
        rows = mx.concatenate([stored, mx.broadcast_to(fresh, (stored.shape[0], count))], axis=-1)
        if index is None:
            return rows
        return mx.take_along_axis(rows, mx.broadcast_to(index, (stored.shape[0], index.shape[-1])), axis=-1)

    def token_scores(self) -> list[mx.array]:
        """What each kept token has earned so far, one [B, H_kv, R] a judging layer."""
        self._score(None, self._rows)
        return [layer.scores for layer in self.judges]

    def _score(self, index: mx.array | None, row: int) -> None:
        """Score what has come since the last time: only an eviction, or someone who asks, needs to know.

        index: the rows that are left of the first `row`; None for all of them.
        """
        for layer in self.judges:
            if new := self._rows - layer.scores.shape[-1]:
                layer.score_rows(layer.rows_at(index, row), new)

    def set_policy(self, policy: Policy) -> None:
        """Go on with another budget; what is too much leaves at once."""
        self.policy = policy
        if not policy.is_roomy:
            self._take_tables()
        for table in self._tables:
            table.policy = policy
        for layer in self.layers:
            layer.policy = policy
        self._shrink()

    # Evicting

    def evict(self, block: str) -> Evicted:
        """Take one resident block out, whatever its score. Raises KeyError, or ValueError if it may not leave."""
        table = self._table()
        unit = table.find(block)
        if unit.pinned or not unit.complete or unit.start < self.policy.n_sink:
            raise ValueError(f"block {block!r} is pinned, unfinished, or holds sinks; it cannot be evicted")
        number = table.units.index(unit)
        score = self.scores()[number]
        begin, end = table.row_spans()[number]
        table.remove(number)
        self._rows = table.rows
        index = mx.concatenate([mx.arange(begin), mx.arange(end, end + self._rows - begin)])
        for layer in self.judges:
            layer.keep_scores(index)
        for layer in self.layers:
            layer.keep(index)
        return self._report(unit, score, 0)

    def truncate(self, position: int) -> None:
        """Forget every token from `position` on, as if it had not been streamed.

        Scores that those tokens have given to others stay. Raises ValueError if it would cut a finished block.
        """
        table = self._table()
        self._rows = table.truncate(position)
        self._position = table.position
        for layer in self.layers:
            layer.truncate(self._rows, self._position)

    def rebase(self, ropes: list[nn.Module]) -> None:
        """Renumber the resident tokens 0, 1, 2, … and rotate their keys to match, one rope module a layer.

        For streams longer than the model's trained context. Keys are stored rotated; the model's own rope, given
        the change of position as its offset, moves them, so scaled variants stay right.
        """
        self._score(None, self._rows)
        table = self._table()
        deltas = mx.array(table.rebase())
        self._position = table.position
        for layer, rope in zip(self.layers, ropes, strict=True):
            layer.rotate(deltas, rope, self._position)

    # Internals

    def _check_room(self, tokens: int) -> None:
        if self._rows + tokens > self.policy.budget:
            raise RuntimeError(f"kept tokens passed budget {self.policy.budget} with every block pinned or unfinished")

    def _advance(self, take: int) -> None:
        if self._positions is None:
            for table in self._tables:
                table.append(take)
        self._rows += take
        self._position += take

    def _evict_least(self, index: mx.array | None, row: int) -> mx.array | None:
        """Make room for a stride, or as much of one as can be. Returns which of the kept rows stay, None for all.

        index: where they are among the first `row` that are stored; None for the same places.
        """
        self._score(index, row)
        return self._evict(self.policy.overflow(self._rows, self._position), index)

    def _evict(self, wanted: int, index: mx.array | None) -> mx.array | None:
        """Let whole units of `wanted` tokens or more leave, if they can; see `_evict_least`."""
        keep = self._choose(wanted)
        if keep is None:
            return None
        if self.policy.merge:
            self._fold(index, keep)
        for layer in self.judges:
            layer.keep_scores(keep)
        self._rows = keep.shape[-1]
        return keep

    def _choose(self, wanted: int) -> mx.array | None:
        """Which rows stay, [n] or [lanes, n]; None for all."""
        scores = self._lane_scores()
        if self._positions is not None:
            keep = choosing.on_device(self.policy, scores, self._rows, self._position, wanted)
        else:
            kept = choosing.on_host(self.policy, np.array(scores), self._tables, wanted, self._report)
            if kept is None:
                return None
            keep = mx.array(kept)
        return keep if self.policy.scope == "head" else keep[0]

    def _compress_prompt(self, count: int) -> mx.array | None:
        """SnapKV's trigger: the first single-token pass after a longer one is where a prompt ended."""
        if count > 1:
            self._read_many = True
            return None
        ended, self._read_many = self._read_many, False
        wanted = self._rows - self.policy.budget
        if not ended or wanted <= 0:
            return None
        for layer in self.judges:
            # The token that was just made is no part of the prompt, and gives no score; it is the newest and stays.
            layer.scores = mx.pad(
                self.policy.scorer.score(layer.scores, layer.rows_at(None, self._rows - 1), self._rows - 1),
                [(0, 0), (0, 0), (0, 1)],
            )
        keep = self._evict(wanted, None)
        for layer in self.judges:
            layer.scores = layer.scores[..., :0]
        return keep

    def _fold(self, index: mx.array | None, keep: mx.array) -> None:
        rows = mx.arange(self._rows)
        stays = (keep[..., None, :] == rows[:, None]).any(axis=-1).astype(mx.int32)
        # A stable sort: those that leave come first, in order.
        lost = mx.argsort(stays, axis=-1)[..., : self._rows - keep.shape[-1]]
        for layer in self.layers:
            places = (lost, keep) if index is None else (_compose(index, lost), _compose(index, keep))
            layer.fold(*places, lost, keep)

    def _report(self, unit: Unit, score: float, lane: int) -> Evicted:
        evicted = Evicted(unit.block, unit.start, unit.seen, score, unit.relevance, lane)
        if self._on_evict is not None:
            self._on_evict(evicted)
        return evicted

    def _table(self) -> UnitTable:
        if self.policy.scope == "head":
            raise ValueError('scope="head" keeps other rows in every head; declared blocks need "layer" or "model"')
        self._take_tables()
        return self._tables[0]

    def _take_tables(self) -> None:
        """Let the host decide from now on. Waits for the device."""
        if self._positions is not None:
            for table, kept in zip(self._tables, self.positions(), strict=True):
                table.restore(kept, self._position)
            self._positions = None

    def _lane_scores(self) -> mx.array:
        """[lanes, R], pooled over what shares a decision."""
        if self.policy.scope == "head":
            scores = self.layers[0].scores
            return scores.reshape(-1, scores.shape[-1])
        if self.policy.scope == "layer":
            return self.layers[0].scores.mean(axis=1)
        return mx.stack([layer.scores.mean(axis=1) for layer in self.layers]).mean(axis=0)


# The group being loaded: mlx-lm restores caches one by one, and knows nothing of groups.
_restored = threading.local()


def _compose(index: mx.array, keep: mx.array) -> mx.array:
    """The rows of `index` that `keep` keeps, a lane at a time if there are lanes."""
    return index[keep] if index.ndim == 1 else mx.take_along_axis(index, keep, axis=-1)
