"""The mask of caches that look back over everything they hold."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import create_attention_mask


def check_full_attention(window_size: int | None) -> None:
    """Raise ValueError for a sliding window: what it needs may have left."""
    if window_size is not None:
        raise ValueError(f"window_size: {window_size} is not supported; this cache serves full attention")


def full_attention_mask(count: int, rows: int, return_array: bool, window_size: int | None) -> Any:
    """The mask of a pass of `count` tokens behind `rows` stored ones: None, "causal", or [count, rows + count] bool.

    "causal" is aligned to the lower right, so that each layer aligns it to its own rows.
    Raises ValueError for a sliding window.
    """
    check_full_attention(window_size)
    return create_attention_mask(count, rows, return_array, None)
