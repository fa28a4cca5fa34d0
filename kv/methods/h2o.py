"""H2O: the tokens that collected the least attention leave, one by one.

Source: Zhang et al., arXiv:2306.14048. Adapted: keys stand in for queries, collected attention decays, and the newest
tokens are spared (the paper keeps as many recent tokens as heavy hitters). ChunkKV with chunks of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.methods.options import LiteralOptions


@dataclass(frozen=True, kw_only=True)
class H2OOptions(LiteralOptions):
    """Options of `method="h2o"`: those of `LiteralOptions`, `MassOptions` and `BudgetOptions`."""

    axes: ClassVar[Axes] = Axes(
        granularity="token", trigger="over budget", score="cumulative attention mass", budget="uniform"
    )

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        return [self.policy(self.scorer, recent=self.recent_tokens)] * layers
