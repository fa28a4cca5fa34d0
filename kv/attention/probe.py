"""What a model asks of its caches: found out by a forward pass that is laid out and never computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kv.caches.masks import check_full_attention, full_attention_mask
from kv.cpu.passes import wanting


@dataclass(frozen=True)
class Asked:
    """head_dims: width of each layer's keys. one_mask: whether one mask array serves all layers."""

    head_dims: list[int]
    one_mask: bool


def probe(model: Any) -> Asked:
    """Ask an mlx-lm model. Raises ValueError if it cannot be served by one full-attention cache a layer."""
    caches = [_Probe() for _ in model.layers]
    name = type(model).__module__
    try:
        with wanting("shapes"):
            model(mx.zeros((1, 2), dtype=mx.int32), cache=caches)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} does not run on one full-attention cache a layer: {error}") from error
    for index, cache in enumerate(caches):
        if len(cache.widths) != 1:
            raise ValueError(
                f"layer {index} of {name} stores keys and values {len(cache.widths)} times in a pass, not once"
            )
    return Asked([cache.widths[0] for cache in caches], any(cache.gave_array for cache in caches))


class _Probe:
    """A cache that notes what is asked of it."""

    offset = 0

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.gave_array = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.widths.append(keys.shape[-1])
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        check_full_attention(window_size)
        self.gave_array |= return_array
        return full_attention_mask(N, 0, return_array, window_size)
