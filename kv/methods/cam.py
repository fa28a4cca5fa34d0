"""CaM: evicts what H2O evicts, but folds the value of what leaves into the survivor whose key resembles it most.

Source: Zhang et al., ICML 2024 (PMLR 235:58840). Adapted: one survivor takes the value, where the paper spreads it over
several; the paper's random merge mask is replaced by its expectation, the ratio of the two scores, so that nothing is
random. With `merge=False` it is H2O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.methods.options import MassOptions, check_bool


@dataclass(frozen=True, kw_only=True)
class CaMOptions(MassOptions):
    """Options of `method="cam"`, beside those of `MassOptions` and `BudgetOptions`. merge: False drops, as H2O."""

    axes: ClassVar[Axes] = Axes(
        granularity="token, merged",
        trigger="over budget",
        score="cumulative attention mass",
        budget="uniform",
    )

    merge: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("merge", self.merge)

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        return [self.policy(self.scorer, recent=self.recent_tokens, merge=self.merge)] * layers
