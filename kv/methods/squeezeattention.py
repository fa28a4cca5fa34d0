"""SqueezeAttention: H2O with budgets that are moved, once, from layers whose attention is concentrated to the others.

Source: Wang et al., arXiv:2404.04793. Adapted: the paper ranks layers by how little attention changes the hidden state,
which a cache cannot see; here a layer counts as concentrated by the share of the collected attention mass that its
best tenth of tokens holds. Layers are moved along a line instead of in three clusters, after the first pass that makes
the stream as long as the least budget there could be: until then, and within that pass, whose layers come one after the
other, all keep to the mean. So survivors depend on how that far a prompt was sliced. With `strength=0` this is H2O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kv.caches.cache import EvictingCache
from kv.caches.group import CacheGroup
from kv.caches.policy import Axes, Policy
from kv.caches.units import Evicted
from kv.methods.options import MassOptions, check_share, check_stride

_BEST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class SqueezeAttentionOptions(MassOptions):
    """Options of `method="squeezeattention"`, beside those of `MassOptions` and `BudgetOptions`.

    budget: mean over the layers. strength: 0 (uniform) to 1: by what share of the mean a budget may move.
    """

    axes: ClassVar[Axes] = Axes(
        granularity="token",
        trigger="over budget",
        score="cumulative attention mass",
        budget="by layer, from the prompt",
    )

    strength: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("strength", self.strength)
        if self.scope == "model":
            raise ValueError('scope: "model" is one decision for all layers, whose budgets differ here')
        least = self.n_sink + self.recent_tokens + 1
        if self.budget * (1 - self.strength) < least:
            raise ValueError(
                f"strength: {self.strength} could leave a layer {int(self.budget * (1 - self.strength))} of budget "
                f"{self.budget}; sinks, recent tokens and one more take {least}"
            )
        if self.stride is not None:
            room = self._room(int(self.budget * (1 - self.strength)), self.recent_tokens)
            check_stride(self.stride, room, "budget * (1 - strength) - n_sink - recent")

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer, until the prompt has been read."""
        return [self.with_budget(self.budget)] * layers

    def with_budget(self, budget: int) -> Policy:
        """The policy of a layer with that budget."""
        return self.policy(self.scorer, budget=budget, recent=self.recent_tokens, uneven=self.strength > 0)

    def build(
        self, method: str, layers: int, head_dim: int | None, on_evict: Callable[[Evicted], None] | None
    ) -> list[EvictingCache]:
        """Caches whose budgets are moved once the stream is so long that they matter."""
        caches = super().build(method, layers, head_dim, on_evict)
        if self.strength:
            groups = [cache.group for cache in caches]
            groups[-1].on_settled = _Squeeze(self, groups)
        return caches

    def budgets(self, concentration: np.ndarray) -> list[int]:
        """Each layer's budget, `budget` on average: the less concentrated its attention, the more."""
        distance = concentration.mean() - concentration
        widest = np.abs(distance).max()
        tilt = self.strength * distance / widest if widest > 0 else distance
        budgets = [int(value) for value in np.floor(self.budget * (1 + tilt))]
        # What rounding left goes to the neediest.
        for layer in np.argsort(-tilt, kind="stable")[: self.budget * len(budgets) - sum(budgets)]:
            budgets[int(layer)] += 1
        return budgets


class _Squeeze:
    """What moves the budgets of groups. An object, so that it is copied with them."""

    def __init__(self, options: SqueezeAttentionOptions, groups: list[CacheGroup]) -> None:
        self._options = options
        self._groups = groups

    def __call__(self) -> None:
        """Move the budgets, once, after the first pass that comes near the least budget there could be."""
        last, options = self._groups[-1], self._options
        if last.position < options.budget * (1 - options.strength):
            return
        last.on_settled = None
        concentration = np.array(mx.stack([_concentration(group.token_scores()[0]) for group in self._groups]))
        for group, budget in zip(self._groups, options.budgets(concentration), strict=True):
            group.set_policy(replace(options.with_budget(budget), scope=options.scope))


def _concentration(scores: mx.array) -> mx.array:
    """Share of the mass that the best tenth of tokens holds, mean over heads. scores: [B, H_kv, R]."""
    best = max(1, round(scores.shape[-1] * _BEST_SHARE))
    top = mx.topk(scores, best, axis=-1).sum(axis=-1)
    return (top / mx.maximum(scores.sum(axis=-1), 1e-9)).mean()
