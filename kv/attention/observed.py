"""Real attention for caches: a hook on the model's own attention function shows it the queries that a cache never sees.

The hook looks at the cache it is handed: one of ours whose scorer observes is shown the queries, every other one is
left alone. Attention itself is what it was; over our caches it is worked out in NumPy where that is faster.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

from kv.attention import hook
from kv.caches.batch import BatchEvictingCache
from kv.caches.cache import EvictingCache
from kv.cpu import attention as cpu_attention


def install(model: Any) -> None:
    """Let caches whose score is "observed" see the queries of `model`, and of all others of its family.

    On the CPU this also makes attention over this package's caches faster, whatever their score.

    model: an mlx-lm model. Installing twice changes nothing.
    Raises ValueError if a layer's attention is not mlx-lm's function, and so cannot be observed.
    """
    try:
        hook.install(model, "shows_queries", _showing_queries)
    except ValueError as error:
        raise ValueError(f'score: "observed" {error}') from error


def _showing_queries(module: ModuleType, attention: hook.Attention) -> hook.Attention:
    def observed(queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, **options: Any) -> mx.array:
        output = None
        if isinstance(cache, EvictingCache):
            output = cpu_attention.attend_instead(attention, queries, keys, values, options)
        if output is None:
            output = attention(queries, keys, values, cache=cache, **options)
        if isinstance(cache, EvictingCache | BatchEvictingCache) and cache.observes:
            mask = options.get("mask")
            if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
                raise ValueError(f"{module.__name__} adds a bias to attention, which cannot be observed")
            cache.observe(queries, options["scale"])
        return output

    return observed
