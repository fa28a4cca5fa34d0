"""The layers of a model in one call, for the few rows of a step: Python takes as long between them as they do.

For models whose layers are Llama's: attention with rotary positions and a SwiGLU, each behind an RMSNorm and added to
what went in; biases on the projections of attention (Qwen2) and norms of its heads (Qwen3) are known too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import carray

from kv.cpu import kernels, pool
from kv.cpu.attending import STREAM, step_kernel, stream_table
from kv.cpu.kernels import BLOCK, Floats, at, exp, floats_at
from kv.cpu.layers import Linear, RMSNorm, RoPE, Together, angles

# mlx-lm's files whose layers these are. A model is tried out, too: see `kv.model.oncpu`.
_FAMILIES = {f"mlx_lm.models.{name}" for name in ("llama", "qwen2", "qwen3")}
_F32 = np.float32

# Words of a product in the table: addresses of weights, scales and biases; inputs; groups; blocks; the kernel.
_PRODUCT = 7
# Where in a layer's words they begin, and its other addresses, 0 for what it has not.
_QKV, _O, _UP, _DOWN = (_PRODUCT * n for n in range(4))
_NORM, _NORM_2, _BIAS, _Q_NORM, _K_NORM, _WORDS = (_PRODUCT * 4 + n for n in range(6))


class Stack:
    """The layers. Built by `of`.

    layers: mlx-lm's modules. Their arrays are read where they lie, so they must stay as they are.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        first = layers[0].self_attn
        self.key_heads = int(first.n_kv_heads)
        self.heads = int(first.n_heads)
        self.width = first.k_proj.outputs // self.key_heads
        self._rope: RoPE = first.rope
        self._scale = float(first.scale)
        self._eps = np.array([layers[0].input_layernorm.eps, layers[0].post_attention_layernorm.eps], dtype=np.float32)
        self._head_eps = float(first.q_norm.eps) if "q_norm" in first else 0.0
        self._hidden = layers[0].mlp.gate_proj.outputs
        # What the addresses are of.
        self._kept: list[Any] = []
        self._table = np.array([self._words(layer) for layer in layers], dtype=np.int64)

    @classmethod
    def of(cls, layers: Sequence[Any]) -> Stack | None:
        """The stack of these layers; None if there is something about them that is not known here."""
        return cls(layers) if all(_known(layer, layers[0]) for layer in layers) else None

    def run(
        self,
        x: Floats,
        positions: tuple[int, ...],
        held: Sequence[Sequence[tuple[Floats, Floats] | None]],
        before: Sequence[int],
        *,
        weighed: bool,
    ) -> tuple[Floats, Floats, Floats, list[list[Floats]]]:
        """Rows through all layers. Returns what comes out [N, D], keys and values to store [layers, N, H_kv, 1, W].

        x: [N, D], changed. positions: of each row. held: for each layer and row the keys and values of its stream,
        [H_kv, rows, W] each, or None; before: how many rows right before each one are of its own stream; see
        `kv.cpu.attending.attend_step`. weighed: whether what attention was paid is wanted, and returned too, for each
        layer and row: [H_kv, n, R]; else an empty list.
        """
        count, layers = len(x), len(self._table)
        streams = np.stack([stream_table(rows, before) for rows in held])
        keys, values = (np.empty((layers, count, self.key_heads, 1, self.width), dtype=_F32) for _ in range(2))
        # Layers may hold different numbers of rows.
        seen = streams[:, :, 2] + streams[:, :, 8] + 1
        weights = np.empty((layers if weighed else 1, self.heads * int(seen.sum(axis=1).max())), dtype=_F32)
        cos, sin = angles(positions, 1, self._rope.dims, self._rope.base, self._rope.scale)
        columns = BLOCK * int(self._table[:, [_QKV + 5, _O + 5, _UP + 5, _DOWN + 5]].max())
        shared = pool.shared()
        with shared.lock:
            _run(
                shared.words,
                step_kernel(self.heads // self.key_heads, self.width, self.width),
                self._table,
                streams,
                x,
                cos[:, 0],
                sin[:, 0],
                keys,
                values,
                weights,
                np.empty((4, count, columns), dtype=_F32),
                self.heads,
                self._hidden,
                self._scale,
                self._rope.traditional,
                self._eps,
                self._head_eps,
            )
        return (
            x,
            keys,
            values,
            [self._each(*layer) for layer in zip(weights, seen.tolist(), strict=True)] if weighed else [],
        )

    def _each(self, weights: Floats, seen: list[int]) -> list[Floats]:
        each, start = [], 0
        for rows in seen:
            end = start + self.heads * rows
            each.append(weights[start:end].reshape(self.key_heads, -1, rows))
            start = end
        return each

    def _words(self, layer: Any) -> list[int]:
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
        words = [word for linear in products for word in self._product(linear.together)]
        norms = [attention[name].weight if name in attention else None for name in ("q_norm", "k_norm")]
        biases = [attention[name].get("bias") for name in ("q_proj", "k_proj", "v_proj")]
        bias = None if biases[0] is None else np.concatenate([np.array(each) for each in biases])
        own = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight, bias, *norms)
        return words + [0 if array is None else self._address(np.array(array, dtype=_F32)) for array in own]

    def _product(self, together: Together) -> list[int]:
        table = together.table
        addresses = [self._address(array) for array in table.arrays]
        return [*addresses, table.inputs, table.q.shape[1], table.q.shape[0], kernels.few(*table.kind)]

    def _address(self, array: npt.NDArray[Any]) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)


