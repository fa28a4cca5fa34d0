"""What options of eviction methods have in common, and their checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, get_args

from kv.caches.cache import EvictingCache
from kv.caches.group import CacheGroup
from kv.caches.literal import LiteralGroup
from kv.caches.policy import Axes, Policy, Pool, Scope, Score, Trigger, scorer
from kv.caches.scoring import Scorer
from kv.caches.units import Evicted


@dataclass(frozen=True, kw_only=True)
class Options(ABC):
    """A method's options. `axes` is its place on the four axes."""

    axes: ClassVar[Axes]

    @abstractmethod
    def build(
        self, method: str, layers: int, head_dim: int | None, on_evict: Callable[[Evicted], None] | None
    ) -> list[Any]:
        """One cache a layer. on_evict: called with each unit that leaves.

        Raises ValueError if the method cannot be laid over so many layers.
        """


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """Options of a method that is wholly described by a policy a layer."""

    @abstractmethod
    def policies(self, layers: int) -> list[Policy]:
        """What each of `layers` layers does. Raises ValueError if the method cannot be laid over so many."""

    def build(
        self, method: str, layers: int, head_dim: int | None, on_evict: Callable[[Evicted], None] | None
    ) -> list[Any]:
        """See `Options.build`."""
        caches: list[EvictingCache] = []
        for layer, policy in enumerate(self.policies(layers)):
            follows = layer if policy.scope == "model" else layer % self.together
            group = caches[-1].group if follows else CacheGroup(policy, on_evict=on_evict)
            caches.append(EvictingCache(method, policy, group, head_dim))
        return caches

    @property
    def together(self) -> int:
        """Layers that follow one decision where each layer, or head, decides for itself."""
        return 1


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(PolicyOptions):
    """Options of every method that keeps to a budget.

    budget: most tokens kept per layer between forward passes, sinks included.
    n_sink: first positions of the stream, never evicted.
    scope: who shares one decision: each "head", each "layer" (scores pooled over heads), or the "model".
    stride: evictions happen at positions that are multiples of it, and make room for as many tokens. 1 evicts as late
        as can be, one unit at a time; more costs less. None means an eighth of the budget, or what a small one leaves.
    """

    budget: int = 512
    n_sink: int = 4
    scope: Scope = "layer"
    stride: int | None = None

    def __post_init__(self) -> None:
        check_int("budget", self.budget, 1)
        check_int("n_sink", self.n_sink, 0)
        check_one_of("scope", self.scope, Scope)
        if self.n_sink >= self.budget:
            raise ValueError(f"n_sink: {self.n_sink} leaves no room in budget {self.budget}")
        if self.stride is not None:
            check_int("stride", self.stride, 1)
            check_stride(self.stride, self._room(self.budget, 0), f"budget - n_sink{self._units}")

    @property
    def unit(self) -> int:
        """Tokens that leave as one where nothing is declared."""
        return 1

    def _checked_recent(self, recent: int | None) -> int:
        """Newest tokens to spare: 16, or what budget and stride leave, if it is not said. Raises ValueError."""
        room = self.budget - self.n_sink - self.unit
        if recent is None:
            left = room if self.stride in (None, 1) else min(room, self._room(self.budget, self.stride or 0))
            return max(0, min(16, left))
        check_int("recent", recent, 0)
        if recent > room:
            what = " - chunk_size" if self.unit > 1 else " - 1"
            raise ValueError(f"recent: {recent} is larger than budget - n_sink{what} = {room}")
        if self.stride is not None:
            check_stride(self.stride, self._room(self.budget, recent), f"budget - n_sink - recent{self._units}")
        return recent

    @property
    def _units(self) -> str:
        return f" - {2 * self.unit - 2} for two broken chunks" if self.unit > 1 else ""

    def _room(self, budget: int, recent: int) -> int:
        """The largest stride for which there always is enough that may leave."""
        return budget - self.n_sink - recent - 2 * self.unit + 2

    def policy(
        self,
        scorer: Scorer,
        *,
        budget: int | None = None,
        recent: int = 0,
        pool: Pool = "mean",
        trigger: Trigger = "over_budget",
        merge: bool = False,
        uneven: bool = False,
    ) -> Policy:
        """One layer's policy. budget: if it is another than the options'."""
        budget = self.budget if budget is None else budget
        room = self._room(budget, recent)
        if self.stride is not None:
            whose = "budget" if budget == self.budget else f"a layer's budget of {budget}"
            check_stride(self.stride, room, f"{whose} - n_sink - recent{self._units}")
        stride = max(1, min(budget // 8, room)) if self.stride is None else self.stride
        return Policy(
            budget=budget,
            n_sink=self.n_sink,
            chunk_size=self.unit,
            scorer=scorer,
            pool=pool,
            scope=self.scope,
            trigger=trigger,
            recent=recent,
            stride=stride,
            merge=merge,
            uneven=uneven,
        )


@dataclass(frozen=True, kw_only=True)
class MassOptions(BudgetOptions):
    """Options of methods that collect a score per token.

    score: "attn_mass" (attention each token receives from later keys used as queries), "key_norm", or "observed"
        (attention that real queries pay; `KVCacheBuilder` hooks the model's attention, see `kv.attention.observed`).
    recent: newest tokens spared from eviction, so that a token can earn a score before it is judged.
        None means 16, or what a small budget leaves.
    decay: factor on the collected attention mass per new token, so that old tokens do not win by age. 1.0: none.
    window: with "observed", last queries of each pass that count; None means 32. With "attn_mass", last keys that count
        as queries, of all that came since scores were last worked out; None means all of them.
    """

    score: Score = "attn_mass"
    recent: int | None = None
    decay: float = 0.98
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("score", self.score, Score)
        if not isinstance(self.decay, int | float) or isinstance(self.decay, bool) or not 0 < self.decay <= 1:
            raise ValueError(f"decay: {self.decay!r} is not a number in (0, 1]")
        if self.window is not None:
            check_int("window", self.window, 1)
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("decay", "window") if self.score == "key_norm" else ():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}: {getattr(self, name)!r} has no meaning with score {self.score!r}")
        if self.score == "observed" and self.stride is not None:
            raise ValueError(
                f'stride: {self.stride} has no meaning with score "observed", which evicts after each pass'
            )
        object.__setattr__(self, "recent", self._checked_recent(self.recent))

    @property
    def scorer(self) -> Scorer:
        """What collects the score."""
        return scorer(self.score, self.decay, self.window)

    @property
    def recent_tokens(self) -> int:
        """`recent` once it is settled, in tokens."""
        assert self.recent is not None
        return self.recent


@dataclass(frozen=True, kw_only=True)
class LiteralOptions(MassOptions):
    """Options of the methods that the chunkkv source document spells out.

    literal: the document taken at its word instead, for comparison; see `kv.caches.literal`.
    """

    literal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("literal", self.literal)

    def build(
        self, method: str, layers: int, head_dim: int | None, on_evict: Callable[[Evicted], None] | None
    ) -> list[Any]:
        """One cache a layer. Raises ValueError for what has no meaning with `literal`."""
        if not self.literal:
            return super().build(method, layers, head_dim, on_evict)
        defaults = type(self)(budget=self.budget, n_sink=self.n_sink, **self._literal_fields())
        if self.score == "observed":
            raise ValueError(f'score: "observed" has no meaning with {method}_literal=True')
        for name in ("scope", "stride", "recent", "decay", "pool", "window"):
            if (value := getattr(self, name, None)) != getattr(defaults, name, None):
                raise ValueError(f"{name}: {value!r} has no meaning with {method}_literal=True")
        if on_evict is not None:
            raise ValueError(f"on_evict: {method}_literal=True does not follow what leaves")
        # Whole chunks and a broken one leave, so heads and layers come to differ.
        policy = replace(self.policies(1)[0], scope="head", uneven=self.unit > 1)
        return [EvictingCache(method, policy, LiteralGroup(policy, self.score), head_dim) for _ in range(layers)]

    def _literal_fields(self) -> dict[str, Any]:
        """Options that the document has beside budget and sinks."""
        return {}


def check_stride(stride: int, room: int, what: str) -> None:
    """Raise ValueError if evictions so far apart could not always make room. room: the largest that can, as `what`."""
    if stride > max(1, room):
        raise ValueError(f"stride: {stride} is larger than {what} = {room}")


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is not True or False")


def check_int(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: {value!r} is not a whole number of at least {least}")


def check_share(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number from 0 to 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{name}: {value!r} is not a number from 0 to 1")


def check_one_of(name: str, value: object, allowed: Any) -> None:
    """Raise ValueError unless `value` is one of a Literal's."""
    if not isinstance(value, str) or value not in get_args(allowed):
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(get_args(allowed))}")
