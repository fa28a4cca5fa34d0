from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.turns.plan import DoesNotFit, Held, Plan, Referred, Wanted, plan_turn

SYSTEM = Held("sys", "system", 10, 0)


def passage(name: str, tokens: int, turn: int = 1, score: float = 0.0, stored: bool = False) -> Held:
    return Held(f"b.{name}", "prose", tokens, turn, name, score, stored)


def exchange(turn: int, question: int = 5, answer: int = 15, score: float = 0.0, stored: bool = False) -> list[Held]:
    return [
        Held(f"q{turn}", "question", question, turn, score=score, stored=stored),
        Held(f"a{turn}", "answer", answer, turn, score=score, stored=stored),
    ]


def want(*passages: tuple[str, int]) -> list[Wanted]:
    return [Wanted(name, tokens, f"new.{name}") for name, tokens in passages]


def plan(held: list[Held], wanted: list[Wanted] = (), **numbers: Any) -> Plan:  # type: ignore[assignment]
    given = {
        "budget": 200,
        "question_tokens": 10,
        "answer_overhead": 6,
        "max_tokens": None,
        "default_max_tokens": 64,
    } | numbers
    return plan_turn(held, wanted, **given)


def leaving(plan: Plan) -> list[tuple[str, ...]]:
    return [unit.blocks for unit in [*plan.evict, *plan.reserve]]


sizes = st.integers(1, 60)
scored = st.tuples(sizes, st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 9))


@st.composite
def turns(draw: st.DrawFn, least_spare: int = 0) -> dict[str, Any]:
    """Arguments of a turn. No passage is younger than the last exchange, as after any turn that was committed.

    least_spare: tokens of budget beyond what must fit.
    """
    held: list[Held] = []
    exchanges = draw(st.dictionaries(st.integers(1, 6), st.lists(scored, min_size=1, max_size=2), max_size=4))
    for turn, parts in sorted(exchanges.items()):
        # As one is that was recalled.
        stored = draw(st.booleans())
        for (tokens, score), kind in zip(parts, ["question", "answer"], strict=False):
            held.append(Held(f"{kind[0]}{turn}", kind, tokens, turn, score=score, stored=stored))
    latest = max(exchanges, default=6)
    places = st.tuples(scored, st.integers(1, latest), st.integers(0, len(held)), st.booleans())
    for name, ((tokens, score), turn, at, stored) in draw(st.dictionaries(st.sampled_from("abcdef"), places)).items():
        held.insert(at, passage(name, tokens, turn, score, stored))
    held.insert(0, Held("sys", "system", draw(sizes), 0))
    resident = {block.passage_id: block.tokens for block in held}
    names = draw(st.dictionaries(st.sampled_from("abcdefuvwxyz"), sizes, max_size=6))
    question, overhead, max_tokens = draw(st.tuples(sizes, st.integers(0, 20), st.none() | st.integers(1, 100)))
    pinned = held[0].tokens + question + overhead + (max_tokens or 1)
    known = [
        Referred(turn, (f"q{turn}", f"a{turn}"), sum(tokens for tokens, _ in parts), True)
        for turn, parts in exchanges.items()
        if len(parts) == 2 and turn != latest
    ]
    known += [Referred(turn, (f"q{turn}", f"a{turn}"), draw(sizes), False) for turn in (20, 21)]
    return {
        "held": held,
        "wanted": want(*((name, resident.get(name, tokens)) for name, tokens in names.items())),
        "budget": pinned + draw(st.integers(least_spare, 300)),
        "question_tokens": question,
        "answer_overhead": overhead,
        "max_tokens": max_tokens,
        "default_max_tokens": draw(st.integers(1, 300)),
        "stands_alone": draw(st.booleans()),
        "referred": draw(st.lists(st.sampled_from(known), max_size=2, unique_by=lambda exchange: exchange.turn)),
    }


