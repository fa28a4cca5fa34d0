"""PyramidKV: H2O with budgets that fall from the first layer to the last, in the same total.

Source: Cai et al., arXiv:2406.02069. Adapted: decisions as the stream goes, where the paper compresses a prompt once.
A flat pyramid (`slope=0`) is H2O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.methods.options import MassOptions, check_share


@dataclass(frozen=True, kw_only=True)
class PyramidKVOptions(MassOptions):
    """Options of `method="pyramidkv"`, beside those of `MassOptions` and `BudgetOptions`.

    budget: mean over the layers. slope: 0 (flat) to 1: by what share of the mean the first layer is above it and the
        last below.
    """

    axes: ClassVar[Axes] = Axes(
        granularity="token",
        trigger="over budget",
        score="cumulative attention mass",
        budget="falls with depth, fixed",
    )

    slope: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("slope", self.slope)
        if self.scope == "model":
            raise ValueError('scope: "model" is one decision for all layers, whose budgets differ here')

    def policies(self, layers: int) -> list[Policy]:
        """Budgets that fall linearly with depth and have `budget` as their mean."""
        return [
            self.policy(self.scorer, budget=budget, recent=self.recent_tokens, uneven=self.slope > 0)
            for budget in self.budgets(layers)
        ]

    def budgets(self, layers: int) -> list[int]:
        """Each layer's budget. Raises ValueError if the last one's leaves no room."""
        half = (layers - 1) / 2
        tilt = [self.slope * (half - layer) / half if half else 0.0 for layer in range(layers)]
        budgets = [round(self.budget * (1 + share)) for share in tilt]
        # Rounding must not change the total.
        budgets[0] += self.budget * layers - sum(budgets)
        least = self.n_sink + self.recent_tokens + 1
        if min(budgets) < least:
            raise ValueError(
                f"slope: {self.slope} leaves the last layer {min(budgets)} of budget {self.budget}; sinks, recent "
                f"tokens and one more take {least}"
            )
        return budgets
