"""Feeding caches by hand, as a model would: layer by layer, one pass a slice."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.llama import Model, ModelArgs

from kv import KVCacheConfig


def tiny_llama(*, width: int, kv_heads: int = 2, layers: int = 3, words: int = 200, **options: Any) -> Any:
    """A small random Llama; the same weights every time for the same shape."""
    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=layers,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=width,
            rms_norm_eps=1e-5,
            vocab_size=words,
            **options,
        )
    )
    mx.eval(model.parameters())
    return model


def build(layers: int, method: str, **options: Any) -> list[Any]:
    """Caches of a method; its options without their prefix."""
    prefixed = {f"{method}_{name}": value for name, value in options.items()}
    return KVCacheConfig(method=method, **prefixed).build(layers)


def feed(caches: list[Any], keys: np.ndarray, values: np.ndarray, slices: list[int], *, after: Any = None) -> None:
    """keys, values: [layers, H, n, D]. after: called when each pass is done."""
    at = caches[0].offset
    for size in slices:
        for layer, cache in enumerate(caches):
            stored = cache.tokens_kept
            assert cache.offset == at
            fetched, _ = cache.update_and_fetch(
                mx.array(keys[layer, None, :, at : at + size]), mx.array(values[layer, None, :, at : at + size])
            )
            assert fetched.shape[2] == stored + size
        at += size
        mx.eval([cache.state for cache in caches])
        if after is not None:
            after()


def named_values(shape: tuple[int, ...]) -> np.ndarray:
    """Values that name their token: survivors are read from what a cache holds, not from its own books."""
    return np.broadcast_to(np.arange(shape[2], dtype=np.float32)[None, None, :, None], shape).copy()


def survivors(cache: Any) -> list[list[int]]:
    """The tokens each head holds, by their values."""
    return np.array(cache.values[0, :, : cache.tokens_kept, 0]).astype(int).tolist()
