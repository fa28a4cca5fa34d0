"""The plan of a turn: what stays, what comes and how, what leaves and in which order. Plain values, no tensors.

Relevance leads: what retrieval asked for now stays longest, then the exchanges that the question refers back to, then
the last exchange, then the rest by the attention it has earned. A question and its answer leave and come back together,
so that the conversation stays well-formed.

Passages that a question does not ask for distract a small model from those it does (`tests.benchmarks.quality`). Where
they can come back without being read again they leave at once, not only when there is no room for them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from app.errors import Invalid

# Room kept for the answer when passages are chosen, as a share of the budget; more is made while it is written.
_ANSWER_SHARE = 8


@dataclass(frozen=True)
class Held:
    """A resident block.

    turn: its turn's number in the session, from 1. score: attention it has earned. stored: whether its K/V waits
    outside the cache as well.
    """

    id: str
    kind: str
    tokens: int
    turn: int
    passage_id: str | None = None
    score: float = 0.0
    stored: bool = False


@dataclass(frozen=True)
class Wanted:
    """A retrieved passage, best first in its list.

    tokens: as a whole message. block: its name if it comes. stored: whether its K/V waits outside the cache.
    """

    passage_id: str
    tokens: int
    block: str
    stored: bool = False


@dataclass(frozen=True)
class Referred:
    """An old exchange that the question refers back to. turn: its turn's number. blocks: both, by id.

    resident: whether it is in the cache; else its K/V waits outside.
    """

    turn: int
    blocks: tuple[str, ...]
    tokens: int
    resident: bool


@dataclass(frozen=True)
class Leaving:
    """Blocks that leave as one, and their place in the order, from 1. reason: why before the question is read."""

    blocks: tuple[str, ...]
    tokens: int
    rank: int
    reason: Literal["room_for_turn", "not_relevant"] = "room_for_turn"


@dataclass(frozen=True)
class Plan:
    """What a turn will do.

    resident, recall, stream, skipped: passage ids of the wanted, by what happens to them, in the order wanted:
        in the cache already, put into it without a forward pass, read by the model, or left out for want of room.
    exchanges: turns whose question and answer are put in again.
    evict: what leaves before anything is streamed. reserve: what leaves next, should the answer need more room.
    max_tokens: most tokens the answer may have.
    """

    max_tokens: int
    resident: list[str] = field(default_factory=list)
    recall: list[str] = field(default_factory=list)
    stream: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)
    evict: list[Leaving] = field(default_factory=list)
    reserve: list[Leaving] = field(default_factory=list)


class DoesNotFit(Invalid):
    """The pinned blocks of a turn do not fit the budget. `field` is the request's field to change."""


