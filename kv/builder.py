"""From a config and a model to caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache

from kv import observed
from kv.config import KVCacheConfig
from kv.group import Evicted


class KVCacheBuilder:
    """Builds the caches a config asks for, one a layer."""

    @staticmethod
    def for_model(model: Any, config: KVCacheConfig, *, on_evict: Callable[[Evicted], None] | None = None) -> list[Any]:
        """Fresh caches for one stream through an mlx-lm model.

        model: an mlx-lm model; `model.layers` gives the number of caches.
        on_evict: called with each unit that leaves.

        Raises ValueError if `config.head_dim` is not the model's, or a layer has no plain full attention.
        """
        _check_model(model, config)
        if getattr(config.options, "score", None) == "observed":
            observed.install(model)
        return config.options.build(config.method, len(model.layers), config.head_dim, on_evict)

    @staticmethod
    def factory(model: Any, config: KVCacheConfig) -> Callable[..., list[Any]]:
        """A `make_cache` that gives every request caches of its own: `model.make_cache = factory(model, config)`.

        A list shared by all requests would leak one stream's state into the next.
        """
        _check_model(model, config)
        return lambda *_args, **_kwargs: KVCacheBuilder.for_model(model, config)


def _check_model(model: Any, config: KVCacheConfig) -> None:
    # What the model's class makes tells best which layers look back over everything; the object's may be ours already.
    make_cache = getattr(type(model), "make_cache", None)
    for index, cache in enumerate(make_cache(model) if make_cache else ()):
        if type(cache) is not KVCache:
            raise ValueError(
                f"layer {index} of {type(model).__module__} keeps a {type(cache).__name__}; "
                "only layers of full attention can be served"
            )
    for index, layer in enumerate(model.layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise ValueError(f"layer {index} of {type(model).__module__} has no self_attn to cache")
        width = getattr(attention, "head_dim", None)
        if config.head_dim is not None and width is not None and width != config.head_dim:
            raise ValueError(f"head_dim: {config.head_dim} given, but layer {index} of the model has {width}")
