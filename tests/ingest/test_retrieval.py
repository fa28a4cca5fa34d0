"""Search by words and by vectors: real SQLite, real WordLlama, and brute force beside them."""

from __future__ import annotations

import fnmatch
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.database import Database
from ingest.embedder import Embedder
from ingest.embedders import load_embedder
from ingest.errors import InvalidInput
from ingest.library import Filter, Library, migrations
from ingest.queries import fts_query
from ingest.records import StoredPassage
from ingest.retrieval import DEPTH, fuse
from tests.ingest.helpers import ingest, upload, words

TEXTS = {
    "animals/cat.md": "# Cats\n\nCats are small animals that purr when they are content.\n",
    "animals/dog.md": "# Dogs\n\nDogs are loyal animals and bark at strangers.\n",
    "money/market.md": "# Market\n\nThe stock market fell today and shares lost value.\n",
    "money/old/bank.md": "# Bank\n\nThe bank raised interest on every loan.\n",
    "code/[id].py": 'def purr(cat):\n    """Make a cat purr."""\n    return cat.sound\n',
    "README": "A ship crossed the ocean in a storm.\n",
}


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    found = load_embedder("wordllama")
    assert found is not None
    return found


@pytest.fixture
def open_library(tmp_path: Path) -> Iterator[Callable[[Embedder | None], Library]]:
    """Opens the same database again and again; closes what was opened before."""
    opened: list[tuple[Library, Database]] = []

    def close() -> None:
        while opened:
            library, database = opened.pop()
            library.close()
            database.close()

    def open_(embedder: Embedder | None) -> Library:
        close()
        database = Database(tmp_path / "library.db", migrations)
        opened.append((Library(database, words, 60, embedder), database))
        return opened[-1][0]

    yield open_
    close()


@pytest.fixture
def library(open_library, embedder) -> Library:
    library = open_library(embedder)
    assert library.wait_for_vectors(10)
    ingest(library, *(upload(name, text, folder=name.partition("/")[0]) for name, text in TEXTS.items()))
    return library


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def names(found: list[StoredPassage]) -> list[str]:
    return [passage.name for passage in found]


def vectors_on_disk(path: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(
            "SELECT documents.name, embedders.name FROM vectors JOIN passages ON passages.number = passage"
            " JOIN documents ON documents.id = document_id JOIN embedders ON embedders.number = embedder ORDER BY 1"
        ).fetchall()
    finally:
        connection.close()


rankings = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=20), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(lists=rankings, weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4), k=st.integers(1, 100))
def test_fusion_is_the_sum_over_the_lists(lists, weights, k):
    weights = weights[: len(lists)]
    first = sum(weight / (k + 1) for weight in weights)
    items = {item for ranking in lists for item in ranking}
    expected = {
        item: sum(
            w / (k + 1 + ranking.index(item)) for ranking, w in zip(lists, weights, strict=True) if item in ranking
        )
        / first
        for item in items
    }
    fused = fuse(lists, weights, k)
    assert dict(fused) == pytest.approx(expected)
    assert fused == sorted(fused, key=lambda pair: (-pair[1], pair[0]))
    assert all(0 < score <= 1 for _, score in fused)


def test_first_of_every_list_scores_one_and_one_list_keeps_its_order():
    assert fuse([[3, 1], [3, 2]], [1.0, 0.2])[0] == (3, 1)
    assert [item for item, _ in fuse([[9, 4, 7]], [1.0])] == [9, 4, 7]


def test_every_result_says_why_it_was_found(library):
    found = library.search("a cat that purrs", 6)
    assert names(found)[0] in ("animals/cat.md", "code/[id].py")
    scores = [passage.score for passage in found]
    assert scores == sorted(scores, reverse=True)
    for passage in found:
        assert passage.ranks.bm25 is not None or passage.ranks.vector is not None


def test_vectors_find_what_shares_no_word_with_the_query(library, open_library):
    query = "kitten feline pets"
    (best, *_) = library.search(query, 3)
    assert best.name == "animals/cat.md"
    assert (best.ranks.bm25, best.ranks.vector) == (None, 1)
    assert open_library(None).search(query, 3) == []


def test_what_has_nothing_to_do_with_the_query_is_not_found(library):
    assert library.search("zymurgy", 5) == []


def test_the_vector_ranks_are_those_of_brute_force(library, embedder):
    query = "animals that make a sound"
    held = [p for document in library.documents().items for p in library.passages(document.id).items]
    texts = [f"{p.heading}\n{p.text}" if p.heading else p.text for p in held]
    cosines = embedder.embed(texts).astype(np.float16).astype(np.float64) @ embedder.embed([query])[0]
    order = [held[i].id for i in np.argsort(-cosines, kind="stable")]
    found = {p.id: p.ranks.vector for p in library.search(query, 50) if p.ranks.vector is not None}
    assert len(found) >= 2
    assert sorted(found, key=lambda id: found[id]) == [id for id in order if id in found]


