"""Real attention for caches: a hook on the model's own attention function shows it the queries that a cache never sees.

mlx-lm's model files import `scaled_dot_product_attention` by name, so it is replaced in each model's own module. The
hook looks at the cache it is handed: one of ours whose scorer observes is shown the queries, every other one is left
alone, and attention itself is what it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx

from kv.batch import BatchEvictingCache
from kv.cache import EvictingCache

_NAME = "scaled_dot_product_attention"


def install(model: Any) -> None:
    """Let caches whose score is "observed" see the queries of `model`, and of all others of its family.

    model: an mlx-lm model. Installing twice changes nothing.
    Raises ValueError if a layer's attention is not mlx-lm's function, and so cannot be observed.
    """
    for index, layer in enumerate(model.layers):
        module = sys.modules[type(getattr(layer, "self_attn", layer)).__module__]
        attention = getattr(module, _NAME, None)
        if attention is None:
            raise ValueError(
                f'score: "observed" needs mlx-lm\'s {_NAME}, which layer {index} of {module.__name__} does not use'
            )
        if not getattr(attention, "shows_queries", False):
            _replace(module, attention)


def _replace(module: ModuleType, attention: Callable[..., mx.array]) -> None:
    @wraps(attention)
    def observed(queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, **options: Any) -> mx.array:
        output = attention(queries, keys, values, cache=cache, **options)
        if isinstance(cache, EvictingCache | BatchEvictingCache) and cache.observes:
            mask = options.get("mask")
            if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
                raise ValueError(f"{module.__name__} adds a bias to attention, which cannot be observed")
            cache.observe(queries, options["scale"])
        return output

    observed.shows_queries = True  # type: ignore[attr-defined]
    setattr(module, _NAME, observed)
