"""The vector index against NumPy on the whole matrix."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.vectors import VectorIndex, VectorRow

DIMENSION = 8
KINDS = ("prose", "code", "table", "list")


def unit(seed: int) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=DIMENSION)
    return (vector / np.linalg.norm(vector)).astype("<f2")


def row(number: int, document: int, kind: str = "prose", seed: int | None = None) -> VectorRow:
    return VectorRow(number, document, kind, unit(number if seed is None else seed).tobytes())


def nearest(rows: list[VectorRow], query: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The oracle: every cosine in double precision, sorted."""
    cosines = [(r.number, float(np.frombuffer(r.vector, "<f2").astype(float) @ query.astype(float))) for r in rows]
    return sorted(cosines, key=lambda pair: (-round(pair[1], 5), pair[0]))[:count]


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [cosine for _, cosine in found] == pytest.approx([cosine for _, cosine in expected], abs=1e-5)
    assert {number for number, _ in found} == {number for number, _ in expected}


numbers = st.integers(1, 6)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.tuples(numbers, st.sampled_from(KINDS), st.integers(0, 4)), max_size=25),
    query=st.integers(0, 1000),
    documents=st.none() | st.lists(numbers, max_size=4),
    kind=st.none() | st.sampled_from(KINDS),
    count=st.integers(1, 30),
)
def test_masks_are_those_of_brute_force_while_documents_come_and_go(changes, query, documents, kind, count):
    index, held = VectorIndex(DIMENSION), []
    for number, (document, kind_of, remove) in enumerate(changes, start=1):
        if remove == 0:
            index.remove_documents([document])
            held = [r for r in held if r.document != document]
        else:
            held.append(row(number, document, kind_of))
            index.add(held[-1:])
    assert len(index) == len(held)
    wanted = [r for r in held if (documents is None or r.document in documents) and (kind is None or r.kind == kind)]
    mask = None if documents is None else np.array(documents, dtype=np.int64)
    vector = unit(query).astype(np.float32)
    assert_same(index.search(vector, count, mask, kind), nearest(wanted, vector, count))


def test_more_rows_than_a_segment_and_rows_used_again():
    index = VectorIndex(DIMENSION)
    rows = [row(n, n % 7) for n in range(1, 20_001)]
    index.add(rows)
    full = index.nbytes
    query = unit(7).astype(np.float32)
    assert index.search(query, 1)[0][0] == 7
    assert_same(index.search(query, 50), nearest(rows, query, 50))
    index.remove_documents([0, 3])
    kept = [r for r in rows if r.document not in (0, 3)]
    more = [row(n, 100) for n in range(20_001, 25_001)]
    index.add(more)
    assert index.nbytes == full, "freed rows were not used again"
    assert len(index) == len(kept) + len(more)
    assert_same(index.search(query, 50), nearest(kept + more, query, 50))
    assert index.search(query, 50, np.array([0, 3], dtype=np.int64)) == []


def test_equals_come_by_number():
    index = VectorIndex(DIMENSION)
    index.add([row(n, n, seed=1) for n in range(1, 40)])
    assert [number for number, _ in index.search(unit(1).astype(np.float32), 5)] == [1, 2, 3, 4, 5]


def test_an_empty_index_finds_nothing():
    index = VectorIndex(DIMENSION)
    index.add([])
    index.remove_documents([1])
    assert (len(index), index.nbytes, index.search(unit(1).astype(np.float32), 5)) == (0, 0, [])


def test_searches_while_rows_change_find_only_rows_there_were():
    index, stop, errors = VectorIndex(DIMENSION), threading.Event(), []
    index.add([row(n, 0) for n in range(1, 501)])

    def churn() -> None:
        number = 1000
        while not stop.is_set():
            index.add([row(number + n, 1) for n in range(50)])
            index.remove_documents([1])
            number += 50

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for n in range(1, 301):
            found = index.search(unit(n).astype(np.float32), 10, np.array([0], dtype=np.int64))
            if found[0][0] != n or any(number > 500 for number, _ in found):
                errors.append(found)
    finally:
        stop.set()
        thread.join()
    assert errors == []
