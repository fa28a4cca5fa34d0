"""mlx-lm's layers on the CPU, outside MLX: NumPy arrays in, NumPy arrays out; for MLX's arrays they are what they were.

An embedding whose model can (`numbers_flow`) hands out NumPy arrays, which mlx-lm's own model code then adds, reshapes
and passes from layer to layer, so that nothing crosses to MLX and back between them: a crossing costs 20 to 50
microseconds, 200 of them as much as all products of a step. The head hands out MLX's array of logits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from kv.cpu import kernels
from kv.cpu.kernels import BLOCK, Floats, Table
from kv.cpu.passes import wanted


class Together:
    """Matrices that are multiplied by the same rows: one product, when the first of them is asked for.

    tables: the matrices, of one kind and as many inputs. Their memory is MLX's, so that it is held once.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        # Each begins with a block of its own.
        ends = np.cumsum([0, *(len(table.q) for table in tables)]).tolist()
        arrays = [mx.array(np.concatenate(parts)) for parts in zip(*(t.arrays for t in tables), strict=True)]
        mx.eval(arrays)
        first = tables[0]
        self._table = Table(
            *(np.array(array, copy=False) for array in arrays),
            bits=first.bits,
            group=first.group,
            outputs=ends[-1] * BLOCK,
        )
        self._spans = [(a * BLOCK, a * BLOCK + t.outputs) for a, t in zip(ends, tables, strict=False)]
        # Each matrix's packed weights, scales and biases.
        self.shown = [[array[a:b] for array in arrays] for a, b in pairwise(ends)]
        self._x: Any = None
        self._results: dict[int, Floats] = {}

    def part(self, part: int, x: Any) -> Floats:
        """x times the matrix `part`, [N, outputs]. x: [..., inputs], NumPy's or MLX's; known again by its identity."""
        if x is not self._x or part not in self._results:
            rows = np.array(x, dtype=np.float32, copy=None).reshape(-1, self._table.inputs)
            every = self._table.times(np.ascontiguousarray(rows))
            self._x, self._results = x, {i: every[:, a:b] for i, (a, b) in enumerate(self._spans)}
        result = self._results.pop(part)
        if not self._results:
            self._x = None
        return result

    def rows(self, index: Any) -> Floats:
        """The rows of the one matrix: [*index.shape, inputs]."""
        return self._table.rows(index)


class Linear(nn.Module):  # type: ignore[misc]
    """A quantised `nn.Linear`: matrix `part` of `together`. bias: [O], if there is one."""

    runs_quantised = True

    def __init__(self, together: Together, part: int, outputs: int, bias: mx.array | None = None) -> None:
        super().__init__()
        self.weight, self.scales, self.biases = together.shown[part]
        if bias is not None:
            self.bias = bias
        self._together, self._part, self._outputs = together, part, outputs
        self.freeze()

    def __call__(self, x: Any) -> Any:
        if wanted() == "shapes":
            return mx.zeros((*x.shape[:-1], self._outputs))
        out = self._together.part(self._part, x)
        if "bias" in self:
            out = out + np.array(self.bias, copy=False)
        out = out.reshape(*x.shape[:-1], self._outputs)
        return out if isinstance(x, np.ndarray) else mx.array(out)


class Embedding(nn.Module):  # type: ignore[misc]
    """A quantised `nn.Embedding`, which may be the head too."""

    runs_quantised = True

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._together = Together([table])
        self.weight, self.scales, self.biases = self._together.shown[0]
        self._shape = table.outputs, table.inputs
        self.numbers_flow = False
        self.freeze()

    def __call__(self, tokens: mx.array) -> Any:
        if wanted() == "shapes":
            return mx.zeros((*tokens.shape, self._shape[1]))
        rows = self._together.rows(np.array(tokens))
        return rows if self.numbers_flow else mx.array(rows)

    def as_linear(self, x: Any) -> mx.array:
        """Logits, of the tokens for which they are wanted."""
        if wanted() == "shapes":
            return mx.zeros((*x.shape[:-1], self._shape[0]))
        x = _asked_for(x)
        if not x.shape[1]:
            return mx.zeros((*x.shape[:-1], self._shape[0]))
        return mx.array(self._together.part(0, x)).reshape(*x.shape[:-1], -1)


def _asked_for(x: Any) -> Any:
    """Of [B, L, D] the tokens whose logits are wanted."""
    what = wanted()
    return x[:, -1:] if what == "last" else x[:, :0] if what == "none" else x