def _known(layer: Any, first: Any) -> bool:
    if type(layer).__module__ not in _FAMILIES or getattr(layer, "use_sliding", False):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [mlp[name] for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(linear, Linear) for linear in linears):
        return False
    q, k, v, o, gate, up, down = linears
    # Each family's matrices that read the same rows lie one after the other, with nothing between them.
    for family in ((q, k, v), (o,), (gate, up), (down,)):
        if any(linear.together is not family[0].together for linear in family):
            return False
        if len(family[0].together.shown) != len(family) or any(linear.outputs % BLOCK for linear in family):
            return False
    if any("bias" in linear for linear in (o, gate, up, down)) or len({"bias" in linear for linear in (q, k, v)}) > 1:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    rope, other = attention.rope, first.self_attn.rope
    return (
        all(isinstance(norm, RMSNorm) for norm in norms)
        and len(norms) in (2, 4)
        and isinstance(rope, RoPE)
        and (rope.dims, rope.base, rope.scale, rope.traditional)
        == (other.dims, other.base, other.scale, other.traditional)
        and [norm.eps for norm in norms] == [norm.eps for norm in _norms_of(first)]
        and (attention.n_heads, attention.n_kv_heads, attention.scale)
        == (first.self_attn.n_heads, first.self_attn.n_kv_heads, first.self_attn.scale)
        and gate.outputs == first.mlp.gate_proj.outputs
    )


def _norms_of(layer: Any) -> list[Any]:
    own = [layer.input_layernorm, layer.post_attention_layernorm]
    return own + [layer.self_attn[name] for name in ("q_norm", "k_norm") if name in layer.self_attn]


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"}, error_model="numpy")
def _normed(x: Any, weight: Any, eps: float, out: Any, width: int) -> None:
    total = _F32(0)
    for k in range(width):
        total += x[k] * x[k]
    scale = _F32(1 / np.sqrt(total / _F32(width) + _F32(eps)))
    for k in range(width):
        out[k] = x[k] * scale * weight[k]


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _summed(x: Any, sums: Any, group: int, groups: int) -> None:
    for g in range(groups):
        total = _F32(0)
        for k in range(g * group, (g + 1) * group):
            total += x[k]
        sums[g] = total


@numba.njit(nogil=True, cache=True)
def _times(words: int, product: Any, x: int, sums: int, out: int, rows: int, columns: int) -> None:
    """A product: [rows, inputs] at x, to rows at out that lie `columns` apart. Rows of x lie side by side."""
    inputs, groups = product[3], product[4]
    for n in range(rows):
        _summed(
            carray(floats_at(x + n * inputs * 4), inputs), carray(floats_at(sums + n * groups * 4), groups),
            inputs // groups, groups,
        )  # fmt: skip
    given = np.empty(16, dtype=np.int64)
    given[0], given[1], given[2], given[3], given[4], given[5] = product[0], product[1], product[2], x, sums, out
    given[6], given[7], given[8], given[9] = rows, groups, columns, product[5]
    pool.run(words, product[6], at(given), product[5])


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _turned(x: Any, out: Any, cos: Any, sin: Any, width: int, traditional: bool, scale: float) -> None:
    """One head's rope, times `scale`."""
    half = len(cos)
    factor = _F32(scale)
    for k in range(half):
        first, second = (2 * k, 2 * k + 1) if traditional else (k, k + half)
        one, two = x[first], x[second]
        out[first] = (one * cos[k] - two * sin[k]) * factor
        out[second] = (one * sin[k] + two * cos[k]) * factor
    for k in range(2 * half, width):
        out[k] = x[k] * factor


@numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")
def _swiglu(gate: Any, up: Any, out: Any, width: int) -> None:
    for k in range(width):
        out[k] = gate[k] / (_F32(1) + exp(-gate[k])) * up[k]


@numba.njit(nogil=True, cache=True)
def _run(
    words: int,
    attend: int,
    table: Any,
    streams: Any,
    x: Floats,
    cos: Floats,
    sin: Floats,
    keys: Floats,
    values: Floats,
    weights: Floats,
    scratch: Floats,
    heads: int,
    hidden: int,
    scale: float,
    traditional: bool,
    eps: Floats,
    head_eps: float,
) -> None:
    """All layers. scratch: [4, N, columns], columns as many as the widest product has, or more."""
    count, size = x.shape
    key_heads, width = keys.shape[2], keys.shape[4]
    columns = scratch.shape[2]
    rows = scratch[0], scratch[1], scratch[2]
    first, second, third = at(rows[0]), at(rows[1]), at(rows[2])
    sums = at(scratch[3])
    queries = np.empty((count, heads, width), dtype=np.float32)
    given = np.empty(8 + count * STREAM, dtype=np.int64)
    head = np.empty(width, dtype=np.float32)
    for layer in range(len(table)):
        own = table[layer]
        norm, norm_2 = carray(floats_at(own[_NORM]), size), carray(floats_at(own[_NORM_2]), size)
        for n in range(count):
            _normed(x[n], norm, eps[0], carray(floats_at(first + n * size * 4), size), size)
        _times(words, own[_QKV : _QKV + _PRODUCT], first, sums, second, count, columns)
        for n in range(count):
            projected = rows[1][n]
            if own[_BIAS]:
                bias = carray(floats_at(own[_BIAS]), (heads + 2 * key_heads) * width)
                for k in range((heads + 2 * key_heads) * width):
                    projected[k] += bias[k]
            for h in range(heads + key_heads):
                start = projected[h * width : (h + 1) * width]
                normed = own[_Q_NORM] if h < heads else own[_K_NORM]
                if normed:
                    _normed(start, carray(floats_at(normed), width), head_eps, head, width)
                    start = head
                if h < heads:
                    _turned(start, queries[n, h], cos[n], sin[n], width, traditional, scale)
                else:
                    _turned(start, keys[layer, n, h - heads, 0], cos[n], sin[n], width, traditional, 1.0)
            for h in range(key_heads):
                at_value = (heads + key_heads + h) * width
                for k in range(width):
                    values[layer, n, h, 0, k] = projected[at_value + k]
        given[0], given[1], given[2] = at(queries), first, key_heads
        weights_at = at(weights[layer if len(weights) > 1 else 0])
        for n in range(count):
            stream = given[8 + n * STREAM :]
            for k in range(STREAM):
                stream[k] = streams[layer, n, k]
            stream[5], stream[6], stream[7] = at(keys[layer, n]), at(values[layer, n]), weights_at
            weights_at += heads * (stream[2] + stream[8] + 1) * 4
        pool.run(words, attend, at(given), count * key_heads)
        _times(words, own[_O : _O + _PRODUCT], first, sums, second, count, columns)
        for n in range(count):
            for k in range(size):
                x[n, k] += rows[1][n, k]
            _normed(x[n], norm_2, eps[1], carray(floats_at(first + n * size * 4), size), size)
        _times(words, own[_UP : _UP + _PRODUCT], first, sums, second, count, columns)
        for n in range(count):
            both = rows[1][n]
            _swiglu(both[:hidden], both[hidden : 2 * hidden], carray(floats_at(third + n * hidden * 4), hidden), hidden)
        _times(words, own[_DOWN : _DOWN + _PRODUCT], third, sums, second, count, columns)
        for n in range(count):
            for k in range(size):
                x[n, k] += rows[1][n, k]