FILTERS = [
    (Filter(), set(TEXTS)),
    (Filter(name="README"), {"README"}),
    (Filter(metadata={"folder": "money"}), {"money/market.md", "money/old/bank.md"}),
    (Filter(kind="code"), {"code/[id].py"}),
    (Filter(path="money"), {"money/market.md", "money/old/bank.md"}),
    (Filter(path="money/"), {"money/market.md", "money/old/bank.md"}),
    (Filter(path="mon"), set()),
    (Filter(path="money/*.md"), {"money/market.md", "money/old/bank.md"}),
    (Filter(path="*.md"), {name for name in TEXTS if name.endswith(".md")}),
    (Filter(path="animals/?at.md"), {"animals/cat.md"}),
    (Filter(path="code/[id].py"), {"code/[id].py"}),
    (Filter(path="code/[*"), {"code/[id].py"}),
    (Filter(path="Animals"), set()),
    (Filter(path="*", kind="prose", metadata={"folder": "animals"}), {"animals/cat.md", "animals/dog.md"}),
    (Filter(path="animals", metadata={"folder": "money"}), set()),
    (Filter(document_id=[]), set()),
]


@pytest.mark.parametrize(("filter", "expected"), FILTERS, ids=[str(filter) for filter, _ in FILTERS])
def test_both_lists_are_filtered_inside(library, filter, expected):
    everything = "cats dogs market bank purr ship animals storm"
    assert set(names(library.search(everything, 50, filter))) == expected
    # Not afterwards: with room for one, the best of what passes is found, and ranks count among what passes alone.
    assert len(library.search(everything, 1, filter)) == min(1, len(expected))
    for place in ("bm25", "vector"):
        ranks = [getattr(passage.ranks, place) for passage in library.search(everything, 50, filter)]
        assert sorted(rank for rank in ranks if rank) == list(range(1, sum(rank is not None for rank in ranks) + 1))