class Outcome:
    """A planned turn, and sums over it that the properties speak of."""

    def __init__(self, turn: dict[str, Any]) -> None:
        self.turn = turn
        self.plan = plan_turn(**turn)
        self.held = {block.id: block for block in turn["held"]}
        self.wanted = {passage.passage_id: passage for passage in turn["wanted"]}
        self.fixed = self.held["sys"].tokens + turn["question_tokens"] + turn["answer_overhead"]
        # By the rule, told anew: in turn, each that fits into what passages leave beside an eighth for the answer.
        asked = turn["default_max_tokens"] if turn["max_tokens"] is None else turn["max_tokens"]
        left = turn["budget"] - self.fixed
        room = left - min(asked, left, max(1, turn["budget"] // 8))
        room -= sum(self.wanted[id].tokens for id in self.wanted if id not in self.plan.skipped)
        self.helping: list[int] = []
        for exchange in turn["referred"]:
            if exchange.tokens <= room:
                room -= exchange.tokens
                self.helping.append(exchange.turn)
        self.recalled = [e for e in turn["referred"] if e.turn in self.plan.exchanges]
        found = [id for id in self.wanted if id not in self.plan.skipped]
        self.distracting = {
            block.id
            for block in turn["held"]
            if block.passage_id
            and block.passage_id not in self.wanted
            and block.stored
            and turn["stands_alone"]
            and found
        }

    def used(self, evicted: int) -> int:
        """Tokens in the cache at the answer's first one, had only so many of `evict` left."""
        gone = {id for unit in self.plan.evict[:evicted] for id in unit.blocks}
        stays = sum(block.tokens for block in self.turn["held"] if block.id not in gone)
        streamed = sum(self.wanted[id].tokens for id in self.plan.stream) + sum(e.tokens for e in self.recalled)
        return stays + streamed + self.turn["question_tokens"] + self.turn["answer_overhead"] + 1


planned = turns().map(Outcome)


def refusal(turn: dict[str, Any]) -> str | None:
    """The field that the turn should be refused for."""
    left = turn["budget"] - turn["held"][0].tokens - turn["question_tokens"] - turn["answer_overhead"]
    if left < 1:
        return "content"
    return "max_tokens" if (turn["max_tokens"] or 0) > left else None


@given(turns(least_spare=-150))
def test_a_turn_is_refused_only_if_its_pinned_blocks_pass_the_budget(turn):
    field = refusal(turn)
    if field is None:
        plan_turn(**turn)
    else:
        with pytest.raises(DoesNotFit) as caught:
            plan_turn(**turn)
        assert caught.value.field == field


@given(planned)
def test_just_enough_leaves_for_what_is_streamed_the_question_and_one_answer_token(turn):
    assert turn.used(evicted=len(turn.plan.evict)) <= turn.turn["budget"]
    makes_room = len(turn.plan.evict) > len(turn.distracting)
    assert not makes_room or turn.used(evicted=len(turn.plan.evict) - 1) > turn.turn["budget"]


@given(planned)
def test_passages_not_asked_for_leave_first_if_the_bank_has_them_and_the_question_stands_alone(turn):
    leaving = turn.plan.evict[: len(turn.distracting)]
    assert {id for unit in leaving for id in unit.blocks} == turn.distracting
    reasons = [unit.reason for unit in [*turn.plan.evict, *turn.plan.reserve]]
    assert reasons == ["not_relevant"] * len(leaving) + ["room_for_turn"] * (len(reasons) - len(leaving))


@given(planned)
def test_every_block_but_the_system_prompt_has_one_place_in_the_order(turn):
    units = [*turn.plan.evict, *turn.plan.reserve]
    assert [unit.rank for unit in units] == list(range(1, len(units) + 1))
    streamed = {turn.wanted[id].block for id in turn.plan.stream} | {id for e in turn.recalled for id in e.blocks}
    assert sorted(id for unit in units for id in unit.blocks) == sorted(turn.held.keys() - {"sys"} | streamed)
    sizes = {id: block.tokens for id, block in turn.held.items()}
    sizes |= {passage.block: passage.tokens for passage in turn.wanted.values()}
    sizes |= {exchange.blocks[0]: exchange.tokens for exchange in turn.recalled}
    assert [unit.tokens for unit in units] == [sum(sizes.get(id, 0) for id in unit.blocks) for unit in units]
    assert all(unit.blocks[0] not in streamed for unit in turn.plan.evict)


@given(planned)
def test_a_question_and_its_answer_leave_together_and_nothing_else_does(turn):
    for blocks in leaving(turn.plan):
        if blocks[0] in turn.held and not turn.held[blocks[0]].passage_id:
            number = turn.held[blocks[0]].turn
            assert blocks == tuple(id for id in (f"q{number}", f"a{number}") if id in turn.held)
        else:
            assert len(blocks) == 1 or blocks in [exchange.blocks for exchange in turn.recalled]


@given(planned)
def test_the_order_is_rest_by_score_then_last_exchange_then_referred_then_wanted_worst_first(turn):
    last = max((block.turn for block in turn.held.values() if block.kind == "question"), default=0)
    best_first = list(turn.wanted)

    def place(blocks: tuple[str, ...]) -> tuple[float, ...]:
        if blocks[0] in turn.distracting:
            return -1, turn.held[blocks[0]].score, turn.held[blocks[0]].turn
        if blocks in [exchange.blocks for exchange in turn.recalled]:
            return 4, -[exchange.blocks for exchange in turn.recalled].index(blocks)
        if blocks[0] not in turn.held:
            return 5, -next(i for i, id in enumerate(best_first) if turn.wanted[id].block == blocks[0])
        unit = [turn.held[id] for id in blocks]
        if unit[0].passage_id in turn.plan.resident:
            return 3, -best_first.index(unit[0].passage_id)
        if unit[0].kind == "question" and unit[0].turn in turn.helping:
            return 2, -turn.helping.index(unit[0].turn)
        if unit[0].kind == "question" and unit[0].turn == last:
            return (1,)
        tokens = sum(block.tokens for block in unit)
        return 0, sum(block.score * block.tokens for block in unit) / tokens, unit[0].turn

    places = [place(blocks) for blocks in leaving(turn.plan)]
    assert places == sorted(places)


@given(planned)
def test_an_exchange_referred_to_helps_if_it_fits_beside_the_passages(turn):
    assert turn.plan.exchanges == [e.turn for e in turn.turn["referred"] if e.turn in turn.helping and not e.resident]
    gone = {id for unit in turn.plan.evict for id in unit.blocks}
    assert gone.isdisjoint(id for turn_ in turn.helping for id in (f"q{turn_}", f"a{turn_}"))


@given(planned)
def test_wanted_passages_that_are_resident_stay_through_the_reading(turn):
    gone = {id for unit in turn.plan.evict for id in unit.blocks}
    assert gone.isdisjoint(f"b.{id}" for id in turn.plan.resident)


@given(planned)
def test_each_wanted_passage_is_resident_streamed_or_skipped_in_the_order_wanted(turn):
    parts = [turn.plan.resident, turn.plan.stream, turn.plan.skipped]
    assert all(part == [id for id in turn.wanted if id in part] for part in parts)
    assert sorted(turn.wanted) == sorted(id for part in parts for id in part)
    resident = {block.passage_id for block in turn.turn["held"]}
    assert resident.issuperset(turn.plan.resident)
    assert resident.isdisjoint(turn.plan.stream)


@given(planned)
def test_a_passage_is_skipped_only_for_those_before_it_and_an_eighth_for_the_answer(turn):
    asked = turn.turn["default_max_tokens"] if turn.turn["max_tokens"] is None else turn.turn["max_tokens"]
    taken = 0
    for passage in turn.turn["wanted"]:
        left = turn.turn["budget"] - turn.fixed - taken
        room = left - min(asked, turn.turn["budget"] - turn.fixed, max(1, turn.turn["budget"] // 8))
        assert (passage.passage_id in turn.plan.skipped) == (passage.tokens > room)
        taken += passage.tokens if passage.tokens <= room else 0


@given(planned)
def test_an_answer_of_no_stated_length_never_pushes_out_the_passages_of_its_turn(turn):
    if turn.turn["max_tokens"] is not None:
        assert turn.plan.max_tokens == turn.turn["max_tokens"]
        return
    used = sum(turn.wanted[id].tokens for id in [*turn.plan.resident, *turn.plan.stream])
    used += sum(exchange.tokens for exchange in turn.turn["referred"] if exchange.turn in turn.helping)
    assert turn.plan.max_tokens == min(turn.turn["default_max_tokens"], turn.turn["budget"] - turn.fixed - used)
    assert turn.plan.max_tokens >= 1


def test_the_last_block_to_be_evicted_is_the_one_that_makes_it_fit():
    held = [SYSTEM, passage("a", 50, score=1), passage("b", 50, score=2), passage("c", 50, score=3)]
    assert plan(held, budget=177).evict == []
    assert [unit.blocks for unit in plan(held, budget=176).evict] == [("b.a",)]
    assert [unit.blocks for unit in plan(held, budget=127).evict] == [("b.a",)]
    assert [unit.blocks for unit in plan(held, budget=126).evict] == [("b.a",), ("b.b",)]


def test_the_order_of_leaving():
    held = [
        SYSTEM,
        passage("best", 20, score=0.1),
        passage("worst", 20, score=0.9),
        passage("other", 20, score=0.5),
        *exchange(1, score=0.4),
        *exchange(2, score=0.0),
    ]
    result = plan(held, want(("best", 20), ("n1", 10), ("worst", 20), ("n2", 10)))
    assert leaving(result) == [
        ("q1", "a1"),
        ("b.other",),
        ("q2", "a2"),
        ("b.worst",),
        ("b.best",),
        ("new.n2",),
        ("new.n1",),
    ]
    assert (result.resident, result.stream, result.skipped) == (["best", "worst"], ["n1", "n2"], [])


def test_what_the_bank_has_leaves_at_once_when_a_question_that_stands_alone_asks_for_something_else():
    held = [SYSTEM, passage("kept", 5), passage("old", 5, stored=True), passage("hit", 5, stored=True), *exchange(1)]
    asked = want(("hit", 5), ("new", 5))
    assert [unit.blocks for unit in plan(held, asked, stands_alone=True).evict] == [("b.old",)]
    assert plan(held, asked).evict == []
    # An exchange that was recalled is not what retrieval passes over.
    assert plan([SYSTEM, *exchange(1, stored=True), *exchange(2)], asked, stands_alone=True).evict == []
    # Nothing was found, or nothing that fits: what is there is the best there is.
    assert plan(held, stands_alone=True).evict == []
    assert plan(held, want(("huge", 500)), stands_alone=True).evict == []


def test_an_exchange_is_as_relevant_as_its_tokens_are_on_average():
    held = [SYSTEM, *exchange(1, 10, 30), passage("p", 5, score=0.74), passage("r", 5, score=0.76), *exchange(9)]
    held[2] = Held("a1", "answer", 30, 1, score=1.0)
    assert leaving(plan(held)) == [("b.p",), ("q1", "a1"), ("b.r",), ("q9", "a9")]


@pytest.mark.parametrize("score", [0.0, 3.5])
def test_equals_leave_oldest_first_then_in_the_order_they_were_streamed(score):
    held = [SYSTEM, passage("z", 5, 2, score), passage("y", 5, 1, score), passage("x", 5, 1, score), *exchange(1, 2, 3)]
    held = [*held[:4], *exchange(1, score=score), *exchange(3)]
    assert leaving(plan(held)) == [("b.y",), ("b.x",), ("q1", "a1"), ("b.z",), ("q3", "a3")]


def test_a_passage_too_large_is_skipped_and_the_others_go_on():
    result = plan([SYSTEM], want(("a", 100), ("huge", 60), ("b", 40), ("c", 10), ("d", 9)))
    assert (result.stream, result.skipped) == (["a", "b", "d"], ["huge", "c"])


def test_a_skipped_passage_that_is_resident_leaves_like_any_other():
    held = [SYSTEM, passage("big", 170, score=5.0), *exchange(1)]
    result = plan(held, want(("small", 80), ("big", 170)))
    assert (result.resident, result.skipped) == ([], ["big"])
    assert [unit.blocks for unit in result.evict] == [("b.big",)]


@pytest.mark.parametrize(("max_tokens", "streamed"), [(None, 1), (3, 2), (64, 1)])
def test_room_kept_for_the_answer_is_no_more_than_it_may_take(max_tokens, streamed):
    result = plan([SYSTEM], want(("a", 100), ("b", 65)), max_tokens=max_tokens)
    assert len(result.stream) == streamed


def test_a_stated_length_keeps_the_passages_but_may_push_them_out_later():
    result = plan([SYSTEM], want(("a", 100)), max_tokens=174)
    assert (result.stream, result.max_tokens, leaving(result)) == (["a"], 174, [("new.a",)])


def test_nothing_held_and_nothing_wanted_is_a_plan():
    assert plan([]) == Plan(max_tokens=64)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_question_that_just_fits_is_planned_and_one_token_more_is_not(max_tokens):
    assert plan([SYSTEM], question_tokens=183, max_tokens=max_tokens).max_tokens == 1
    with pytest.raises(DoesNotFit) as caught:
        plan([SYSTEM], question_tokens=184, max_tokens=max_tokens)
    assert caught.value.field == "content"
    assert str(caught.value) == (
        "184 tokens with 10 of the system prompt and 6 of template need 201 to be answered at all; "
        "the session's budget is 200 tokens"
    )


def test_an_answer_that_just_fits_is_planned_and_one_token_more_is_not():
    assert plan([SYSTEM], max_tokens=174).max_tokens == 174
    with pytest.raises(DoesNotFit) as caught:
        plan([SYSTEM], max_tokens=175)
    assert caught.value.field == "max_tokens"
    assert str(caught.value) == (
        "175 with 26 tokens of system prompt, question and template need 201; "
        "the session's budget is 200 tokens, so at most 174"
    )


def test_the_last_exchange_stays_longest_after_a_cancelled_turn():
    # Turn 2 was cancelled once it had read its passage: that stays resident, its question does not.
    held = [SYSTEM, *exchange(1, score=0.1), passage("p", 20, turn=2, score=0.5)]
    assert leaving(plan(held)) == [("b.p",), ("q1", "a1")]
