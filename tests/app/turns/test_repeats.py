"""Answers that only repeat themselves."""

from __future__ import annotations

import random

import pytest

from app.turns.repeats import Repeats


def ended_at(tokens: list[int]) -> int | None:
    """After how many tokens a loop is seen."""
    repeats = Repeats()
    return next((n for n, token in enumerate(tokens, start=1) if repeats.push(token)), None)


@pytest.mark.parametrize(("period", "expected"), [(1, 48), (2, 48), (5, 48), (11, 48), (12, 48), (40, 120), (128, 384)])
def test_a_loop_is_seen_however_long_it_is(period: int, expected: int) -> None:
    start = [900, 901, 902]
    assert ended_at(start + list(range(period)) * 60) == len(start) + expected


def test_a_loop_too_long_to_be_one_and_text_without_one_go_on() -> None:
    assert ended_at(list(range(129)) * 5) is None
    words = random.Random(3)
    assert ended_at([words.randrange(50) for _ in range(5000)]) is None


def test_what_begins_anew_is_no_loop() -> None:
    rows = [token for row in range(80) for token in [1, 2, 3, 1000 + row, 4, 5]]
    assert ended_at(rows) is None
    assert ended_at((list(range(20)) * 2 + [7]) * 3) == 123
    assert ended_at(([1] * 40 + [2]) * 2) is None
