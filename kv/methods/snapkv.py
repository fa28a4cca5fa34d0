"""SnapKV: once a prompt is read, what its last tokens attend to stays, and the rest leaves. Answers only grow it.

Source: Li et al., arXiv:2404.14469. Adapted: the last keys stand in for queries, and the mass is averaged over
neighbours where the paper takes the maximum. A prompt ends at the first single-token pass after a longer one, so a
prompt may come in slices, and a second turn is compressed with what the first left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv.caches.policy import Axes, Policy
from kv.caches.scoring import WindowAttention
from kv.methods.options import BudgetOptions, check_int


@dataclass(frozen=True, kw_only=True)
class SnapKVOptions(BudgetOptions):
    """Options of `method="snapkv"`, beside those of `BudgetOptions`.

    budget: most tokens kept once a prompt has been read; while it is read, and as an answer grows, there are more.
    window: last tokens of the prompt, whose keys are the queries, and which stay.
    kernel: tokens over which the mass is averaged; odd.
    """

    axes: ClassVar[Axes] = Axes(
        granularity="token",
        trigger="once, at the end of a prompt",
        score="attention from the last keys read",
        budget="uniform",
    )

    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride is not None:
            raise ValueError(f"stride: {self.stride} has no meaning for a method that evicts once, after a prompt")
        check_int("window", self.window, 1)
        check_int("kernel", self.kernel, 1)
        if self.window >= (room := self.budget - self.n_sink):
            raise ValueError(f"window: {self.window} leaves nothing to choose in budget - n_sink = {room}")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel: {self.kernel} is not odd")

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        # One more than the window: the token after the prompt has come when it is compressed.
        scorer = WindowAttention(self.window, self.kernel)
        return [self.policy(scorer, recent=self.window + 1, trigger="prefill_end")] * layers
