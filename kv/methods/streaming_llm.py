"""StreamingLLM: the sinks and a window of the newest tokens stay, whatever they say.

Source: Xiao et al., arXiv:2309.17453. Adapted: positions stay true; the paper renumbers them inside the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.caches.scoring import Age
from kv.methods.options import BudgetOptions


@dataclass(frozen=True, kw_only=True)
class StreamingLLMOptions(BudgetOptions):
    """Options of `method="streaming_llm"`: those of `BudgetOptions`."""

    axes: ClassVar[Axes] = Axes(granularity="token", trigger="over budget", score="position", budget="uniform")

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        return [self.policy(Age())] * layers
