"""Several sessions decode together: one token each, in one forward pass.

Projections and MLPs run over all rows at once: the weights, most of what a step reads, are read once for all.
Attention runs stream by stream over the buffers that each stream's caches have anyway: nothing is padded, masked or
copied, and what is stored, scored and evicted is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from kv import cpu_attention, hook
from kv.cache import EvictingCache
from kv.config import KVCacheConfig
from kv.masks import check_full_attention

if TYPE_CHECKING:
    from kv.session import Session


def step_together(sessions: Sequence[Session], tokens: Sequence[int]) -> list[mx.array]:
    """Feed each session one token of its open answer; returns each one's next-token logits, [V], in their order.

    As `Session.step` for each of them, in one pass; books, rows and scores come out the same. Logits differ from
    those alone by rounding, since a product of several rows is summed in another order. A model whose attention
    cannot be taken apart by stream (`LoadedModel.decodes_together`) is stepped one session after another.

    On the CPU the pass is computed layer by layer, and each stream attends in NumPy (`kv.cpu_attention`).

    Raises ValueError, before anything is changed, if there are not as many tokens as sessions, a session comes twice,
    sessions run on different models, or one has no room. Whatever else is raised comes from within the pass: the
    open answer of every session is then to be rewound, as after a `Session.step` that has failed.
    """
    if len(tokens) != len(sessions):
        raise ValueError(f"{len(tokens)} tokens for {len(sessions)} sessions")
    if len({id(session) for session in sessions}) != len(sessions):
        raise ValueError("a session comes twice; it can take one token a step")
    if len({id(session.model.model) for session in sessions}) > 1:
        raise ValueError("sessions of different models cannot share a forward pass")
    for session in sessions:
        session.check_step()
    if len(sessions) < 2 or not sessions[0].model.decodes_together:
        return [session.step(token) for session, token in zip(sessions, tokens, strict=True)]
    streams = [session.begin_step() for session in sessions]
    logits = sessions[0].model.model(mx.array(list(tokens))[:, None], cache=_layers(streams, quick=True))
    rows = [logits[i, -1] for i in range(len(streams))]
    # Keys and values are worked out on the way to the logits; only what observed attention has scored is not.
    mx.eval(rows, [cache.scores for caches in streams for cache in caches])
    return rows


def can_share_a_pass(model: Any) -> bool:
    """Whether `model` attends with mlx-lm's function, over just what its caches return.

    model: an mlx-lm model. Found out by a pass that is laid out and never computed.
    """
    streams = [KVCacheConfig(method="full").build(len(model.layers)) for _ in range(2)]
    try:
        hook.install(model, "attends_by_stream", _by_stream)
        layers = _layers(streams, quick=False)
        model(mx.zeros((len(streams), 1), dtype=mx.int32), cache=layers)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return all(layer.attended for layer in layers)


class StreamsLayer:
    """One layer's caches of several streams, for a pass of one token each.

    caches: one a stream, in the order of the rows. offset: each stream's position, [B].
    quick: whether attention may be computed at once, on the CPU; else it is laid out as MLX does.
    """

    def __init__(self, caches: Sequence[EvictingCache], offset: mx.array, *, quick: bool) -> None:
        self.caches = caches
        self.offset = offset
        self._quick = quick
        self.attended = False
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take the new rows in, [B, H_kv, 1, D]; they are stored by `attend`, stream by stream."""
        self._new = keys, values
        return keys, values

    def attend(
        self,
        attention: hook.Attention,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | None,
        **options: Any,
    ) -> mx.array:
        """Store each stream's new row and let its query attend to all it holds: [B, H_q, 1, D].

        attention: the module's own. queries: [B, H_q, 1, D]. keys, values: what `update_and_fetch` has returned.
        Raises ValueError if they are not.
        """
        if self._new is None or keys is not self._new[0] or values is not self._new[1]:
            raise ValueError("the model attends to other keys and values than those it has cached")
        self.attended = True
        if self._quick and cpu_attention.serves(attention, keys.dtype, mask, options):
            return self._attend_on_cpu(queries, keys, values, scale)
        outputs = []
        for i, cache in enumerate(self.caches):
            row = slice(i, i + 1)
            held_keys, held_values = cache.update_and_fetch(keys[row], values[row])
            outputs.append(
                attention(queries[row], held_keys, held_values, cache=cache, scale=scale, mask=mask, **options)
            )
        return mx.concatenate(outputs)

    def _attend_on_cpu(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        for i, cache in enumerate(self.caches):
            cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])
        mx.eval(queries, [cache.buffers for cache in self.caches])
        asked = np.array(queries, copy=False)[:, :, 0]
        outputs = []
        for i, cache in enumerate(self.caches):
            # Views: they have to be gone when the next row comes, or storing it would copy the buffer.
            held_keys, held_values = (
                np.array(buffer, copy=False)[0, :, : cache.tokens_kept] for buffer in cache.buffers
            )
            output, weights = cpu_attention.attend(asked[i], held_keys, held_values, scale)
            outputs.append(output)
            if cache.observes:
                cache.observe_mass(mx.array(weights.mean(axis=1))[None])
        return mx.array(np.stack(outputs))[:, :, None]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """The mask of a pass of one token, which sees everything. Raises ValueError for sliding windows."""
        check_full_attention(window_size)
        return mx.ones((1, 1), dtype=mx.bool_) if return_array else None


def _layers(streams: Sequence[list[EvictingCache]], *, quick: bool) -> list[StreamsLayer]:
    offset = mx.array([caches[0].offset for caches in streams])
    return [StreamsLayer(caches, offset, quick=quick) for caches in zip(*streams, strict=True)]


def _by_stream(module: ModuleType, attention: hook.Attention) -> hook.Attention:
    def attend(queries: mx.array, keys: mx.array, values: mx.array, cache: Any = None, **options: Any) -> mx.array:
        if isinstance(cache, StreamsLayer):
            # Each stream's cache with all hooks that the module has, whichever came first: it may want to see queries.
            return cache.attend(hook.attention_of(module), queries, keys, values, **options)
        return attention(queries, keys, values, cache=cache, **options)

    return attend
