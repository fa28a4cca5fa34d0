"""TOVA: the token that the newest one attends to least leaves. It has no memory: only the current step counts.

Source: Oren et al., arXiv:2401.06104. Adapted: the newest key stands in for its query, and it is always kept itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.caches.scoring import CurrentAttention
from kv.methods.options import BudgetOptions


@dataclass(frozen=True, kw_only=True)
class TOVAOptions(BudgetOptions):
    """Options of `method="tova"`: those of `BudgetOptions`."""

    axes: ClassVar[Axes] = Axes(
        granularity="token", trigger="over budget", score="current attention weight", budget="uniform"
    )

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        return [self.policy(CurrentAttention(), recent=min(1, self.budget - self.n_sink - 1))] * layers
