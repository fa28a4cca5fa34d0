"""Layers that share one eviction decision: one layer each (`scope="head"|"layer"`) or the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kv.caches import choosing
from kv.caches.blockkv import BlockKV, laid_out
from kv.caches.handout import Handout
from kv.caches.layer import Layer
from kv.caches.ledger import Ledger
from kv.caches.policy import Policy
from kv.caches.scoring import ObservedAttention
from kv.caches.units import Evicted, Unit, check_relevance


class CacheGroup:
    """The layers that decide together, and the books of what they hold.

    With scope "layer" a group is one layer, or one and those that follow it; with "model" it is all of them. Both have
    one lane. With "head" there is one a head (and batch row): only chunks of equal size leave then, so every lane
    always holds equally many rows and none is cut to align.

    While a stream is nothing but chunks, which of them leave is worked out on the device and never read back. Once
    the ledger is on the host, its unit tables decide. Both decide the same.
    """

    def __init__(
        self, policy: Policy, *, on_evict: Callable[[Evicted], None] | None = None, held: Ledger | None = None
    ) -> None:
        self.policy = policy
        self.layers: list[Layer] = []
        self._on_evict = on_evict
        self._held = held or Ledger(policy, on_host=on_evict is not None or not policy.is_roomy)
        # Called after each pass, once it is accounted for.
        self.on_settled: Callable[[], None] | None = None
        self._copies: Handout[CacheGroup] = Handout()
        self._unobserved = False

    # What is held

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self._held.position

    @property
    def rows(self) -> int:
        """Tokens kept per layer."""
        return self._held.rows

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers of the group."""
        return sum(layer.nbytes for layer in self.layers)

    def positions(self) -> list[list[int]]:
        """The position of each kept row, by lane. Waits for the device."""
        return self._held.positions()

    def units(self) -> list[Unit]:
        """The resident units in position order. Raises ValueError with scope="head", where heads differ."""
        return list(self._held.table().units)

    def scores(self) -> list[float]:
        """The pooled score of each of `units()`. Waits for the device."""
        table = self._held.table()
        if not table.rows:
            return []
        self._score(None, self.rows)
        return choosing.unit_scores(self.policy, table, np.array(self._lane_scores())[0])

    @property
    def judges(self) -> list[Layer]:
        """The layers whose scores decide: all with scope "model", else the first, which others may follow."""
        return self.layers if self.policy.scope == "model" else self.layers[:1]

    @property
    def host_nbytes(self) -> int:
        """Bytes that the group itself holds of keys and scores."""
        return 0

    # Saving and copying

    @property
    def row_positions(self) -> mx.array | None:
        """The positions of the kept rows, [lanes, rows], while the device has them; None once unit tables do."""
        return self._held.row_positions

    def books(self) -> dict[str, Any]:
        """What there is to know beside tensors, as JSON-ready values."""
        return {**self._held.to_builtins(), "unsettled": self.on_settled is not None}

    def copied(self, layer: int) -> Layer:
        """A copy of that layer, in a copy of the group that the layers after it get as well."""

        def make() -> CacheGroup:
            return copy.deepcopy(self, {id(self._copies): Handout(), id(self._on_evict): self._on_evict})

        return self._copies.take(layer, len(self.layers), make).layers[layer]

    # Declaring blocks

    @property
    def declares(self) -> bool:
        """Whether blocks were declared, so that layers that decide alone may come to keep different numbers of rows."""
        return self._held.declared

    def declare(self, start: int, end: int, block: str, *, pinned: bool = False, relevance: float = 0.0) -> None:
        """Declare positions [start, end), yet to be streamed, as one block. See `UnitTable.declare`."""
        self._held.table().declare(start, end, block, pinned=pinned, relevance=relevance)
        self._held.declared = True

    def open_block(self, block: str, *, at: int | None = None, pinned: bool = False, relevance: float = 0.0) -> None:
        """Start a block of unknown length at position `at`, or here. See `UnitTable.open_block`."""
        self._held.table().open_block(block, at=at, pinned=pinned, relevance=relevance)
        self._held.declared = True

    def close_block(self) -> None:
        """End the open block."""
        self._held.table().close_block()

    def find(self, block: str) -> Unit:
        """The resident unit of a declared block. Raises KeyError if it is not resident."""
        return self._held.table().find(block)

    def pin(self, block: str, pinned: bool) -> None:
        """Pin or unpin a resident block."""
        self._held.table().pin(block, pinned)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give each resident block another name. Raises KeyError for a block that `names` does not have."""
        self._held.table().rename(names)

    def set_relevance(self, block: str, relevance: float) -> None:
        """Give a resident block the caller's score. Raises KeyError if it is not resident, or ValueError."""
        self._held.table().find(block).relevance = check_relevance(block, relevance)

    # Streaming

    def join(self, layer: Layer) -> None:
        """Add a layer. The group acts when the layer that joined last has taken a pass in."""
        self.layers.append(layer)

    def set_lanes(self, lanes: int) -> None:
        """Give each of `lanes` heads a decision of its own, before anything was stored."""
        self._held.set_lanes(lanes)

    def admit(self, count: int) -> None:
        """Check that a pass of `count` tokens can be stored, before the first layer stores it.

        Raises ValueError if pinned and unfinished blocks would pass the budget, and RuntimeError if the pass before
        was not shown to caches that want to see queries.
        """
        if self._unobserved:
            raise RuntimeError(
                'score "observed": a pass was not shown to the cache; build it with KVCacheBuilder.for_model, or '
                "call kv.observed.install(model)"
            )
        if self.policy.trigger != "over_budget" or not self._held.on_host:
            return
        if self.rows + count <= self.policy.budget:
            return
        for table in self._held.tables:
            table.check_room(count)

    def settle(self, count: int) -> None:
        """Score and account for the pass of `count` tokens that every layer has just stored, then evict.

        Done as if the tokens had come one by one, so that survivors do not depend on how the stream was sliced: a
        stretch is scored up to the next position at which something must leave, whole units leave, and so on. The
        rows are gathered once, at the end.
        """
        if isinstance(self.policy.scorer, ObservedAttention):
            self._unobserved = True
            return
        row, total = self.rows, self.rows + count
        index: mx.array | None = None
        while row < total:
            if self.policy.must_evict(self.rows, self.position):
                keep = self._evict_least(index, row)
                if keep is not None:
                    index = keep if index is None else _compose(index, keep)
            take = min(total - row, self.policy.until_eviction(self.rows, self.position))
            if index is not None:
                fresh = mx.arange(row, row + take)
                index = mx.concatenate([index, mx.broadcast_to(fresh, (*index.shape[:-1], take))], axis=-1)
            row += take
            self._held.advance(take)
        if self.policy.trigger == "prefill_end":
            index = self._compress_prompt(count)
        if index is not None:
            self._keep(index, total)
        if self.on_settled is not None:
            self.on_settled()

    def settle_observed(self, count: int) -> None:
        """Account for a pass of `count` tokens whose queries have scored every row, then evict down to the budget."""
        self._unobserved = False
        self._held.advance(count)
        self._shrink()
        if self.on_settled is not None:
            self.on_settled()

    def _shrink(self) -> None:
        """Evict what is over the budget now, whatever the stride."""
        if (wanted := self.rows - self.policy.budget) <= 0:
            return
        rows = self.rows
        self._score(None, rows)
        if (keep := self._evict(wanted, None)) is not None:
            self._keep(keep, rows)

    def _keep(self, index: mx.array, rows: int) -> None:
        """Let the rows of `index` be all that is left of the `rows` that are stored."""
        for layer in self.layers:
            layer.keep(index)
        if (positions := self._held.keep(index, rows)) is not None:
            self.layers[0].hold(positions)

    def token_scores(self) -> list[mx.array]:
        """What each kept token has earned so far, one [B, H_kv, R] a judging layer."""
        self._score(None, self.rows)
        return [layer.scores for layer in self.judges]

    def _score(self, index: mx.array | None, row: int) -> None:
        """Score what has come since the last time: only an eviction, or someone who asks, needs to know.

        index: the rows that are left of the first `row`; None for all of them.
        """
        if isinstance(self.policy.scorer, ObservedAttention):
            # Queries have scored what a pass brought, when it came.
            return
        for layer in self.judges:
            if new := self.rows - layer.scores.shape[-1]:
                layer.score_rows(layer.rows_at(index, row), new)

    def set_policy(self, policy: Policy) -> None:
        """Go on with another budget; what is too much leaves at once."""
        self.policy = policy
        self._held.set_policy(policy)
        for layer in self.layers:
            layer.policy = policy
        self._shrink()

    # Evicting

    def evict(self, block: str) -> Evicted:
        """Take one resident block out, whatever its score. Raises KeyError, or ValueError if it may not leave."""
        unit = self.check_evictable(block)
        table = self._held.table()
        number = table.units.index(unit)
        score = self.scores()[number]
        begin, end = table.row_spans()[number]
        table.remove(number)
        self._held.rows = table.rows
        index = mx.concatenate([mx.arange(begin), mx.arange(end, end + self.rows - begin)])
        for layer in self.judges:
            layer.keep_scores(index)
        for layer in self.layers:
            layer.keep(index)
        return self._report(unit, score, 0)

    def check_evictable(self, block: str) -> Unit:
        """The unit of a block that `evict` can take out. Raises as that does."""
        unit = self._held.table().find(block)
        if unit.pinned or not unit.complete or unit.start < self.policy.n_sink:
            raise ValueError(f"block {block!r} is pinned, unfinished, or holds sinks; it cannot be evicted")
        return unit

    def lift(self, block: str) -> BlockKV:
        """A copy of a resident block's K/V. Raises KeyError if it is not resident whole."""
        table = self._held.table()
        unit = table.find(block)
        if not unit.complete:
            raise KeyError(block)
        begin, end = table.row_spans()[table.units.index(unit)]
        rows = [layer.lift(begin, end) for layer in self.layers]
        return BlockKV(unit.start, [keys for keys, _ in rows], [values for _, values in rows])

    def insert(self, blocks: Sequence[BlockKV], ropes: list[nn.Module]) -> None:
        """Store blocks' rows as those of the next tokens, without a pass: keys are rotated to where they come.

        Where the blocks were declared, or begun, before. ropes: one rope module a layer.
        Raises ValueError if there is no room for them, or they are not of this model.
        """
        count = sum(kv.tokens for kv in blocks)
        if self.rows + count > self.policy.budget:
            room = self.policy.budget - self.rows
            raise ValueError(f"{count} tokens to insert, room for {room} in budget {self.policy.budget}")
        for kv in blocks:
            if len(kv.keys) != len(self.layers):
                raise ValueError(f"K/V of {len(kv.keys)} layers, the model has {len(self.layers)}")
        for layer, rows in zip(self.layers, laid_out(blocks, self.position, ropes), strict=True):
            layer.insert(*rows)
        self._held.advance(count)

    def truncate(self, position: int) -> None:
        """Forget every token from `position` on, as if it had not been streamed.

        Scores that those tokens have given to others stay. Raises ValueError if it would cut a finished block, or if
        the position is not one of 0 to the next token's.
        """
        if not isinstance(position, int) or not 0 <= position <= self.position:
            raise ValueError(f"position: {position!r} is not a whole number from 0 to {self.position}")
        if position < self.position:
            # First, so that it does not matter whether someone has asked for scores since those tokens came.
            self._score(None, self.rows)
        self._held.truncate(position)
        for layer in self.layers:
            layer.truncate(self.rows, self.position)

    def reject(self, count: int) -> None:
        """Forget the last `count` tokens, a draft's, as if they had not been streamed: no score shows them.

        Raises ValueError if somebody has asked for scores since they came, or queries have made them: too late then.
        """
        rows = self.rows - count
        if isinstance(self.policy.scorer, ObservedAttention) or any(
            layer.scores.shape[-1] > rows for layer in self.judges
        ):
            raise ValueError(f"the last {count} tokens have given scores to others; they cannot be rejected")
        self._held.truncate(self.position - count)
        for layer in self.layers:
            layer.truncate(self.rows, self.position)

    def rebase(self, ropes: list[nn.Module]) -> None:
        """Renumber the resident tokens 0, 1, 2, … and rotate their keys to match, one rope module a layer.

        For streams longer than the model's trained context. Keys are stored rotated; the model's own rope, given
        the change of position as its offset, moves them, so scaled variants stay right.
        """
        self._score(None, self.rows)
        deltas = mx.array(self._held.rebase())
        for layer, rope in zip(self.layers, ropes, strict=True):
            layer.rotate(deltas, rope, self.position)

    # Internals

    def _evict_least(self, index: mx.array | None, row: int) -> mx.array | None:
        """Make room for a stride, or as much of one as can be. Returns which of the kept rows stay, None for all.

        index: where they are among the first `row` that are stored; None for the same places.
        """
        self._score(index, row)
        return self._evict(self.policy.overflow(self.rows, self.position), index)

    def _evict(self, wanted: int, index: mx.array | None) -> mx.array | None:
        """Let whole units of `wanted` tokens or more leave, if they can; see `_evict_least`."""
        keep = self._choose(wanted)
        if keep is None:
            return None
        if self.policy.merge and keep.shape[-1]:
            self._fold(index, keep)
        for layer in self.judges:
            layer.keep_scores(keep)
        self._held.rows = keep.shape[-1]
        return keep

    def _choose(self, wanted: int) -> mx.array | None:
        """Which rows stay, [n] or [lanes, n]; None for all."""
        scores = self._lane_scores()
        if not self._held.on_host:
            keep = choosing.on_device(self.policy, scores, self.rows, self.position, wanted)
        else:
            kept = choosing.on_host(self.policy, np.array(scores), self._held.tables, wanted, self._report)
            if kept is None:
                return None
            keep = mx.array(kept)
        return keep if self.policy.scope == "head" else keep[0]

    def _compress_prompt(self, count: int) -> mx.array | None:
        """SnapKV's trigger: the first single-token pass after a longer one is where a prompt ended."""
        if count > 1:
            self._held.read_many = True
            return None
        ended, self._held.read_many = self._held.read_many, False
        wanted = self.rows - self.policy.budget
        if not ended or wanted <= 0:
            return None
        for layer in self.judges:
            # The token that was just made is no part of the prompt, and gives no score; it is the newest and stays.
            layer.scores = mx.pad(
                self.policy.scorer.score(layer.scores, layer.rows_at(None, self.rows - 1), self.rows - 1),
                [(0, 0), (0, 0), (0, 1)],
            )
        keep = self._evict(wanted, None)
        for layer in self.judges:
            layer.scores = layer.scores[..., :0]
        return keep

    def _fold(self, index: mx.array | None, keep: mx.array) -> None:
        rows = mx.arange(self.rows)
        stays = (keep[..., None, :] == rows[:, None]).any(axis=-1).astype(mx.int32)
        # A stable sort: those that leave come first, in order.
        lost = mx.argsort(stays, axis=-1)[..., : self.rows - keep.shape[-1]]
        for layer in self.layers:
            places = (lost, keep) if index is None else (_compose(index, lost), _compose(index, keep))
            layer.fold(*places, lost, keep)

    def _report(self, unit: Unit, score: float, lane: int) -> Evicted:
        evicted = Evicted(unit.block, unit.start, unit.seen, score, unit.relevance, lane)
        if self._on_evict is not None:
            self._on_evict(evicted)
        return evicted

    def _lane_scores(self) -> mx.array:
        """[lanes, R], pooled over what shares a decision."""
        if self.policy.scope == "head":
            scores = self.layers[0].scores
            return scores.reshape(-1, scores.shape[-1])
        if self.policy.scope == "layer":
            return self.layers[0].scores.mean(axis=1)
        return mx.stack([layer.scores.mean(axis=1) for layer in self.layers]).mean(axis=0)


def _compose(index: mx.array, keep: mx.array) -> mx.array:
    """The rows of `index` that `keep` keeps, a lane at a time if there are lanes."""
    return index[keep] if index.ndim == 1 else mx.take_along_axis(index, keep, axis=-1)
