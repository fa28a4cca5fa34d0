"""How the next token is chosen from its logits: what OpenAI's and mlx-lm's samplers offer, on the host and seeded.

mlx-lm's own samplers draw from one global state: two answers at once would take from each other's sequence, and a seed
would mean nothing. Here each answer draws for itself. What is kept, and with what weight, is what mlx-lm keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_MOST_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What decides the next token, in the order in which it is applied.

    logit_bias: added to the logit of each token id, -100 to 100.
    repetition_penalty: logits of tokens that the answer has already are divided by it, or multiplied if negative
        (arXiv:1909.05858). 1: none.
    presence_penalty, frequency_penalty: taken off those tokens' logits once, and as often as they stand in the answer.
    temperature: 0 takes the likeliest token; else logits are divided by it, at last.
    top_p, min_p, top_k: of what the penalties leave, the likeliest tokens that have this share of the probability;
        those that have this share of the likeliest one's; so many. 1, 0 and 0 keep all.
    seed: of the draws; None: another each time.
    logprobs: how many alternatives to report with each token, 0 to 20; None reports nothing.

    Raises ValueError naming the field, its value and the limit.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0, 2)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not more than 0 and at most 1")
        _between("top_k", self.top_k, 0, 1_000_000)
        _between("min_p", self.min_p, 0, 1)
        # Below, logits that are divided by it are no numbers any more.
        _between("repetition_penalty", self.repetition_penalty, 0.01, 2)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        for token, bias in self.logit_bias.items():
            if token < 0:
                raise ValueError(f"logit_bias: {token} is not a token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias: {bias} for token {token} is not between -100 and 100")
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, _MOST_LOGPROBS)

    def but(self, given: Mapping[str, Any]) -> Sampling:
        """The same with other values. Raises ValueError as the constructor does."""
        return replace(self, **given)

    @classmethod
    def of_generation_config(cls, config: Mapping[str, Any]) -> Sampling:
        """What a model's own `generation_config.json` asks for; greedy if it does not ask for sampling."""
        names = {f.name for f in fields(cls)} - {"logit_bias", "seed", "logprobs"}
        given = {name: config[name] for name in names if isinstance(config.get(name), int | float)}
        if config.get("do_sample") is False or ("do_sample" not in config and "temperature" not in config):
            given = {name: value for name, value in given.items() if name.endswith("_penalty")}
        elif "temperature" not in given:
            given["temperature"] = 1.0
        return cls(**given)


@dataclass(frozen=True)
class Chosen:
    """A token, its log probability, and the likeliest ones with theirs, if they were asked for.

    Log probabilities are those after bias and penalties, before anything is left out or the temperature.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one answer, one after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(None if sampling.seed is None else sampling.seed % 2**64)
        self._counts: dict[int, int] = {}

    def choose(self, logits: mx.array) -> Chosen:
        """The next token, which counts as part of the answer. logits: [V]."""
        sampling = self.sampling
        row: Floats = np.array(logits.astype(mx.float32))
        self._adjust(row)
        logprobs: Floats | None = None
        if sampling.logprobs is not None:
            logprobs = log_softmax(row)
        token = int(row.argmax()) if sampling.temperature == 0 else self._draw(row if logprobs is None else logprobs)
        self._counts[token] = self._counts.get(token, 0) + 1
        if logprobs is None:
            return Chosen(token)
        return Chosen(token, float(logprobs[token]), _likeliest(logprobs, sampling.logprobs or 0))

    def _adjust(self, row: Floats) -> None:
        sampling = self.sampling
        for token, bias in sampling.logit_bias.items():
            row[token] += bias
        if not self._counts:
            return
        seen = np.fromiter(self._counts, dtype=np.int64)
        if sampling.repetition_penalty != 1:
            held = row[seen]
            row[seen] = np.where(held < 0, held * sampling.repetition_penalty, held / sampling.repetition_penalty)
        if sampling.presence_penalty:
            row[seen] -= sampling.presence_penalty
        if sampling.frequency_penalty:
            row[seen] -= sampling.frequency_penalty * np.fromiter(self._counts.values(), dtype=np.float32)

    def _draw(self, row: Floats) -> int:
        kept, logprobs = candidates(row, self.sampling)
        weights = np.exp((logprobs - logprobs.max()).astype(np.float64) / self.sampling.temperature)
        return int(kept[np.searchsorted(np.cumsum(weights), self._random.random() * weights.sum(), side="right")])


def candidates(row: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], Floats]:
    """The token ids that may be drawn, and their log probabilities. row: logits or log probabilities, [V]."""
    logprobs = log_softmax(row)
    kept = np.arange(len(row))
    if sampling.top_p < 1:
        order = np.argsort(-logprobs, kind="stable")
        mass = np.cumsum(np.exp(logprobs[order].astype(np.float64)))
        # The first that brings the mass to the share stays, and so do its equals.
        last = order[min(np.searchsorted(mass, sampling.top_p * mass[-1]), len(order) - 1)]
        kept = kept[logprobs >= logprobs[last]]
    if sampling.min_p > 0:
        kept = kept[logprobs[kept] >= logprobs.max() + np.log(sampling.min_p)]
    if 0 < sampling.top_k < len(kept):
        kept = kept[np.argpartition(-logprobs[kept], sampling.top_k - 1)[: sampling.top_k]]
    return kept, logprobs[kept]


def log_softmax(row: Floats) -> Floats:
    """Log probabilities of logits, [V]."""
    shifted = row - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum(dtype=np.float64)), dtype=np.float32)


def _likeliest(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    some = np.argpartition(-logprobs, count - 1)[:count]
    return tuple((int(token), float(logprobs[token])) for token in some[np.argsort(-logprobs[some], kind="stable")])


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: {value} is not between {least} and {most}")