def _crossing(module: nn.Module) -> None:
    """Let a layer that is left to MLX take NumPy arrays, and hand them out in return."""
    kind: Any = type(module)

    class Crossing(kind):  # type: ignore[misc]
        def __call__(self, x: Any, *rest: Any, **options: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return kind.__call__(self, x, *rest, **options)
            return np.array(kind.__call__(self, mx.array(x), *rest, **options))

    _become(module, Crossing)


def _head(module: nn.Module) -> None:
    """Let a layer that makes logits take NumPy arrays, hand out MLX's, and make no more than is wanted."""
    kind: Any = type(module)

    class Head(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            x = _asked_for(x)
            return mx.array(kind.__call__(self, x if isinstance(module, Linear) else mx.array(x)))

    _become(module, Head)


def _become(module: nn.Module, kind: type) -> None:
    # Under the name of what it was: hooks look for the file of a model by it.
    kind.__module__, kind.__qualname__, kind.__name__ = (
        getattr(type(module), name) for name in ("__module__", "__qualname__", "__name__")
    )
    module.__class__ = kind


class _RMSNorm(nn.RMSNorm):  # type: ignore[misc]
    def __call__(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return super().__call__(x)
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        return kernels.rms_norm(rows, np.array(self.weight, copy=False), self.eps).reshape(x.shape)


class _RoPE(nn.RoPE):  # type: ignore[misc]
    def __call__(self, x: Any, offset: Any = 0) -> Any:
        if not isinstance(x, np.ndarray):
            return super().__call__(x, offset=offset)
        # A stream's position each, or the first of all.
        first = tuple(np.array(offset).reshape(-1).tolist())
        cos, sin = _angles(first, x.shape[2], self.dims, self.base, self.scale)
        return kernels.rotate(x, cos, sin, self.traditional)


@lru_cache(maxsize=4)
def _angles(first: tuple[int, ...], count: int, dims: int, base: float, scale: float) -> tuple[Floats, Floats]:
    positions = np.array(first, dtype=np.float64)[:, None] + np.arange(count)
    angles = (positions * scale)[..., None] * base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# Layers that read the same rows, by their names.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def install(model: Any) -> bool:
    """Put these layers into a quantised mlx-lm model, in place; whether there was one that they are for.

    What has no kernel is dequantised to float32 first, which is what MLX is fast at; layers of other kinds stay MLX's.
    Raises ValueError, naming the layer, for scales that are not finite, and for a mode that MLX cannot dequantise.
    """
    named = dict(model.named_modules())
    tables: dict[str, Table] = {}
    for path, module in named.items():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding) and _has_kernel(module):
            tables[path] = _packed(path, module)
            # Held twice until here.
            for name in ("weight", "scales", "biases"):
                module[name] = mx.zeros((0,))
            mx.clear_cache()
    if not tables:
        return False
    done: dict[str, nn.Module] = {}
    for path, table in tables.items():
        if path in done:
            continue
        if isinstance(named[path], nn.QuantizedEmbedding):
            done[path] = Embedding(table)
            continue
        paths = _siblings(path, tables)
        together = Together([tables[each] for each in paths])
        for part, each in enumerate(paths):
            bias = named[each].get("bias")
            bias = None if bias is None else bias.astype(mx.float32)
            done[each] = Linear(together, part, tables[each].outputs, bias)
    model.update_modules(tree_unflatten(list(done.items())))
    for kind in {table.kind for table in tables.values()}:
        # Compiled, or read from where they are kept, here: never in the first turn.
        kernels.few(*kind)
        kernels.many(*kind)
    return True


def let_numbers_flow(model: Any) -> bool:
    """Have NumPy arrays go through a model of these layers; whether its embedding is one that can hand them out.

    Whether what mlx-lm does between its layers allows it, only a pass can tell.
    """
    embeddings = [module for _, module in model.named_modules() if isinstance(module, Embedding)]
    if len(embeddings) != 1:
        return False
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "lm_head":
            _head(module)
        elif type(module) is nn.RMSNorm:
            module.__class__ = _RMSNorm
        elif type(module) is nn.RoPE:
            module.__class__ = _RoPE
        elif not isinstance(module, Linear) and isinstance(module, _LEFT_TO_MLX):
            _crossing(module)
    embeddings[0].numbers_flow = True
    return True


def stop_numbers(model: Any) -> None:
    """Have MLX's arrays go through the model after all."""
    for _, module in model.named_modules():
        if isinstance(module, Embedding):
            module.numbers_flow = False


_LEFT_TO_MLX = (nn.Linear, nn.LayerNorm, Llama3RoPE, SuScaledRoPE, YarnRoPE)


def _has_kernel(module: Any) -> bool:
    return module.mode == "affine" and module.bits in (4, 8) and module.group_size in (32, 64, 128)


def _packed(path: str, module: Any) -> Table:
    # Numbers of 16 bits with the range of 32 are not NumPy's.
    kind = mx.float16 if module.scales.dtype == mx.float16 else mx.float32
    arrays = (module.weight, module.scales.astype(kind), module.biases.astype(kind))
    mx.eval(arrays)
    try:
        return kernels.pack(
            *(np.array(array, copy=False) for array in arrays), bits=module.bits, group=module.group_size
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _siblings(path: str, tables: Mapping[str, Table]) -> list[str]:
    """The layers that read the same rows and are of one kind, in order: at least the one of `path`."""
    parent, _, name = path.rpartition(".")
    for names in _SIBLINGS:
        paths = [f"{parent}.{each}" for each in names]
        if name in names and all(each in tables for each in paths):
            kinds = {(t.bits, t.group, t.inputs, t.scales.dtype) for t in (tables[each] for each in paths)}
            if len(kinds) == 1:
                return paths
    return [path]
