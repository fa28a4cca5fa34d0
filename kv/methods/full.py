"""Full: nothing ever leaves. The ceiling that the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.caches.scoring import Age
from kv.methods.options import PolicyOptions


@dataclass(frozen=True, kw_only=True)
class FullOptions(PolicyOptions):
    """`method="full"` takes no options."""

    axes: ClassVar[Axes] = Axes(granularity="none", trigger="never", score="none", budget="unbounded")

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        policy = Policy(
            budget=2**62,
            n_sink=0,
            chunk_size=1,
            scorer=Age(),
            pool="mean",
            scope="layer",
            trigger="never",
            recent=0,
            stride=1,
        )
        return [policy] * layers
