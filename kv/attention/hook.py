"""A hook on the attention function of a model's own module, by which caches take part in attention.

mlx-lm's model files import `scaled_dot_product_attention` by name, so it is replaced in each model's own module. What
is put there looks at the cache it is handed, acts for its own kind and passes every other one on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx

# Called with queries, keys, values, and cache=, scale=, mask=, …; returns [B, H_q, N, D].
Attention = Callable[..., mx.array]

_NAME = "scaled_dot_product_attention"


def install(
    model: Any,
    mark: str,
    wrap: Callable[[ModuleType, Attention], Attention],
    *,
    name: str = _NAME,
    optional: bool = False,
) -> None:
    """Put `wrap(module, its attention function)` in the place of the function, for `model` and all of its family.

    model: an mlx-lm model. mark: names the hook; where it is installed already, nothing changes. name: of the function,
    if it is another than attention. optional: leave modules that have none as they are.
    Raises ValueError, before anything is replaced, if a layer's attention is not mlx-lm's function.
    """
    modules = {}
    for index, layer in enumerate(model.layers):
        module = sys.modules[type(getattr(layer, "self_attn", layer)).__module__]
        if hasattr(module, name):
            modules[module.__name__] = module
        elif not optional:
            raise ValueError(f"needs mlx-lm's {name}, which layer {index} of {module.__name__} does not use")
    for module in modules.values():
        inner = getattr(module, name)
        if not hasattr(inner, mark):
            # `wraps` copies marks too: a hook that is hooked in turn is still known to be there.
            outer = wraps(inner)(wrap(module, inner))
            setattr(outer, mark, True)
            setattr(module, name, outer)


def attention_of(module: ModuleType) -> Attention:
    """What the module's layers attend with now, all hooks included."""
    attention: Attention = getattr(module, _NAME)
    return attention
