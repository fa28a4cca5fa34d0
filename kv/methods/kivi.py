"""KIVI: nothing leaves, but all except the newest tokens is stored in 2 bits: keys by channel, values by token.

Source: Liu et al., arXiv:2402.02750. Keys have outliers in fixed channels, so a channel's tokens share a scale; values
have none, so a token's channels do. Adapted: MLX's affine quantisation, and dequantised before attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx_lm.models.cache

from kv.caches.masks import full_attention_mask
from kv.caches.policy import Axes
from kv.caches.units import Evicted
from kv.methods.options import Options, check_int

_BITS = (2, 3, 4, 8)
_GROUPS = (32, 64, 128)

Packed = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True, kw_only=True)
class KIVIOptions(Options):
    """Options of `method="kivi"`.

    bits: 2, 3, 4 or 8. group_size: tokens (keys) or channels (values) that share a scale: 32, 64 or 128.
    residual: newest tokens kept in the model's dtype.
    """

    axes: ClassVar[Axes] = Axes(granularity="bits", trigger="every full group", score="none", budget="bits a token")

    bits: int = 2
    group_size: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        for name, value, allowed in (("bits", self.bits, _BITS), ("group_size", self.group_size, _GROUPS)):
            if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, allowed))}")
        check_int("residual", self.residual, 0)

    def build(
        self, method: str, layers: int, head_dim: int | None, on_evict: Callable[[Evicted], None] | None
    ) -> list[Any]:
        """One cache a layer. Raises ValueError if `head_dim` is no multiple of `group_size`."""
        if head_dim is not None and head_dim % self.group_size:
            raise ValueError(f"group_size: {self.group_size} does not divide head_dim {head_dim}")
        return [KIVICache(self, head_dim) for _ in range(layers)]


class KIVICache:
    """One layer's quantised cache, following mlx-lm's cache protocol."""

    method = "kivi"
    chunk_size = 1

    def __init__(self, options: KIVIOptions, head_dim: int | None = None) -> None:
        self.options = options
        self.head_dim = head_dim
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._packed_keys: Packed | None = None
        self._packed_values: Packed | None = None

    @property
    def tokens_seen(self) -> int:
        """Tokens of the stream so far."""
        return self.offset

    @property
    def tokens_kept(self) -> int:
        """The same: no token leaves."""
        return self.offset

    @property
    def layer_budget(self) -> int:
        """Unbounded."""
        return 2**62

    @property
    def nbytes(self) -> int:
        """Bytes held, scales and biases included."""
        if self.keys is None or self.values is None:
            return 0
        packed: int = sum(part.nbytes for part in (*(self._packed_keys or ()), *(self._packed_values or ())))
        return packed + self.keys.nbytes + self.values.nbytes

    @property
    def compression_ratio(self) -> float:
        """Bytes in the model's dtype / bytes held."""
        if self.keys is None or self.values is None:
            return 1.0
        batch, heads = self.keys.shape[:2]
        row = batch * heads * sum(array.shape[3] * array.dtype.size for array in (self.keys, self.values))
        return row * self.offset / self.nbytes

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store a pass and return every row to attend to: the pass itself exact, what was packed before dequantised.

        keys, values: [B, H_kv, N, D]. Raises ValueError if a width is no multiple of the group size.
        """
        for name, array in (("keys", keys), ("values", values)):
            if array.shape[3] % self.options.group_size:
                raise ValueError(
                    f"group_size: {self.options.group_size} does not divide the width {array.shape[3]} of {name}"
                )
        if self.head_dim is not None and keys.shape[3] != self.head_dim:
            raise ValueError(f"head_dim: keys are {keys.shape[3]} wide, the cache was built for {self.head_dim}")
        if keys.dtype != values.dtype:
            raise ValueError(f"keys are {keys.dtype}, values {values.dtype}")
        if self.keys is not None and self.keys.dtype != keys.dtype:
            raise ValueError(f"keys: dtype {keys.dtype} after {self.keys.dtype}")
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        all_keys, all_values = keys, values
        if self._packed_keys is not None and self._packed_values is not None:
            all_keys = mx.concatenate([self._unpack(self._packed_keys).swapaxes(-1, -2), keys], axis=2)
            all_values = mx.concatenate([self._unpack(self._packed_values), values], axis=2)
        self.offset = all_keys.shape[2]
        size = self.options.group_size
        packed = max(0, (keys.shape[2] - self.options.residual) // size * size)
        if packed:
            # Tokens are the last axis of packed keys, whose scales are their channels', and the third of values.
            self._packed_keys = self._joined(self._packed_keys, keys[..., :packed, :].swapaxes(-1, -2), axis=3)
            self._packed_values = self._joined(self._packed_values, values[..., :packed, :], axis=2)
        self.keys, self.values = mx.contiguous(keys[..., packed:, :]), mx.contiguous(values[..., packed:, :])
        return all_keys, all_values

    def _joined(self, held: Packed | None, rows: mx.array, axis: int) -> Packed:
        packed, scales, biases = mx.quantize(rows, group_size=self.options.group_size, bits=self.options.bits)
        if held is None:
            return packed, scales, biases
        first, second, third = (
            mx.concatenate([old, new], axis=axis) for old, new in zip(held, (packed, scales, biases), strict=True)
        )
        return first, second, third

    def _unpack(self, packed: Packed) -> mx.array:
        return mx.dequantize(*packed, group_size=self.options.group_size, bits=self.options.bits)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of a pass of N tokens. Raises ValueError for sliding windows."""
        return full_attention_mask(N, self.offset, return_array, window_size)

    @property
    def state(self) -> tuple[Any, ...]:
        """What mlx-lm evaluates and saves: keys, values, those packed, and the rest as JSON."""
        books = {**asdict(self.options), "head_dim": self.head_dim, "offset": self.offset}
        return self.keys, self.values, self._packed_keys, self._packed_values, json.dumps(books)

    @classmethod
    def from_state(cls, state: Any) -> KIVICache:
        """The cache that had that state. Raises ValueError if the state is not one of ours."""
        try:
            keys, values, packed_keys, packed_values, text = state
            books = json.loads(text)
            head_dim, offset = books.pop("head_dim"), books.pop("offset")
            cache = cls(KIVIOptions(**books), head_dim)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of a {cls.__name__} that can be loaded: {error!r}") from error
        cache.keys, cache.values, cache.offset = keys, values, offset
        cache._packed_keys, cache._packed_values = (
            None if packed is None else (packed[0], packed[1], packed[2]) for packed in (packed_keys, packed_values)
        )
        return cache

    def is_trimmable(self) -> bool:
        """False: packed groups cannot be cut."""
        return False

    def size(self) -> int:
        """Tokens stored now."""
        return self.offset

    def empty(self) -> bool:
        """True while nothing was stored."""
        return self.keys is None


vars(mlx_lm.models.cache).setdefault(KIVICache.__name__, KIVICache)
