"""What a cache does, as plain values: the four axes on which eviction methods differ, and the numbers with them.

Granularity (what leaves as one), trigger (when), score (what decides) and budget (how much each layer keeps). A method
is a point in that space: its file turns its options into one `Policy` a layer, and everything else is shared.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kv.caches.scoring import SCORERS, AttentionMass, KeyNorm, ObservedAttention, Scorer

Scope = Literal["head", "layer", "model"]
Pool = Literal["mean", "max"]
Score = Literal["attn_mass", "key_norm", "observed"]
Trigger = Literal["over_budget", "prefill_end", "never"]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A method's place on the four axes, in words."""

    granularity: str
    trigger: str
    score: str
    budget: str


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one layer's cache does.

    budget: most tokens kept between forward passes. n_sink: first positions of the stream, never evicted.
    chunk_size: tokens in an eviction unit of undeclared text. Declared blocks are units of their own length.
    scorer, pool: what a token's score is, and how a unit's token scores become one: "mean" or "max".
    scope: who shares one decision: each "head", each "layer" (scores pooled over heads), or the "model".
    trigger: "over_budget" (as the stream goes), "prefill_end" (at the first single-token pass after a longer one)
        or "never".
    recent: newest tokens spared while others can leave, so that a token can earn a score before it is judged.
    stride: evictions happen at positions that are multiples of it, and make room for as many tokens. Decisions so do
        not depend on how the stream is sliced into passes, and a long pass scores `stride` tokens at once.
    merge: whether an evicted token's value is folded into the survivor it resembles most (CaM).
    uneven: whether other layers of the model keep another number of rows.
    """

    budget: int
    n_sink: int
    chunk_size: int
    scorer: Scorer
    pool: Pool
    scope: Scope
    trigger: Trigger
    recent: int
    stride: int
    merge: bool = False
    uneven: bool = False

    # When, by the rows kept and the position of the next token

    def must_evict(self, rows: int, position: int) -> bool:
        """Whether something has to leave before the next token comes."""
        if self.trigger != "over_budget":
            return False
        at_border = position % self.stride == 0
        return rows + (self.stride if at_border else 1) > self.budget

    def overflow(self, rows: int, position: int) -> int:
        """Tokens that have to leave for the stream to go on up to the next border."""
        return rows + self.stride - position % self.stride - self.budget

    def until_eviction(self, rows: int, position: int) -> int:
        """Tokens that can come before `must_evict` is to be asked again."""
        if self.trigger != "over_budget":
            return 2**62
        room, border = self.budget - rows, self.stride - position % self.stride
        strides = max(0, (room - border - self.stride) // self.stride + 1)
        return min(room, border + strides * self.stride)

    @property
    def is_roomy(self) -> bool:
        """Whether a stream of chunks alone can always make room without touching the newest `recent` tokens."""
        return self.n_sink + self.recent + self.stride + 2 * self.chunk_size - 2 <= self.budget

    def to_builtins(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {**asdict(self), "scorer": [type(self.scorer).__name__, asdict(self.scorer)]}  # type: ignore[call-overload]

    @classmethod
    def from_builtins(cls, values: dict[str, Any]) -> Policy:
        """The inverse. Raises KeyError or TypeError for what never was a policy."""
        name, fields = values["scorer"]
        return cls(**{**values, "scorer": SCORERS[name](**fields)})


# Queries of a pass that are looked at, if it is not said.
_OBSERVED = 32


def scorer(name: Score, decay: float, window: int | None) -> Scorer:
    """The scorer that an option names."""
    if name == "observed":
        return ObservedAttention(_OBSERVED if window is None else window, decay)
    return AttentionMass(decay, window) if name == "attn_mass" else KeyNorm()
