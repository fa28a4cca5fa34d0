"""Keepwhole's KV cache: whole-block eviction under a fixed token budget, for MLX.

Names are imported on first use, so that `kv.blas` can be imported, and a tuned BLAS loaded, before MLX is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kv.lazily import enter_mlx_lm

if TYPE_CHECKING:
    from kv.attention import observed as observed
    from kv.builder import KVCacheBuilder as KVCacheBuilder
    from kv.caches.cache import EvictingCache as EvictingCache
    from kv.caches.group import CacheGroup as CacheGroup
    from kv.config import KVCacheConfig as KVCacheConfig
    from kv.cpu import blas as blas
    from kv.model.loading import LoadedModel as LoadedModel
    from kv.model.loading import load_model as load_model
    from kv.session.session import NewBlock as NewBlock
    from kv.session.session import Session as Session
    from kv.session.together import run_together as run_together
    from kv.session.together import step_together as step_together

enter_mlx_lm()

_HOME = {
    "CacheGroup": "kv.caches.group",
    "EvictingCache": "kv.caches.cache",
    "KVCacheBuilder": "kv.builder",
    "KVCacheConfig": "kv.config",
    "LoadedModel": "kv.model.loading",
    "NewBlock": "kv.session.session",
    "Session": "kv.session.session",
    "load_model": "kv.model.loading",
    "run_together": "kv.session.together",
    "step_together": "kv.session.together",
}
_MODULES = {"blas": "kv.cpu.blas", "observed": "kv.attention.observed"}
__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'kv' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
