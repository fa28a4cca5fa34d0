"""L2Norm: the tokens with the largest keys leave; keys of small norm are those that attention goes to.

Source: Devoto et al., arXiv:2406.11430. Adapted: the newest tokens are spared, and layers are not skipped (the paper
leaves the first two alone).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.caches.scoring import KeyNorm
from kv.methods.options import BudgetOptions


@dataclass(frozen=True, kw_only=True)
class L2NormOptions(BudgetOptions):
    """Options of `method="l2norm"`, beside those of `BudgetOptions`.

    recent: newest tokens spared from eviction. None means 16, or what a small budget leaves.
    """

    axes: ClassVar[Axes] = Axes(granularity="token", trigger="over budget", score="low key norm", budget="uniform")

    recent: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "recent", self._checked_recent(self.recent))

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        assert self.recent is not None
        return [self.policy(KeyNorm(-1.0), recent=self.recent)] * layers
