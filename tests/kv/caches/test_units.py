"""The bookkeeping of units, without tensors."""

from __future__ import annotations

import pytest

from kv.caches.units import UnitTable
from kv.methods.chunkkv import ChunkKVOptions


def table(**options: object) -> UnitTable:
    chosen = ChunkKVOptions(**{"budget": 40, "chunk_size": 4, "n_sink": 2, "recent": 0, **options})
    return UnitTable(chosen.policies(1)[0])


def spans(t: UnitTable) -> list[tuple[int, int, str | None]]:
    return [(u.start, u.start + u.seen, u.block) for u in t.units]


def test_chunks_cover_undeclared_text_without_gaps_from_the_sinks_on() -> None:
    t = table()
    t.append(11)
    assert spans(t) == [(0, 2, None), (2, 6, None), (6, 10, None), (10, 11, None)]


def test_a_stream_shorter_than_the_sinks_is_one_unfinished_unit() -> None:
    t = table()
    t.append(1)
    assert spans(t) == [(0, 1, None)]
    assert t.pick([0.0]) is None


def test_declared_blocks_end_the_chunk_before_them_and_start_the_grid_anew_after() -> None:
    t = table()
    t.append(3)
    t.declare(5, 12, "code")
    t.append(13)
    assert spans(t) == [(0, 2, None), (2, 5, None), (5, 12, "code"), (12, 14, None), (14, 16, None)]


def test_least_relevance_leaves_first_then_least_score_then_the_older() -> None:
    t = table()
    for at, (name, relevance) in enumerate([("a", 0.0), ("b", 0.0), ("c", 0.0), ("d", 0.5)]):
        t.declare(2 + 3 * at, 5 + 3 * at, name, relevance=relevance)
    t.append(14)
    order = []
    scores = {"a": 0.2, "b": 0.1, "c": 0.1, "d": 0.0, None: 9.0}
    while (index := t.pick([scores[u.block] for u in t.units])) is not None:
        order.append(t.remove(index).block)
    assert order == ["b", "c", "a", "d"]
    assert t.rows == 2


def test_recent_tokens_are_spared_until_nothing_else_is_left() -> None:
    t = table(recent=6)
    t.append(14)
    # Only [2, 6) ends before the newest six, however well it scores.
    assert t.pick([0, 5, 1, 0]) == 1
    t.remove(1)
    assert t.pick([0, 5, 2]) == 2
    t.remove(2)
    assert t.pick([0, 5]) == 1


def test_pinned_sinks_and_growing_units_are_never_picked() -> None:
    t = table()
    t.declare(1, 6, "over the sinks")
    t.declare(6, 9, "pinned", pinned=True)
    t.open_block("open", at=9)
    t.append(12)
    assert t.pick([0.0] * 4) is None
    t.close_block()
    assert t.units[t.pick([0.0] * 4) or 0].block == "open"


def test_an_open_block_that_got_no_token_is_forgotten() -> None:
    t = table()
    t.append(4)
    t.open_block("answer")
    t.close_block()
    t.append(2)
    assert [u.block for u in t.units] == [None, None, None]
    with pytest.raises(ValueError, match="no block is open"):
        t.close_block()


def test_truncate_forgets_whole_units_and_refuses_to_cut_a_finished_block() -> None:
    t = table()
    t.declare(2, 8, "a")
    t.declare(8, 12, "b")
    t.append(12)
    with pytest.raises(ValueError, match="block 'a': position 5 would cut it"):
        t.truncate(5)
    assert t.truncate(8) == 8
    assert (t.position, t.rows) == (8, 8)
    t.declare(8, 10, "b")
    t.append(2)
    assert spans(t)[-1] == (8, 10, "b")


def test_rebase_renumbers_what_is_left_and_says_by_how_much() -> None:
    t = table()
    t.append(14)
    t.remove(1)
    assert t.rebase() == [0] * 2 + [-4] * 8
    assert spans(t) == [(0, 2, None), (2, 6, None), (6, 10, None)]
    assert t.position == t.rows == 10
    assert t.positions() == list(range(10))


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (3, 9, "start 3 is before the stream's position 6"),
        (9, 9, "empty"),
        (9, 15, "overlaps block 'a'"),
        (30, 69, "more than budget 40"),
    ],
)
def test_impossible_blocks_are_refused(start: int, end: int, message: str) -> None:
    t = table()
    t.append(6)
    t.declare(10, 20, "a")
    with pytest.raises(ValueError, match=message):
        t.declare(start, end, "b")


def test_names_are_unique_and_pins_may_not_fill_the_budget() -> None:
    t = table()
    t.declare(2, 22, "a")
    t.declare(22, 42, "b")
    with pytest.raises(ValueError, match="already declared"):
        t.declare(50, 51, "a")
    t.append(22)
    t.pin("a", True)
    with pytest.raises(KeyError):
        t.pin("b", True)
    t.append(18)
    with pytest.raises(ValueError, match="the pinned blocks: 42 tokens"):
        t.append(2) or t.pin("b", True)
