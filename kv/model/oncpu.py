"""A model on a CPU: quantised weights run from kernels as they are, everything else in float32, attention in NumPy.

MLX 0.32 multiplies quantised and half-precision matrices many times slower there than float32 ones, and those are eight
times as large as what the file holds.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from kv.attention import flow, observed
from kv.config import KVCacheConfig
from kv.cpu.passes import wanting

# Tokens to try a model on: a pass behind nothing, one behind that, and a step.
_TRIAL = (4, 2, 1)


def prepare(model: Any) -> Any:
    """The model, ready to run on the calling thread. model: as mlx-lm loads it; it is changed in place.

    Its kernels are compiled here, or read from the cache beside their file: never in the first turn.
    Raises ValueError, naming the layer, for weights that cannot be served.
    """
    packed = False
    if importlib.util.find_spec("numba") is not None:
        from kv.cpu import layers

        packed = layers.install(model)
    if any("scales" in module and not getattr(module, "runs_quantised", False) for _, module in model.named_modules()):
        from mlx_lm.utils import dequantize_model

        model = dequantize_model(model)
    _widen(model)
    with suppress(ValueError):
        observed.install(model)
    if packed:
        _let_numbers_flow(model)
        _give_back()
    return model


def _give_back() -> None:
    """Return to the system what packing and compiling have left: 70 MB of the embedded model's, where libc is GNU's."""
    gc.collect()
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _widen(model: Any) -> None:
    """Make everything float32 but the scales of what stays quantised, which its kernels read as they are."""
    for _, module in model.named_modules():
        if "scales" not in module:
            for name, array in module.items():
                if isinstance(array, mx.array) and array.dtype in (mx.float16, mx.bfloat16):
                    module[name] = array.astype(mx.float32)
    mx.eval(model.parameters())


def _let_numbers_flow(model: Any) -> None:
    """Have activations stay NumPy's from layer to layer, if the model comes to the same logits with them."""
    from kv.cpu import layers

    want = _tried(model)
    try:
        flow.install(model)
        if not layers.let_numbers_flow(model):
            return
        got = _tried(model)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        got = []
    if not _close(got, want):
        layers.stop_numbers(model)
        return
    try:
        if flow.install_stack(model) and not _close(_tried(model, streams=True), want):
            flow.remove_stack(model)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        # Of another build than mlx-lm's: layer by layer, then.
        return


def _close(got: list[Any], want: list[Any]) -> bool:
    return len(got) == len(want) and all(
        a.shape == b.shape and np.abs(a - b).max() <= 1e-3 * np.ptp(b) for a, b in zip(got, want, strict=True)
    )


def _tried(model: Any, *, streams: bool = False) -> list[Any]:
    """Logits of the last token of each of some passes, over mlx-lm's caches or this package's."""
    count = len(model.layers)
    caches: Any = KVCacheConfig(method="full").build(count) if streams else [KVCache() for _ in range(count)]
    # Every vocabulary has so many.
    tokens = np.random.default_rng(0).integers(0, 64, sum(_TRIAL))
    logits, at = [], 0
    with wanting("last"):
        for count in _TRIAL:
            passed = model(mx.array(tokens[at : at + count])[None], cache=caches)
            if not isinstance(passed, mx.array):
                raise TypeError(f"a model of {type(model).__module__} hands out no array of MLX")
            logits.append(np.array(passed[0, -1]))
            at += count
    return logits
