"""What a cache is asked to do: a method's name, and that method's own options under its prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from kv.caches.units import Evicted
from kv.methods import METHODS
from kv.methods.options import check_int


class KVCacheConfig:
    """A method and its options: `KVCacheConfig(method="chunkkv", head_dim=64, chunkkv_budget=512)`.

    method: a key of `METHODS`.
    head_dim: the model's head dimension; checked against the model when given.
    Every other keyword is an option of the method, under the method's prefix.

    Raises ValueError naming the option and its value.
    """

    def __init__(self, method: str = "chunkkv", *, head_dim: int | None = None, **options: Any) -> None:
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method: {method!r} is not one of {', '.join(METHODS)}")
        if head_dim is not None:
            check_int("head_dim", head_dim, 1)
        struct, prefix = METHODS[method], f"{method}_"
        known = {prefix + field.name: field.name for field in fields(struct)}
        for name in options:
            if name not in known:
                raise ValueError(f"{name}: no option of method {method!r}; it takes {', '.join(known) or 'none'}")
        self.method = method
        self.head_dim = head_dim
        # NumPy's numbers are taken for the plain ones they stand for.
        given = {
            known[name]: value.item() if isinstance(value, np.generic) else value for name, value in options.items()
        }
        try:
            self.options = struct(**given)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None

    def build(self, layers: int, on_evict: Callable[[Evicted], None] | None = None) -> list[Any]:
        """One cache for each of `layers` layers. on_evict: called with each unit that leaves.

        Raises ValueError naming the option if the method cannot be laid over so many.
        """
        try:
            return self.options.build(self.method, layers, self.head_dim, on_evict)
        except ValueError as error:
            raise ValueError(f"{self.method}_{error}") from None

    def __repr__(self) -> str:
        return f"KVCacheConfig(method={self.method!r}, head_dim={self.head_dim}, options={self.options})"
