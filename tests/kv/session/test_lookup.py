"""Drafts by prompt lookup: where they come from, and when there are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv.session.lookup import PromptLookup


def said(text: list[int], answer: list[int], most: int = 7) -> PromptLookup:
    lookup = PromptLookup(text, most)
    for token in answer:
        lookup.push(token)
    return lookup


def test_what_followed_the_last_tokens_is_the_draft() -> None:
    lookup = said([5, 1, 2, 3, 4, 9], [8, 1, 2])
    assert lookup.draft(7) == [3]
    lookup.note(1, 1)
    for token in (3, 4):
        lookup.push(token)
    # One that was right whole makes the next longer; no draft is longer than the text, or than is asked for.
    assert lookup.draft(7) == [9, 8, 1]
    assert lookup.draft(2) == [9, 8]
    assert lookup.draft(0) == []


def test_the_longest_of_what_was_said_counts_and_then_the_newest() -> None:
    assert said([7, 1, 2, 3, 0, 0, 6, 1, 2, 4, 0, 1, 2, 5], [7, 1, 2]).draft(1) == [3]
    assert said([1, 2, 3, 0, 1, 2, 4, 0], [1, 2]).draft(1) == [4]


def test_one_token_is_not_enough() -> None:
    assert said([1, 2, 3], [9, 2]).draft(7) == []
    assert said([], [1]).draft(7) == []
    assert said([], [1, 1, 1]).draft(7) == [1]


def test_drafts_that_fail_get_shorter_and_rest() -> None:
    lookup = said([1, 2, 3, 4, 5, 6, 7, 8, 0], [1, 2])
    for length in (1, 3, 7):
        assert len(lookup.draft(7)) == length
        lookup.note(length, length)
    lookup.note(7, 2)
    assert len(lookup.draft(7)) == 3
    lookup.note(3, 0)
    assert (lookup.drafted, lookup.accepted) == (21, 13)
    for _ in range(3):
        assert len(lookup.draft(7)) == 1
        lookup.note(1, 0)
    # Four in a row: none for eight tokens.
    for _ in range(8):
        assert lookup.draft(7) == []
    assert lookup.draft(7) == [3]


def test_none_at_most_is_none() -> None:
    assert said([1, 2, 3], [1, 2], most=0).draft(7) == []


@given(
    st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 9)
)
def test_a_draft_is_always_what_followed_the_last_two_tokens_somewhere(
    text: list[int], answer: list[int], most: int
) -> None:
    lookup = said(text, answer)
    draft = lookup.draft(most)
    every = [*text, *answer]
    assert len(draft) <= min(most, 1)
    if draft:
        assert any(every[i : i + 2] == every[-2:] and every[i + 2] == draft[0] for i in range(len(every) - 2))
    elif most and len(every) > 2:
        assert not any(every[i : i + 2] == every[-2:] for i in range(len(every) - 2))
