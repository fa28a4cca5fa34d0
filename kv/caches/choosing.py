"""Which rows stay when something must leave: worked out on the device for chunks alone, on the host for blocks.

Both take the scores of the kept rows and decide the same; a property test holds them to one NumPy oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kv.caches.policy import Policy
from kv.caches.units import Unit, UnitTable


def on_device(policy: Policy, scores: mx.array, rows: int, position: int, wanted: int) -> mx.array:
    """The rows that stay, [lanes, n], of a stream of [sinks][whole chunks][the chunk that still grows].

    scores: [lanes, rows]. position: of the next token. wanted: tokens that must leave, in whole chunks.
    Needs `policy.is_roomy`. Nothing is read back from the device.
    """
    size, sinks = policy.chunk_size, policy.n_sink
    growing = (position - sinks) % size
    count = (rows - sinks - growing) // size
    leaving = -(-wanted // size)
    # The newest `recent` tokens have never left, so whole chunks that reach into them are the last ones.
    spared = -(-max(0, policy.recent - growing) // size)
    judged = count - spared
    chunks = scores[:, sinks : sinks + count * size].reshape(-1, count, size)
    pooled = chunks.mean(axis=-1) if policy.pool == "mean" else chunks.max(axis=-1)
    # Stable sorts: of equals the older leaves first.
    order = mx.argsort(pooled[:, :judged], axis=-1)
    lanes = order.shape[0]
    stay = mx.sort(order[:, leaving:], axis=-1)
    if size > 1:
        stay = (stay[..., None] * size + _range(0, size, 1)[0]).reshape(lanes, -1)
    newest = _range(sinks + judged * size, rows, lanes)
    return mx.concatenate([_range(0, sinks, lanes), sinks + stay, newest], axis=-1)


def on_host(
    policy: Policy,
    scores: NDArray[np.float32],
    tables: Sequence[UnitTable],
    wanted: int,
    report: Callable[[Unit, float, int], object],
) -> NDArray[np.int64] | None:
    """The rows that stay, [lanes, n]; None if nothing could leave. The units that leave are taken out of the tables.

    scores: [lanes, rows]. wanted: tokens that must leave, in whole units, if they can.
    report: called with each unit that leaves, its score and its lane.
    """
    kept = []
    for lane, table in enumerate(tables):
        judged = unit_scores(policy, table, scores[lane])
        alive = np.ones(table.rows, dtype=bool)
        spans = dict(zip((id(unit) for unit in table.units), table.row_spans(), strict=True))
        left = wanted
        while left > 0 and (number := table.pick(judged)) is not None:
            begin, end = spans[id(table.units[number])]
            alive[begin:end] = False
            left -= end - begin
            report(table.remove(number), judged.pop(number), lane)
        kept.append(np.flatnonzero(alive))
    if len(kept[0]) == scores.shape[-1]:
        return None
    return np.stack(kept)


def unit_scores(policy: Policy, table: UnitTable, scores: NDArray[np.float32]) -> list[float]:
    """The pooled score of each unit of a lane. scores: [rows]."""
    pool = np.mean if policy.pool == "mean" else np.max
    return [float(pool(scores[a:b])) if b > a else 0.0 for a, b in table.row_spans()]


@lru_cache(maxsize=256)
def _range(start: int, stop: int, lanes: int) -> mx.array:
    """[lanes, stop - start]: the numbers from `start` on. Asked for again and again, as caches hold steady."""
    numbers = mx.broadcast_to(mx.arange(start, stop), (lanes, stop - start))
    mx.eval(numbers)
    return numbers
