"""Several sessions decode together: one token each, in one forward pass. How: see `kv.model.streams`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kv.model.streams import layers_of
from kv.session.session import Session


def step_together(sessions: Sequence[Session], tokens: Sequence[int]) -> list[mx.array]:
    """Feed each session one token of its open answer; returns each one's next-token logits, [V], in their order.

    As `Session.step` for each of them, in one pass; books, rows and scores come out the same. Logits differ from
    those alone by rounding, since a product of several rows is summed in another order. A model whose attention
    cannot be taken apart by stream (`LoadedModel.decodes_together`) is stepped one session after another.

    On the CPU the pass is computed layer by layer, and each stream attends in NumPy (`kv.cpu.attention`).

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
    logits = sessions[0].model.model(mx.array(list(tokens))[:, None], cache=layers_of(streams, quick=True))
    rows = [logits[i, -1] for i in range(len(streams))]
    # Keys and values are worked out on the way to the logits by MLX only; scores of observed attention never.
    mx.eval(rows, [cache.arrays for caches in streams for cache in caches])
    return rows
