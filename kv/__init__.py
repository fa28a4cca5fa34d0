"""Keepwhole's KV cache: whole-block eviction under a fixed token budget, for MLX.

Names are imported on first use, so that `kv.blas` can be imported, and a tuned BLAS loaded, before MLX is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv.builder import KVCacheBuilder as KVCacheBuilder
    from kv.cache import EvictingCache as EvictingCache
    from kv.config import KVCacheConfig as KVCacheConfig
    from kv.group import CacheGroup as CacheGroup
    from kv.model import LoadedModel as LoadedModel
    from kv.model import load_model as load_model
    from kv.session import Session as Session

_HOME = {
    "CacheGroup": "kv.group",
    "EvictingCache": "kv.cache",
    "KVCacheBuilder": "kv.builder",
    "KVCacheConfig": "kv.config",
    "LoadedModel": "kv.model",
    "Session": "kv.session",
    "load_model": "kv.model",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kv' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