def plan_turn(
    held: Sequence[Held],
    wanted: Sequence[Wanted],
    *,
    budget: int,
    question_tokens: int,
    answer_overhead: int,
    max_tokens: int | None,
    default_max_tokens: int,
    referred: Sequence[Referred] = (),
    stands_alone: bool = False,
    at_most: bool = False,
) -> Plan:
    """Plan a turn.

    held: what is resident, the system prompt among it (kind "system", never evicted).
    question_tokens: the question as a whole message. answer_overhead: what the template writes around an answer.
    max_tokens: as asked for; None takes `default_max_tokens`, or what fits beside the passages. at_most: take what fits
    of it.
    referred: old exchanges that the question refers back to, best first; they come after passages.
    stands_alone: whether the question says by itself what it is about. Then, if any passage was found for it, others
    leave as long as they can come back for nothing; "and when was that?" may need them.

    Raises DoesNotFit, with the numbers, if system prompt, question and answer alone pass the budget.
    """
    system = sum(block.tokens for block in held if block.kind == "system")
    fixed = system + question_tokens + answer_overhead
    if max_tokens is not None and at_most:
        max_tokens = max(1, min(max_tokens, budget - fixed))
    most = _answer_tokens(budget, fixed, system, question_tokens, max_tokens, default_max_tokens)

    # Passages may take all that the answer does not need at least; what it needs beyond that is made as it is written.
    room = budget - fixed - min(most, max(1, budget // _ANSWER_SHARE))
    by_passage = {block.passage_id: block for block in held if block.passage_id}
    plan = Plan(max_tokens=most)
    for passage in wanted:
        if passage.tokens > room:
            plan.skipped.append(passage.passage_id)
            continue
        room -= passage.tokens
        if passage.passage_id in by_passage:
            plan.resident.append(passage.passage_id)
        else:
            (plan.recall if passage.stored else plan.stream).append(passage.passage_id)

    helping = []
    for exchange in referred:
        if exchange.tokens <= room:
            room -= exchange.tokens
            helping.append(exchange)
    plan.exchanges.extend(exchange.turn for exchange in helping if not exchange.resident)

    if max_tokens is None:
        # An answer of no stated length must not push out the passages it is drawn from.
        used = sum(p.tokens for p in wanted if p.passage_id not in plan.skipped) + sum(e.tokens for e in helping)
        plan = replace(plan, max_tokens=min(most, budget - fixed - used))

    kept = sum(block.tokens for block in held)
    coming = [
        *(
            ((passage.block,), passage.tokens)
            for passage in wanted
            if passage.passage_id in (*plan.recall, *plan.stream)
        ),
        *((exchange.blocks, exchange.tokens) for exchange in helping if not exchange.resident),
    ]
    # For the question, the template, and a token of the answer.
    missing = kept + sum(tokens for _, tokens in coming) + question_tokens + answer_overhead + 1 - budget
    asked = {passage.passage_id for passage in wanted}
    found = stands_alone and bool(plan.resident or plan.recall or plan.stream)
    distracting = {
        block.id for block in held if found and block.stored and block.passage_id and block.passage_id not in asked
    }
    for leaving in _order(held, plan.resident, [exchange.turn for exchange in helping], distracting):
        if leaving.reason == "not_relevant" or missing > 0:
            plan.evict.append(leaving)
            missing -= leaving.tokens
        else:
            plan.reserve.append(leaving)
    # What comes now may leave too, worst first, but last of all.
    ranks = len(plan.evict) + len(plan.reserve)
    plan.reserve.extend(
        Leaving(blocks, tokens, ranks + i) for i, (blocks, tokens) in enumerate(reversed(coming), start=1)
    )
    return plan


def _answer_tokens(budget: int, fixed: int, system: int, question: int, max_tokens: int | None, default: int) -> int:
    left = budget - fixed
    if left < 1:
        raise DoesNotFit(
            "content",
            f"{question} tokens with {system} of the system prompt and {fixed - system - question} of template "
            f"need {fixed + 1} to be answered at all; the session's budget is {budget} tokens",
        )
    if max_tokens is None:
        return min(default, left)
    if max_tokens > left:
        raise DoesNotFit(
            "max_tokens",
            f"{max_tokens} with {fixed} tokens of system prompt, question and template need {fixed + max_tokens}; "
            f"the session's budget is {budget} tokens, so at most {left}",
        )
    return max_tokens


def _order(
    held: Sequence[Held], wanted: Sequence[str], referred: Sequence[int], distracting: Set[str]
) -> list[Leaving]:
    """Everything resident that may leave, first to last.

    wanted: passages. referred: turns of exchanges. distracting: blocks that are not to stay.
    """
    last_turn = max((block.turn for block in held if block.passage_id is None), default=0)
    units: dict[str, list[Held]] = {}
    for block in held:
        if block.kind != "system":
            units.setdefault(block.id if block.passage_id else f"exchange {block.turn}", []).append(block)

    def key(unit: list[Held]) -> tuple[int, int, float, int]:
        first = unit[0]
        if first.passage_id in wanted:
            # The worse it was ranked, the earlier it leaves.
            return 3, -wanted.index(first.passage_id), 0.0, 0
        if first.passage_id is None and first.turn in referred:
            return 2, -referred.index(first.turn), 0.0, 0
        latest = first.passage_id is None and first.turn == last_turn
        place = -1 if first.id in distracting else int(latest)
        tokens = sum(block.tokens for block in unit)
        return place, 0, sum(block.score * block.tokens for block in unit) / tokens, first.turn

    ordered = sorted(units.values(), key=key)
    return [
        Leaving(
            tuple(block.id for block in unit),
            sum(block.tokens for block in unit),
            rank,
            "not_relevant" if unit[0].id in distracting else "room_for_turn",
        )
        for rank, unit in enumerate(ordered, start=1)
    ]
