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
        self.table = Table(
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
            rows = np.array(x, dtype=np.float32, copy=None).reshape(-1, self.table.inputs)
            every = self.table.times(np.ascontiguousarray(rows))
            self._x, self._results = x, {i: every[:, a:b] for i, (a, b) in enumerate(self._spans)}
        result = self._results.pop(part)
        if not self._results:
            self._x = None
        return result

    def rows(self, index: Any) -> Floats:
        """The rows of the one matrix: [*index.shape, inputs]."""
        return self.table.rows(index)


class Linear(nn.Module):  # type: ignore[misc]
    """A quantised `nn.Linear`: matrix `part` of `together`. bias: [O], if there is one."""

    runs_quantised = True

    def __init__(self, together: Together, part: int, outputs: int, bias: mx.array | None = None) -> None:
        super().__init__()
        self.weight, self.scales, self.biases = together.shown[part]
        if bias is not None:
            self.bias = bias
        self.together, self._part, self.outputs = together, part, outputs
        self.freeze()

    def __call__(self, x: Any) -> Any:
        if wanted() == "shapes":
            return mx.zeros((*x.shape[:-1], self.outputs))
        out = self.together.part(self._part, x)
        if "bias" in self:
            out = out + np.array(self.bias, copy=False)
        out = out.reshape(*x.shape[:-1], self.outputs)
        return out if isinstance(x, np.ndarray) else mx.array(out)


class Embedding(nn.Module):  # type: ignore[misc]
    """A quantised `nn.Embedding`, which may be the head too."""

    runs_quantised = True

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.together = Together([table])
        self.weight, self.scales, self.biases = self.together.shown[0]
        self._shape = table.outputs, table.inputs
        self.numbers_flow = False
        self.freeze()

    def __call__(self, tokens: mx.array) -> Any:
        if wanted() == "shapes":
            return mx.zeros((*tokens.shape, self._shape[1]))
        rows = self.together.rows(np.array(tokens))
        return rows if self.numbers_flow else mx.array(rows)

    def as_linear(self, x: Any) -> mx.array:
        """Logits, of the tokens for which they are wanted."""
        if wanted() == "shapes":
            return mx.zeros((*x.shape[:-1], self._shape[0]))
        x = _asked_for(x)
        if not x.shape[1]:
            return mx.zeros((*x.shape[:-1], self._shape[0]))
        return mx.array(self.together.part(0, x)).reshape(*x.shape[:-1], -1)


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


class RMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """An `nn.RMSNorm` that takes NumPy arrays too."""

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return super().__call__(x)
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        return kernels.rms_norm(rows, np.array(self.weight, copy=False), self.eps).reshape(x.shape)


class RoPE(nn.RoPE):  # type: ignore[misc]
    """An `nn.RoPE` that takes NumPy arrays too."""

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        if not isinstance(x, np.ndarray):
            return super().__call__(x, offset=offset)
        # A stream's position each, or the first of all.
        first = tuple(np.array(offset).reshape(-1).tolist())
        cos, sin = angles(first, x.shape[2], self.dims, self.base, self.scale)
        return kernels.rotate(x, cos, sin, self.traditional)


@lru_cache(maxsize=4)
def angles(first: tuple[int, ...], count: int, dims: int, base: float, scale: float) -> tuple[Floats, Floats]:
    """Cosines and sines of rotations for `count` positions from each of `first` on: [len(first), count, dims / 2]."""
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
    named = {path: module for path, module in model.named_modules() if _is_for_kernels(module)}
    kinds: set[tuple[int, int, bool]] = set()
    done: dict[str, nn.Module] = {}
    for path, module in named.items():
        if path in done:
            continue
        paths = _siblings(path, named)
        # A few at a time: all of them would be held twice otherwise.
        tables = [_packed(each, named[each]) for each in paths]
        kinds |= {table.kind for table in tables}
        if isinstance(module, nn.QuantizedEmbedding):
            done[path] = Embedding(*tables)
            continue
        together = Together(tables)
        for part, each in enumerate(paths):
            bias = named[each].get("bias")
            bias = None if bias is None else bias.astype(mx.float32)
            done[each] = Linear(together, part, tables[part].outputs, bias)
    model.update_modules(tree_unflatten(list(done.items())))
    for kind in kinds:
        # Compiled, or read from where they are kept, here: never in the first turn.
        kernels.few(*kind)
        kernels.many(*kind)
    return bool(done)


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
            module.__class__ = RMSNorm
        elif type(module) is nn.RoPE:
            module.__class__ = RoPE
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


def _is_for_kernels(module: Any) -> bool:
    quantised = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    return quantised and module.mode == "affine" and module.bits in (4, 8) and module.group_size in (32, 64, 128)


def _packed(path: str, module: Any) -> Table:
    """A layer's matrix, packed; the layer has it no more."""
    # Numbers of 16 bits with the range of 32 are not NumPy's.
    kind = mx.float16 if module.scales.dtype == mx.float16 else mx.float32
    arrays = (module.weight, module.scales.astype(kind), module.biases.astype(kind))
    mx.eval(arrays)
    try:
        table = kernels.pack(
            *(np.array(array, copy=False) for array in arrays), bits=module.bits, group=module.group_size
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name in ("weight", "scales", "biases"):
        module[name] = mx.zeros((0,))
    mx.clear_cache()
    return table


def _siblings(path: str, named: Mapping[str, Any]) -> list[str]:
    """The layers that read the same rows and are of one kind, in order: at least the one of `path`."""
    parent, _, name = path.rpartition(".")
    for names in _SIBLINGS:
        paths = [f"{parent}.{each}" for each in names]
        if name in names and all(each in named for each in paths):
            layers = [named[each] for each in paths]
            if len({(m.bits, m.group_size, m.scales.shape[-1], m.scales.dtype) for m in layers}) == 1:
                return paths
    return [path]
