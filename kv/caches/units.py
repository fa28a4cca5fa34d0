"""Host-side bookkeeping of one stream: which tokens form which eviction unit, and which unit goes next.

Plain Python, no tensors. A unit is born once, as a fixed span of positions: a declared block, or a chunk of the
grid laid over undeclared text. It is resident whole or evicted whole; no other operation exists.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from numbers import Real
from operator import index
from typing import Any

from kv.caches.policy import Policy


@dataclass(slots=True)
class Unit:
    """A run of tokens that is kept or evicted as one.

    start: absolute position of its first token.
    length: its tokens when complete; None while an open block still grows.
    seen: how many of them have been stored.
    block: the caller's name for a declared block; None for a chunk.
    pinned: never evicted while True.
    relevance: the caller's score; units with less of it leave first, whatever attention says.
    """

    start: int
    length: int | None
    seen: int = 0
    block: str | None = None
    pinned: bool = False
    relevance: float = 0.0

    @property
    def complete(self) -> bool:
        return self.seen == self.length

    @property
    def end(self) -> int:
        """One past the last position it covers, or has covered so far while it is open."""
        return self.start + (self.seen if self.length is None else self.length)


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


class UnitTable:
    """The resident units of one stream in position order, and those declared for positions to come."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.position = 0
        self.rows = 0
        self.units: list[Unit] = []
        self._ahead: list[Unit] = []

    # Declaring

    def declare(self, start: int, end: int, block: str, *, pinned: bool = False, relevance: float = 0.0) -> None:
        """Declare that positions [start, end), not yet streamed, are one block.

        Raises ValueError if the span is empty, in the past, overlaps another block, or cannot fit the budget, and for
        what is no position, name or relevance.
        """
        start, end = (_check_position(block, name, value) for name, value in (("start", start), ("end", end)))
        relevance = check_relevance(block, relevance)
        if end <= start:
            raise ValueError(f"block {block!r}: span [{start}, {end}) is empty")
        if start < self.position:
            raise ValueError(f"block {block!r}: start {start} is before the stream's position {self.position}")
        self._check_name(block)
        last = self.units[-1] if self.units else None
        if last and last.block is not None and not last.complete and (last.length is None or start < last.end):
            raise ValueError(f"block {block!r}: starts at {start}, inside block {last.block!r}")
        for other in self._ahead:
            if (start < other.end and other.start < end) or (other.length is None and start >= other.start):
                raise ValueError(f"block {block!r}: [{start}, {end}) overlaps block {other.block!r}")
        unit = Unit(start, end - start, block=block, pinned=pinned, relevance=relevance)
        self._check_fits(unit)
        if last is not None and not last.complete and last.block is None and start < last.end:
            last.length = start - last.start
            if last.length == last.seen == 0:
                self.units.pop()
        insort(self._ahead, unit, key=lambda u: u.start)

    def open_block(self, block: str, *, at: int | None = None, pinned: bool = False, relevance: float = 0.0) -> None:
        """Start a block of unknown length at position `at`, the current one by default; it grows until `close_block`.

        Raises ValueError if another block covers `at` or is declared after it.
        """
        start = self.position if at is None else at
        self.declare(start, start + 1, block, pinned=pinned, relevance=relevance)
        if self._ahead[-1].block != block:
            self._ahead = [unit for unit in self._ahead if unit.block != block]
            raise ValueError(f"block {block!r}: another block is declared after it")
        self._ahead[-1].length = None

    def close_block(self) -> None:
        """End the open block at the current position. A block that got no token is forgotten."""
        if self._ahead and self._ahead[-1].length is None:
            self._ahead.pop()
            return
        last = self.units[-1] if self.units else None
        if last is None or last.length is not None:
            raise ValueError("no block is open")
        last.length = last.seen

    def find(self, block: str) -> Unit:
        """The resident unit of a declared block. Raises KeyError if it is not resident."""
        for unit in self.units:
            if unit.block == block:
                return unit
        raise KeyError(block)

    def pin(self, block: str, pinned: bool) -> None:
        """Pin or unpin a resident block. Raises KeyError, or ValueError if the pinned would fill the budget."""
        unit = self.find(block)
        before, unit.pinned = unit.pinned, pinned
        try:
            self._check_fits(None)
        except ValueError:
            unit.pinned = before
            raise

    def rename(self, names: Mapping[str, str]) -> None:
        """Give each resident block the name that `names` has for it. Raises KeyError for a block without one."""
        new = [None if unit.block is None else names[unit.block] for unit in self.units]
        for unit, name in zip(self.units, new, strict=True):
            unit.block = name

    # Streaming

    def append(self, count: int) -> None:
        """Store the next `count` tokens of the stream."""
        while count:
            unit = self._growing()
            take = count if unit.length is None else min(count, unit.length - unit.seen)
            unit.seen += take
            self.position += take
            self.rows += take
            count -= take

    def _growing(self) -> Unit:
        if self.units and not self.units[-1].complete:
            return self.units[-1]
        start = self.position
        if self._ahead and self._ahead[0].start == start:
            unit = self._ahead.pop(0)
        else:
            end = self._chunk(start)[1]
            if self._ahead:
                end = min(end, self._ahead[0].start)
            unit = Unit(start, end - start)
        self.units.append(unit)
        return unit

    def restore(self, positions: Sequence[int], position: int) -> None:
        """Take over a stream of chunks alone: the positions of its rows, in order, and that of the next token."""
        self.position = position
        self.rows = len(positions)
        self.units = []
        for kept in positions:
            if not self.units or kept >= self.units[-1].end:
                start, end = self._chunk(kept)
                self.units.append(Unit(start, end - start))
            self.units[-1].seen += 1

    def to_builtins(self) -> dict[str, Any]:
        """As JSON-ready values."""
        units, ahead = ([asdict(unit) for unit in units] for units in (self.units, self._ahead))
        return {"position": self.position, "units": units, "ahead": ahead}

    @classmethod
    def from_builtins(cls, policy: Policy, values: dict[str, Any]) -> UnitTable:
        """The inverse of `to_builtins`."""
        table = cls(policy)
        table.position = values["position"]
        table.units = [Unit(**unit) for unit in values["units"]]
        table._ahead = [Unit(**unit) for unit in values["ahead"]]
        table.rows = sum(unit.seen for unit in table.units)
        return table

    # Evicting

    def row_spans(self) -> list[tuple[int, int]]:
        """For each resident unit, the half-open range of cache rows that holds it."""
        spans, row = [], 0
        for unit in self.units:
            spans.append((row, row + unit.seen))
            row += unit.seen
        return spans

    def pick(self, scores: Sequence[float]) -> int | None:
        """Index of the unit to evict next, given one score a unit; None if nothing may be evicted.

        Least relevance first, then least score, then the older. The newest `recent` tokens are spared unless
        nothing else is left.
        """
        for spared in (self.policy.recent, 0):
            limit = self.position - spared
            candidates = [i for i, unit in enumerate(self.units) if not self._is_fixed(unit) and unit.end <= limit]
            if candidates:
                return min(candidates, key=lambda i: (self.units[i].relevance, scores[i], self.units[i].start))
        return None

    def remove(self, index: int) -> Unit:
        """Take a unit out. Returns it."""
        unit = self.units.pop(index)
        self.rows -= unit.seen
        return unit

    def _is_fixed(self, unit: Unit) -> bool:
        return unit.pinned or not unit.complete or unit.start < self.policy.n_sink

    # Rewinding and moving

    def check_room(self, count: int) -> None:
        """Check that what cannot leave never passes the budget while the next `count` tokens come.

        Raises ValueError with both numbers.
        """
        most = fixed = sum(unit.seen for unit in self.units if unit.complete and self._is_fixed(unit))
        position, stop = self.position, self.position + count
        growing = self.units[-1] if self.units and not self.units[-1].complete else None
        ahead = list(self._ahead)
        while position < stop:
            if growing is None and ahead and ahead[0].start == position:
                growing = ahead.pop(0)
            if growing is None:
                end = min(stop, ahead[0].start if ahead else stop)
                if position < self.policy.n_sink:
                    end = min(end, self.policy.n_sink)
                    fixed += end - position
                    most = max(most, fixed)
                else:
                    most = max(most, fixed + self._longest_chunk(position, end))
            else:
                end = stop if growing.length is None else min(stop, growing.end)
                tokens = growing.seen + end - position
                most = max(most, fixed + tokens)
                if growing.pinned or growing.start < self.policy.n_sink:
                    fixed += tokens
                growing = None
            position = end
        if most > self.policy.budget:
            raise ValueError(
                f"the next {count} tokens: sinks, pinned and unfinished blocks would come to {most} tokens, more than "
                f"budget {self.policy.budget}"
            )

    def _longest_chunk(self, start: int, end: int) -> int:
        """Tokens of the longest chunk of undeclared text at [start, end)."""
        longest = 0
        # The second chunk is a whole one, if there is a third.
        for _ in range(2):
            border = min(end, self._chunk(start)[1])
            longest = max(longest, border - start)
            start = border
        return max(longest, min(end - start, self.policy.chunk_size))

    def truncate(self, position: int) -> int:
        """Forget everything from `position` on, declared blocks included. Returns the rows that are left.

        Raises ValueError if that would cut a finished block.
        """
        keep = [unit for unit in self.units if unit.start < position]
        last = keep[-1] if keep else None
        cut = last is not None and last.start + last.seen > position
        if cut and last is not None and last.block is not None and last.length is not None:
            raise ValueError(f"block {last.block!r}: position {position} would cut it")
        if cut and last is not None:
            last.seen = position - last.start
        self.units = keep
        self._ahead = []
        self.position = min(self.position, position)
        self.rows = sum(unit.seen for unit in keep)
        return self.rows

    def positions(self) -> list[int]:
        """The absolute position of each row."""
        return [p for unit in self.units for p in range(unit.start, unit.start + unit.seen)]

    def rebase(self) -> list[int]:
        """Renumber so that resident tokens are 0, 1, 2, …; returns by how much each row's position changed.

        Raises ValueError while blocks are declared ahead, whose positions would lose their meaning.
        """
        if self._ahead:
            raise ValueError("cannot renumber while blocks are declared ahead")
        deltas: list[int] = []
        row = 0
        for unit in self.units:
            deltas += [row - unit.start] * unit.seen
            unit.start = row
            row += unit.seen
        self.position = row
        return deltas

    def _chunk(self, position: int) -> tuple[int, int]:
        """The span of the sinks, or of the chunk of the grid, that covers a position."""
        n_sink, size = self.policy.n_sink, self.policy.chunk_size
        if position < n_sink:
            return 0, n_sink
        start = n_sink + (position - n_sink) // size * size
        return start, start + size

    # Checks

    def _check_name(self, block: str) -> None:
        if not isinstance(block, str):
            raise ValueError(f"block: {block!r} is not a string")
        if any(unit.block == block for unit in (*self.units, *self._ahead)):
            raise ValueError(f"block {block!r}: already declared")

    def _check_fits(self, new: Unit | None) -> None:
        n_sink, budget = self.policy.n_sink, self.policy.budget
        units = [*self.units, *self._ahead, *([new] if new else [])]
        fixed = n_sink + sum(
            max(0, unit.end - max(unit.start, n_sink))
            for unit in units
            if unit.pinned or unit.start < n_sink or unit is new
        )
        if fixed > budget:
            what = f"block {new.block!r} of {new.length} tokens" if new else "the pinned blocks"
            raise ValueError(f"{what}: {fixed} tokens with sinks and pinned blocks, more than budget {budget}")


def _check_position(block: str, name: str, value: object) -> int:
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"block {block!r}: {name} {value!r} is not a whole number") from None


def check_relevance(block: str, relevance: object) -> float:
    """As a float. Raises ValueError unless it is a finite number."""
    if not isinstance(relevance, Real) or not isfinite(relevance):
        raise ValueError(f"block {block!r}: relevance {relevance!r} is not a finite number")
    return float(relevance)
