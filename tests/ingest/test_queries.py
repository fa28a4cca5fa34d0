from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.queries import fts_query


@pytest.fixture(scope="module")
def index() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE VIRTUAL TABLE passages USING fts5 (text, tokenize = 'porter unicode61')")
    connection.executemany(
        "INSERT INTO passages VALUES (?)", [("hello world",), ("the resumé of a café",), ("NEAR misses",)]
    )
    yield connection
    connection.close()


def found(index: sqlite3.Connection, query: str) -> list[int]:
    match = fts_query(query)
    assert match is not None
    rows = index.execute("SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY rowid", [match])
    return [row[0] for row in rows]


@given(text=st.text(max_size=80) | st.text(alphabet="\"'*^:(){}+- \0\nANDORTNEabc_", max_size=60))
@settings(max_examples=400, deadline=None)
@example(text='"')
@example(text="NEAR(a b, 2) AND NOT text:* ^x + {heading} OR")
@example(text="\ud800 \0 '; DROP TABLE passages; --")
@example(text="_ __ 👩‍🚀")
@example(text="a\u0301" * 50_000)
@example(text="x" * 100_000)
@example(text=" ".join(f"w{n}" for n in range(20_000)))
def test_any_text_is_a_valid_query(index, text):
    match = fts_query(text)
    if match is not None:
        index.execute("SELECT rowid FROM passages WHERE passages MATCH ?", [match]).fetchall()


def test_words_are_joined_by_or_without_stop_words():
    assert fts_query("What is the capital of France?") == '"capital" OR "france"'


def test_stop_words_count_when_there_is_nothing_else():
    assert fts_query("The who") == '"the" OR "who"'


def test_operators_are_plain_words(index):
    assert found(index, "NEAR") == [3]
    assert found(index, "hello AND nothing") == [1]


def test_decomposed_accents_find_composed_ones(index):
    assert found(index, "cafe\u0301") == [2]
    assert found(index, "re\u0301sume\u0301") == [2]


@pytest.mark.parametrize("text", ["", " \n\t", '"*^', "\0", "_", "👩‍🚀", "\ud800"])
def test_no_word_is_no_query(text):
    assert fts_query(text) is None


def test_keeps_64_distinct_terms():
    match = fts_query("Same same SAME " + " ".join(f"w{n}" for n in range(100)))
    assert match is not None
    terms = match.split(" OR ")
    assert terms == ['"same"', *(f'"w{n}"' for n in range(63))]
