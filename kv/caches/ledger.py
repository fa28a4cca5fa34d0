"""The books of a group: how many rows are kept, of which positions, and which units they form."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kv.caches.policy import Policy
from kv.caches.units import UnitTable


class Ledger:
    """What every layer of a group holds, the same in each.

    While a stream is nothing but chunks, the positions of its rows are on the device and never read back. Once blocks
    are declared, or someone asks for the units, unit tables on the host know them, one a lane.
    """

    def __init__(self, policy: Policy, *, on_host: bool) -> None:
        self.policy = policy
        self.rows = 0
        self.position = 0
        # Whether blocks were declared, and whether a pass of several tokens was the last one.
        self.declared = False
        self.read_many = False
        self.tables = [UnitTable(policy)]
        # The positions of the rows kept at the last eviction, [lanes, n]; those after them are the newest.
        self._positions: mx.array | None = None if on_host else mx.zeros((1, 0), dtype=mx.int32)

    @property
    def on_host(self) -> bool:
        """Whether the tables know what is held."""
        return self._positions is None

    @property
    def row_positions(self) -> mx.array | None:
        """The positions of the kept rows, [lanes, rows], while the device has them; None once the tables do."""
        return None if self._positions is None else self._stored(self._positions, self.rows)

    def positions(self) -> list[list[int]]:
        """The position of each kept row, by lane. Waits for the device."""
        if self._positions is None:
            return [table.positions() for table in self.tables]
        kept: list[list[int]] = np.array(self.row_positions).tolist()
        return kept

    def table(self) -> UnitTable:
        """The units of the one lane there is; the host decides from now on. Raises ValueError with scope "head"."""
        if self.policy.scope == "head":
            raise ValueError('scope="head" keeps other rows in every head; declared blocks need "layer" or "model"')
        self.take_tables()
        return self.tables[0]

    def take_tables(self) -> None:
        """Let the host decide from now on. Waits for the device."""
        if self._positions is not None:
            for table, kept in zip(self.tables, self.positions(), strict=True):
                table.restore(kept, self.position)
            self._positions = None

    def set_lanes(self, lanes: int) -> None:
        """Tell `lanes` heads apart, before anything was stored."""
        self.tables = [UnitTable(self.policy) for _ in range(lanes)]
        if self._positions is not None:
            self._positions = mx.zeros((lanes, 0), dtype=mx.int32)

    def set_policy(self, policy: Policy) -> None:
        """Go on with another budget."""
        self.policy = policy
        if not policy.is_roomy:
            self.take_tables()
        for table in self.tables:
            table.policy = policy

    def advance(self, count: int) -> None:
        """The next `count` tokens are stored."""
        if self._positions is None:
            for table in self.tables:
                table.append(count)
        self.rows += count
        self.position += count

    def keep(self, index: mx.array, stored: int) -> mx.array | None:
        """The rows of `index` are left of `stored` ones. Returns what is to be worked out along with the keys."""
        if self._positions is None:
            return None
        lanes = self._positions.shape[0]
        index = mx.broadcast_to(index, (lanes, index.shape[-1]))
        self._positions = mx.take_along_axis(self._stored(self._positions, stored), index, axis=-1)
        return self._positions

    def truncate(self, position: int) -> None:
        """Forget what is at `position` and after it. Raises ValueError if it would cut a finished block."""
        self.rows = self.table().truncate(position)
        self.position = self.tables[0].position

    def rebase(self) -> list[int]:
        """Renumber; see `UnitTable.rebase`."""
        deltas = self.table().rebase()
        self.position = self.tables[0].position
        return deltas

    def to_builtins(self) -> dict[str, Any]:
        """As JSON-ready values, but for `row_positions`."""
        tables = [table.to_builtins() for table in self.tables] if self.on_host else []
        return {
            "rows": self.rows,
            "position": self.position,
            "declared": self.declared,
            "read_many": self.read_many,
            "tables": tables,
        }

    @classmethod
    def from_builtins(cls, policy: Policy, values: dict[str, Any], positions: mx.array | None) -> Ledger:
        """The inverse."""
        ledger = cls(policy, on_host=positions is None)
        ledger.rows, ledger.position = values["rows"], values["position"]
        ledger.declared, ledger.read_many = values["declared"], values["read_many"]
        ledger._positions = positions
        if positions is None:
            ledger.tables = [UnitTable.from_builtins(policy, table) for table in values["tables"]]
        else:
            ledger.tables = [UnitTable(policy) for _ in range(positions.shape[0])]
        return ledger

    def _stored(self, known: mx.array, rows: int) -> mx.array:
        lanes, count = known.shape
        newest = mx.arange(self.position - (rows - count), self.position, dtype=mx.int32)
        return mx.concatenate([known, mx.broadcast_to(newest, (lanes, rows - count))], axis=-1)
