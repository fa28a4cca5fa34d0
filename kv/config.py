"""What a cache is asked to do: a method's name, and that method's own options under its prefix."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Score = Literal["attn_mass", "key_norm"]
Scope = Literal["head", "layer", "model"]
Pool = Literal["mean", "max"]


@dataclass(frozen=True, kw_only=True)
class ChunkKVOptions:
    """Options of `method="chunkkv"`, given to `KVCacheConfig` with the prefix `chunkkv_`.

    budget: most tokens kept per layer between forward passes, sinks included.
    chunk_size: tokens in an eviction unit of undeclared text. Declared blocks are units of their own length.
    n_sink: first positions of the stream, never evicted.
    score: "attn_mass" (attention each token receives from later keys used as queries) or "key_norm".
    scope: who shares one decision: each "head", each "layer" (scores pooled over heads), or the "model".
    pool: how a unit's token scores become one: "mean" or "max".
    recent: newest tokens protected from eviction, so that a token can earn a score before it is judged.
        None means 16, or what a small budget leaves.
    decay: factor on the collected attention mass per new token, so that old tokens do not win by age. 1.0: none.
    """

    budget: int = 512
    chunk_size: int = 8
    n_sink: int = 4
    score: Score = "attn_mass"
    scope: Scope = "layer"
    pool: Pool = "mean"
    recent: int | None = None
    decay: float = 0.98

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("chunk_size", 1), ("n_sink", 0)):
            _check_int(name, getattr(self, name), least)
        for name, allowed in (("score", Score), ("scope", Scope), ("pool", Pool)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(get_args(allowed))}")
        if not isinstance(self.decay, int | float) or not 0 < self.decay <= 1:
            raise ValueError(f"decay: {self.decay!r} is not a number in (0, 1]")
        if self.n_sink >= self.budget:
            raise ValueError(f"n_sink: {self.n_sink} leaves no room in budget {self.budget}")
        room = self.budget - self.n_sink
        if self.chunk_size > room:
            raise ValueError(f"chunk_size: {self.chunk_size} is larger than budget - n_sink = {room}")
        if self.recent is None:
            object.__setattr__(self, "recent", min(16, room - self.chunk_size))
        _check_int("recent", self.recent, 0)
        if self.recent_tokens > room - self.chunk_size:
            raise ValueError(
                f"recent: {self.recent} is larger than budget - n_sink - chunk_size = {room - self.chunk_size}"
            )

    @property
    def recent_tokens(self) -> int:
        """`recent` once it is settled, in tokens."""
        assert self.recent is not None
        return self.recent


METHODS: dict[str, type[ChunkKVOptions]] = {"chunkkv": ChunkKVOptions}


class KVCacheConfig:
    """A method and its options: `KVCacheConfig(method="chunkkv", head_dim=64, chunkkv_budget=512)`.

    method: a key of `METHODS`.
    head_dim: the model's head dimension; checked against the model when given.
    Every other keyword is an option of the method, under the method's prefix.

    Raises ValueError naming the option and its value.
    """

    def __init__(self, method: str = "chunkkv", *, head_dim: int | None = None, **options: Any) -> None:
        if method not in METHODS:
            raise ValueError(f"method: {method!r} is not one of {', '.join(METHODS)}")
        if head_dim is not None:
            _check_int("head_dim", head_dim, 1)
        struct, prefix = METHODS[method], f"{method}_"
        known = {prefix + field.name: field.name for field in fields(struct)}
        for name in options:
            if name not in known:
                raise ValueError(f"{name}: no option of method {method!r}; it takes {', '.join(known)}")
        self.method = method
        self.head_dim = head_dim
        try:
            self.options = struct(**{known[name]: value for name, value in options.items()})
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None

    def __repr__(self) -> str:
        return f"KVCacheConfig(method={self.method!r}, head_dim={self.head_dim}, options={self.options})"


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: {value!r} is not a whole number of at least {least}")