path_letters = st.text(alphabet="ab/[]!-.é", min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(name=path_letters, path=st.text(alphabet="ab/[]!-.é*?", min_size=1, max_size=6))
@example(name="[id].ts", path="[id].ts")
@example(name="a/b", path="a/")
@example(name="/a", path="/")
def test_a_path_is_a_glob_or_a_folder(name, path):
    from ingest.retrieval import _path

    exact, pattern = _path(path)
    connection = sqlite3.connect(":memory:")
    (found,) = connection.execute("SELECT ? = ? OR ? GLOB ?", [name, exact, name, pattern]).fetchone()
    connection.close()
    if "*" in path or "?" in path:
        # Python's own globs have sets, too; here a bracket is a bracket.
        assert bool(found) == (fnmatch.fnmatchcase(name, path.replace("[", "[[]")) or name == path)
    else:
        folder = path.rstrip("/")
        assert bool(found) == (name == folder or name.startswith(folder + "/"))


@pytest.mark.parametrize("path", ["", "x" * 513, "a\0b", "\ud800"])
def test_a_bad_path_names_the_field_the_value_and_the_limit(library, path):
    with pytest.raises(InvalidInput, match=r"filter\.path: ") as caught:
        library.search("x", 5, Filter(path=path))
    assert caught.value.field == "filter.path"


@pytest.fixture(scope="module")
def shared(tmp_path_factory, embedder) -> Iterator[Library]:
    database = Database(tmp_path_factory.mktemp("shared") / "library.db", migrations)
    library = Library(database, words, 60, embedder)
    ingest(library, *(upload(name, text) for name, text in TEXTS.items()))
    yield library
    library.close()
    database.close()


@given(text=st.text(max_size=60) | st.text(alphabet="\"'*^:(){}+- \0\nANDORcat_\ud800", max_size=40))
@settings(max_examples=200, deadline=None)
@example(text="")
@example(text='"')
@example(text="cat \ud800 \0 '; DROP TABLE passages; --")
@example(text="cat " * 50_000)
@example(text="🦜👩‍🚀 _ __")
def test_any_text_is_a_query(shared, text):
    found = shared.search(text, 5)
    assert len(found) <= 5
    if fts_query(text) is None:
        assert found == []


def test_documents_come_and_go_in_memory_as_on_disk(library, tmp_path, embedder):
    kitten = "kitten feline pets"
    document = library.search(kitten, 1)[0].document_id
    library.delete(document)
    assert document not in {p.document_id for p in library.search(kitten, 50)}
    assert len(vectors_on_disk(tmp_path / "library.db")) == len(TEXTS) - 1
    # A replacement: the old text is not found, the new one is, though it may have the old passage's number.
    ingest(library, upload("README", "Kittens are pets.\n"))
    assert names(library.search(kitten, 50))[0] == "README"
    assert library.search("vessel at sea", 50) == []
    assert vectors_on_disk(tmp_path / "library.db") == sorted(
        (name, embedder.name) for name in TEXTS if name != "animals/cat.md"
    )


def test_vectors_are_loaded_again_at_the_next_start(library, open_library, embedder):
    expected = library.search("kitten feline pets", 5)
    again = open_library(embedder)
    assert again.wait_for_vectors(10)
    assert again.vectors.missing == 0
    assert again.search("kitten feline pets", 5) == expected


class Slow:
    """An embedder of another name that can be held up, around the real one."""

    def __init__(self, real: Embedder) -> None:
        self.setting, self.name, self.dimension = None, "slow", real.dimension
        self.weight, self.least_cosine = real.weight, real.least_cosine
        self.real, self.gate, self.passages = real, threading.Event(), 0

    def embed(self, texts):
        if len(texts) > 1 or "\n" in texts[0]:
            assert self.gate.wait(10)
            self.passages += len(texts)
        return self.real.embed(texts)


def fill(library: Library, count: int) -> None:
    ingest(library, *(upload(f"{n}.md", f"# Note {n}\n\nWord{n} about cats.\n") for n in range(count)))


def test_an_older_database_gets_its_vectors_in_the_background(open_library, embedder, tmp_path):
    fill(open_library(None), 150)
    slow = Slow(embedder)
    library = open_library(slow)
    wait_until(lambda: library.vectors.ready)
    # Search works meanwhile, and says which ranks it has.
    assert (library.vectors.embedder, library.vectors.missing) == ("slow", 150)
    (found,) = library.search("word7", 1)
    assert (found.name, found.ranks.bm25, found.ranks.vector) == ("7.md", 1, None)
    assert not library.wait_for_vectors(0.05)
    slow.gate.set()
    assert library.wait_for_vectors(10)
    assert library.vectors.missing == 0
    assert vectors_on_disk(tmp_path / "library.db") == sorted((f"{n}.md", "slow") for n in range(150))
    assert [p.ranks.vector for p in library.search("about cats", 50)].count(None) == 0


def test_embedding_goes_on_where_it_was_stopped_and_follows_the_setting(open_library, embedder, tmp_path):
    fill(open_library(embedder), 150)

    class Half(Slow):
        def embed(self, texts):
            self.passages += len(texts)
            if self.passages > 64:
                # The second batch is not finished before the library is closed.
                self.gate.wait(5)
                raise RuntimeError("stopped")
            return self.real.embed(texts)

    first = Half(embedder)
    library = open_library(first)
    wait_until(lambda: first.passages > 64)
    assert library.vectors.missing == 150 - 64
    closing = threading.Thread(target=lambda: open_library(None))
    closing.start()
    first.gate.set()
    closing.join(20)
    kept = [name for _, name in vectors_on_disk(tmp_path / "library.db")]
    assert (kept.count("slow"), kept.count(embedder.name)) == (64, 86)
    second = Slow(embedder)
    second.gate.set()
    library = open_library(second)
    assert library.wait_for_vectors(10)
    assert second.passages == 86
    assert {name for _, name in vectors_on_disk(tmp_path / "library.db")} == {"slow"}


def test_a_document_deleted_while_it_is_embedded_leaves_no_vector(open_library, embedder, tmp_path):
    fill(open_library(None), 3)
    slow = Slow(embedder)
    library = open_library(slow)
    wait_until(lambda: library.vectors.ready)
    for document in library.documents().items[:2]:
        library.delete(document.id)
    slow.gate.set()
    assert library.wait_for_vectors(10)
    assert vectors_on_disk(tmp_path / "library.db") == [("0.md", "slow")]
    (found,) = library.search("about cats", 50)
    assert (found.name, found.ranks.bm25, found.ranks.vector) == ("0.md", 1, 1)


def test_searches_while_documents_come_and_go_never_mix_passages_up(library):
    errors, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            for passage in library.search("kitten feline pets", 50):
                if passage.ranks.bm25 is None and "Storm" in passage.text:
                    errors.append(passage)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(15):
            # The same name: each replaces the last in one transaction and takes its passages' numbers over.
            text = "Kittens are feline pets." if n % 2 else "Storm at sea: gale, thunder, lightning."
            ingest(library, upload("turn.md", text))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_no_more_passages_than_asked_for_and_fused_as_deep_as_said(open_library, embedder):
    library = open_library(embedder)
    ingest(library, upload("long.txt", "\n\n".join(f"Cats number {n} purr softly." for n in range(700))))
    found = library.search("cats purr", 50)
    assert len(found) == 50
    assert all(max(p.ranks.bm25 or 0, p.ranks.vector or 0) <= DEPTH for p in found)
