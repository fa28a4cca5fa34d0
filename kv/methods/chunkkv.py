"""ChunkKV: whole chunks, and whole declared blocks, are kept or evicted as one.

Source: Liu et al., arXiv:2502.00299, as adapted by the chunkkv source document: chunks are ranked by a pooled
per-token proxy, since a cache sees keys and values but not attention. Adapted further, and why:

- A chunk is a fixed span of positions, never re-partitioned over compacted rows and never cut to align heads.
- Collected attention decays and the newest tokens are spared, or the oldest tokens would win by age alone.
- Evictions happen at fixed positions, a stride apart, so that survivors do not depend on how a prefill was sliced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kv.caches.policy import Axes, Policy, Pool
from kv.methods.options import LiteralOptions, check_int, check_one_of


@dataclass(frozen=True, kw_only=True)
class ChunkKVOptions(LiteralOptions):
    """Options of `method="chunkkv"`; those not named here are `LiteralOptions`', `MassOptions`' and `BudgetOptions`'.

    chunk_size: tokens in an eviction unit of undeclared text. Declared blocks are units of their own length.
    pool: how a unit's token scores become one: "mean" or "max".
    layer_reuse: layers that keep what the first of them keeps, as in the paper's Algorithm 2; with scope "layer" only.
    """

    axes: ClassVar[Axes] = Axes(
        granularity="chunk, declared block",
        trigger="over budget",
        score="pooled attention mass or key norm",
        budget="uniform",
    )

    chunk_size: int = 8
    pool: Pool = "mean"
    layer_reuse: int = 1

    def __post_init__(self) -> None:
        check_int("chunk_size", self.chunk_size, 1)
        check_one_of("pool", self.pool, Pool)
        check_int("layer_reuse", self.layer_reuse, 1)
        if self.layer_reuse > 1 and (self.scope != "layer" or self.literal):
            raise ValueError(f'layer_reuse: {self.layer_reuse} needs scope="layer", and no literal preset')
        if isinstance(self.budget, int) and isinstance(self.n_sink, int) and self.n_sink < self.budget:
            room = self.budget - self.n_sink
            if self.chunk_size > room:
                raise ValueError(f"chunk_size: {self.chunk_size} is larger than budget - n_sink = {room}")
        super().__post_init__()

    @property
    def together(self) -> int:
        """Layers that follow one decision."""
        return self.layer_reuse

    @property
    def unit(self) -> int:
        """Tokens that leave as one where nothing is declared."""
        return self.chunk_size

    def policies(self, layers: int) -> list[Policy]:
        """The same for every layer."""
        return [self.policy(self.scorer, recent=self.recent_tokens, pool=self.pool)] * layers

    def _literal_fields(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size}
