"""From a config and a model to caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache

from kv.attention import observed
from kv.attention.probe import Asked, probe
from kv.caches.cache import EvictingCache
from kv.caches.units import Evicted
from kv.config import KVCacheConfig


class KVCacheBuilder:
    """Builds the caches a config asks for, one a layer."""

    @staticmethod
    def for_model(model: Any, config: KVCacheConfig, *, on_evict: Callable[[Evicted], None] | None = None) -> list[Any]:
        """Fresh caches for one stream through an mlx-lm model.

        model: an mlx-lm model; `model.layers` gives the number of caches.
        on_evict: called with each unit that leaves.

        Raises ValueError if `config.head_dim` is not the model's, the method cannot be laid over its layers, or they
        are not all of full attention.
        """
        return _build(model, config, _check_model(model, config), on_evict)

    @staticmethod
    def factory(model: Any, config: KVCacheConfig) -> Callable[..., list[Any]]:
        """A `make_cache` that gives every request caches of its own: `model.make_cache = factory(model, config)`.

        A list shared by all requests would leak one stream's state into the next. Raises ValueError as `for_model`.
        """
        asked = _check_model(model, config)
        _build(model, config, asked, None)
        return lambda *_args, **_kwargs: _build(model, config, asked, None)


def _build(model: Any, config: KVCacheConfig, asked: Asked, on_evict: Callable[[Evicted], None] | None) -> list[Any]:
    if getattr(config.options, "score", None) == "observed":
        observed.install(model)
    caches = config.build(len(model.layers), on_evict)
    if asked.one_mask and any(isinstance(cache, EvictingCache) and cache.policy.uneven for cache in caches):
        raise ValueError(
            f"method {config.method!r}: its layers keep different numbers of rows, and {type(model).__module__} uses "
            "one mask array for all of them"
        )
    return caches


def _check_model(model: Any, config: KVCacheConfig) -> Asked:
    # What the model's class makes tells best which layers look back over everything; the object's may be ours already.
    make_cache = getattr(type(model), "make_cache", None)
    for index, cache in enumerate(make_cache(model) if make_cache else ()):
        if type(cache) is not KVCache:
            raise ValueError(
                f"layer {index} of {type(model).__module__} keeps a {type(cache).__name__}; "
                "only layers of full attention can be served"
            )
    asked = probe(model)
    for index, width in enumerate(asked.head_dims):
        if config.head_dim is not None and width != config.head_dim:
            raise ValueError(f"head_dim: {config.head_dim} given, but layer {index} of the model has {width}")
    return asked
