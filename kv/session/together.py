"""Several sessions decode together: their tokens in one forward pass. How: see `kv.model.streams`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kv.model.streams import layers_of
from kv.session.session import Session


def step_together(sessions: Sequence[Session], tokens: Sequence[int]) -> list[mx.array]:
    """Feed each session one token of its open answer; returns each one's next-token logits, [V], in their order.

    As `Session.step` for each of them, in one pass; see `run_together`.
    """
    if len(tokens) != len(sessions):
        raise ValueError(f"{len(tokens)} tokens for {len(sessions)} sessions")
    return [logits[0] for logits in run_together(sessions, [[token] for token in tokens])]


def run_together(sessions: Sequence[Session], runs: Sequence[Sequence[int]]) -> list[mx.array]:
    """Feed each session a token of its open answer and a draft of what follows it, in one pass.

    runs: for each session its next token, then the draft, which may be empty; see `Session.lookup`. Returns, in their
    order, the logits of what follows each token that was fed, [n, V]: those behind a token of the draft count only if
    the logits before it have led to it. Tokens to which they have not must be rejected, `Session.reject`, before
    anything else is done with the session.

    Books, rows and scores come out as by `Session.step`, one token after the other. Logits differ from those by
    rounding where a product of several rows is summed in another order; this package's kernels for the CPU sum alike.
    A model whose attention cannot be taken apart by stream (`LoadedModel.decodes_together`), and a session that is
    scored by observed attention, get no drafts fed; of such a model one session is stepped after another.

    On the CPU the pass is computed layer by layer, and each stream attends outside MLX (`kv.cpu`).

    Raises ValueError, before anything is changed, if there are not as many runs as sessions, a run is empty, a session
    comes twice, sessions run on different models, or one has no room. Whatever else is raised comes from within the
    pass: the open answer of every session is then to be rewound, as after a `Session.step` that has failed.
    """
    if len(runs) != len(sessions) or not all(runs):
        raise ValueError(f"{len(runs)} runs of {[len(run) for run in runs]} tokens for {len(sessions)} sessions")
    if len({id(session) for session in sessions}) != len(sessions):
        raise ValueError("a session comes twice; it can take one run a step")
    if len({id(session.model.model) for session in sessions}) > 1:
        raise ValueError("sessions of different models cannot share a forward pass")
    together = bool(sessions) and sessions[0].model.decodes_together
    fed = [
        list(run) if together and session.can_draft else [run[0]] for session, run in zip(sessions, runs, strict=True)
    ]
    for session, run in zip(sessions, fed, strict=True):
        session.check_room(len(run))
    if not together or sum(map(len, fed)) < 2:
        return [session.step(run[0])[None] for session, run in zip(sessions, fed, strict=True)]
    streams = [session.begin_run(run) for session, run in zip(sessions, fed, strict=True)]
    counts = [len(run) for run in fed]
    tokens = mx.array([token for run in fed for token in run])[:, None]
    logits = sessions[0].model.model(tokens, cache=layers_of(streams, counts, quick=True))[:, -1]
    rows = []
    for count in counts:
        rows.append(logits[:count])
        logits = logits[count:]
    # Keys and values are worked out on the way to the logits by MLX only; scores of observed attention never.
    mx.eval(rows, [cache.arrays for caches in streams for cache in caches])
    return rows
