"""Token scores from what a cache can see: keys used as queries, and key norms. Small functions on tensors."""

from __future__ import annotations

import mlx.core as mx

# Queries scored at once; bounds the [B, H_kv, queries, rows] weights a long pass would otherwise hold.
_QUERY_SLICE = 256


def key_norms(keys: mx.array) -> mx.array:
    """L2 norm of each key, in float32. keys: [B, H_kv, n, D] -> [B, H_kv, n]."""
    return mx.linalg.norm(keys.astype(mx.float32), axis=-1)


def add_attention_mass(
    scores: mx.array, keys: mx.array, first: int, count: int, decay: float, alive: mx.array | None
) -> mx.array:
    """Let `count` new tokens, as queries, add their attention over the rows before them to those rows' scores.

    Token by token this is `scores = scores * decay + softmax(K_before . k / sqrt(D))`, computed for all of them
    at once, so it does not depend on how a stream was sliced. Source: H2O (arXiv:2306.14048) with keys as
    queries, as the chunkkv source document uses it; the decay is ours.

    scores: [B, H_kv, R] float32, R rows in all. keys: [B, H_kv, >=R, D].
    first: row of the first new token. alive: bool, broadcast to [B, H_kv, 1, R]; rows evicted in this pass are False.
    Returns the new scores, [B, H_kv, R].
    """
    rows = scores.shape[-1]
    for start in range(first, first + count, _QUERY_SLICE):
        stop = min(start + _QUERY_SLICE, first + count)
        queries = keys[..., start:stop, :].astype(mx.float32) * keys.shape[-1] ** -0.5
        seen = keys[..., :stop, :].astype(mx.float32)
        mask = mx.arange(start, stop)[:, None] > mx.arange(stop)[None, :]
        if alive is not None:
            mask = mask & alive[..., :stop]
        logits = mx.where(mask, queries @ seen.swapaxes(-1, -2), mx.finfo(mx.float32).min)
        # The first token of a stream sees no row: the product with the mask makes its softmax zero, not uniform.
        weights = mx.softmax(logits, axis=-1) * mask
        if decay != 1.0:
            weights = weights * (decay ** mx.arange(stop - start - 1, -1, -1))[:, None]
        mass = mx.pad(weights.sum(axis=-2), [(0, 0), (0, 0), (0, rows - stop)])
        scores = scores * decay ** (stop - start) + mass
    return scores
