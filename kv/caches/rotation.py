"""Moving keys to other positions: stored keys are rotated, and the model's own rope rotates them on."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def moved(keys: mx.array, deltas: mx.array, rope: Any) -> mx.array:
    """Keys moved by so many positions, forwards or backwards: [B, H_kv, n, D].

    keys: [B, H_kv, n, D], rotated by `rope`. deltas: [n] int.
    """
    batch, heads, _, width = keys.shape
    # Tokens in the batch axis: rope takes one offset a batch row.
    rows = keys.transpose(2, 0, 1, 3).reshape(-1, batch * heads, 1, width)
    # Some ropes (YaRN) scale what they rotate; keys have been scaled once, and position 0 shows by how much.
    rows = rows / rope(mx.ones((1, 1, 1, width), dtype=keys.dtype), offset=0)
    return mx.contiguous(rope(rows, offset=deltas).reshape(-1, batch, heads, width).transpose(1, 2, 0, 3))
