"""What a turn says, in order: one typed stream, from the MLX thread to SSE, JSON and the command line."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from app.audit.records import Eviction, Recall
from ingest.records import Ranks

FinishReason = Literal["stop", "length", "repetition", "cancelled"]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A retrieved passage and what the turn does with it.

    state: "resident" (already in the cache), "recalled" (its K/V waited outside and is put in without a forward pass),
        "streamed" (read by the model now) or "skipped" (no room under the budget).
    score, ranks: retrieval's, see `ingest.records.StoredPassage`. tokens: as a whole message of the chat template.
    """

    passage_id: str
    document_id: str
    name: str
    heading: str
    kind: str
    text: str
    score: float
    ranks: Ranks | None = None
    tokens: int
    state: Literal["resident", "recalled", "streamed", "skipped"]


class Retrieval(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of the turn, best first. Sent before any token."""

    event: ClassVar[str] = "retrieval"
    turn_id: str
    sources: list[Source]


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of reading: `done` of `total` tokens, `restored` of which rebuild a session that was not in memory."""

    event: ClassVar[str] = "prefill"
    done: int
    total: int
    restored: int


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have come, and the logarithm of its probability."""

    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that came; see `kv.model.sampling.Chosen`. top: the likeliest, as many as were asked for."""

    token: str
    logprob: float
    top: list[Alternative]


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of the answer. The pieces join to the whole. logprobs: of its tokens, if they were asked for."""

    event: ClassVar[str] = "token"
    text: str
    logprobs: list[TokenLogprob] | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the turn.

    prompt_tokens: in the cache when the answer began, of which cached_tokens were there before or were recalled, and
    prefilled_tokens were read now. completion_tokens: of the answer's text. drafted_tokens: of it, those that were
    looked up in the cache and verified together, of which accepted_tokens were what the model chose.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, from the moment the request was accepted. first_token is None if there was none."""

    retrieval: float
    queued: float
    prefill: float
    first_token: float | None
    decode: float
    total: float


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The session's cache. peak_tokens: the most kept at any moment of this turn, forward passes included."""

    budget_tokens: int
    resident_tokens: int
    peak_tokens: int
    seen_tokens: int
    compression_ratio: float
    kv_bytes: int
    blocks: int
    evicted: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The turn is committed. finish_reason: "stop" (the model ended it, or a stop string did),
    "length" (max_tokens), "repetition" (it said nothing but the same again) or "cancelled".

    content: the answer. committed: False if a cancelled turn left nothing in the history.
    """

    event: ClassVar[str] = "done"
    turn_id: str
    finish_reason: FinishReason
    content: str
    committed: bool
    usage: Usage
    timings: Timings
    cache: CacheFigures


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The turn failed and was rolled back. `problem` is a problem detail."""

    event: ClassVar[str] = "error"
    problem: dict[str, Any]


Event = Retrieval | Prefill | Token | Eviction | Recall | Done | Failed
