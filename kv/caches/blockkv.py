"""The K/V of one block outside any cache: what is lifted out of a stream, kept, and put into one again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from kv.caches.checked import check, check_about, checksum
from kv.caches.rotation import moved


@dataclass(frozen=True)
class BlockKV:
    """A block's keys and values in every layer.

    start: the position that its first key was rotated to. keys, values: a [1, H_kv, n, D] a layer.
    """

    start: int
    keys: list[mx.array]
    values: list[mx.array]

    @property
    def tokens(self) -> int:
        """Tokens of the block."""
        return int(self.keys[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def after(self, count: int) -> BlockKV | None:
        """The same without its first `count` tokens; None if that is all of them."""
        if count >= self.tokens:
            return None
        keys, values = ([array[..., count:, :] for array in arrays] for arrays in (self.keys, self.values))
        return BlockKV(self.start + count, keys, values)

    def save(self, path: Path, name: str) -> str:
        """Write a safetensors file that says whose K/V it is. Returns the file's checksum."""
        arrays = dict(tree_flatten({"keys": self.keys, "values": self.values}))
        about = {"name": name, "start": str(self.start), "layers": str(len(self.keys))}
        mx.save_safetensors(str(path), arrays, about)
        return checksum(path)

    @classmethod
    def load(cls, path: Path, name: str, expected: str) -> BlockKV:
        """Read what `save` wrote, checked whole before anything of it is used.

        Raises OSError if there is no such file, ValueError if it is not the one that was saved, or of another name.
        """
        check(path, expected)
        arrays: dict[str, mx.array]
        about: dict[str, str]
        arrays, about = mx.load(str(path), return_metadata=True)  # type: ignore[assignment]
        check_about(path, about, name=name)
        layers = range(int(about["layers"]))
        keys, values = ([arrays[f"{kind}.{layer}"] for layer in layers] for kind in ("keys", "values"))
        # Now, not when they are first used: the file may be gone by then.
        mx.eval(keys, values)
        return cls(int(about["start"]), keys, values)


def laid_out(
    blocks: Sequence[BlockKV], position: int, ropes: Sequence[nn.Module]
) -> Iterator[tuple[mx.array, mx.array]]:
    """Each layer's keys and values of blocks one after the other, [1, H_kv, n, D], rotated to `position` and on.

    ropes: one rope module a layer.
    """
    deltas: list[int] = []
    for kv in blocks:
        deltas += [position + len(deltas) - kv.start] * kv.tokens
    by_token = mx.array(deltas, dtype=mx.int32)
    for layer, rope in enumerate(ropes):
        keys = mx.concatenate([kv.keys[layer] for kv in blocks], axis=2)
        values = mx.concatenate([kv.values[layer] for kv in blocks], axis=2)
        yield moved(keys, by_token, rope), values
