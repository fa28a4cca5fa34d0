"""Slices of a time."""

from __future__ import annotations

from app.memory.pace import Pace


def run(pace: Pace, seconds_per_token: float, slices: int, overhead: float = 0.0) -> list[float]:
    """How long each slice took."""
    taken = []
    for _ in range(slices):
        seconds = overhead + pace.tokens * seconds_per_token
        taken.append(seconds)
        pace.note(pace.tokens, seconds)
    return taken


def test_slices_come_to_take_the_time_and_never_much_more() -> None:
    taken = run(Pace(0.03), 0.0005, 30)
    assert max(taken) <= 0.03 * 1.05
    assert taken[-1] > 0.03 * 0.8


def test_a_machine_that_becomes_slow_is_believed_at_once() -> None:
    pace = Pace(0.03)
    run(pace, 0.0005, 30)
    slow = run(pace, 0.003, 3)
    assert slow[1] <= 0.03 * 1.05


def test_the_bounds_hold_and_what_is_left_over_says_nothing() -> None:
    pace = Pace(0.03, most=64)
    run(pace, 1e-6, 40)
    assert pace.tokens == 64
    pace.note(3, 0.004)
    assert pace.tokens == 64
    run(pace, 10.0, 5)
    assert pace.tokens == 8
