"""Retrieval quality: words, vectors and both fused, by embedder, on Cranfield and XQuAD.

    .uv/bin/uv run python -m tests.benchmarks.retrieval CRANFIELD.json XQUAD.json [--embedder NAME]… [--out RESULT.json]

CRANFIELD.json holds docs (title, text), queries and rel (the relevant documents of each, judged 1 to 4, taken as
relevant or not). XQUAD.json is as for `tests.benchmarks.service`: a question's answer is in one paragraph. Each
document goes through the library's own ingestion and search, as Markdown with its title for a heading: once as one
passage ("whole"), and once cut into passages of 192 tokens of SmolLM2 as the service does ("cut"), where a document
ranks as its best passage does.

The weight of vectors in the fusion is chosen on the even-numbered queries ("even"): the one with the best nDCG@10 on
Cranfield among those that lose no recall@1 to bm25 on XQuAD, documents whole. The odd ones ("odd") had no part in that.
--weights prints every weight tried. What vectors alone find ("vector") has lost what is both far and shares no word.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from app.library import counter_of
from ingest.database import Database
from ingest.documents import read_text
from ingest.embedder import Embedder
from ingest.embedders import load_embedder
from ingest.embedding import Vectors
from ingest.library import Filter, Library, migrations
from ingest.retrieval import fuse, rank
from kv import load_model

WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0)
WHOLE, CUT = 100_000, 192


@dataclass(frozen=True)
class Collection:
    """documents: (title, text). queries: (text, positions of the relevant documents)."""

    documents: list[tuple[str, str]]
    queries: list[tuple[str, frozenset[int]]]


def cranfield(path: Path) -> Collection:
    """The 1,400 abstracts and their 225 queries."""
    data = json.loads(path.read_text())
    place = {id: n for n, id in enumerate(data["docs"])}
    documents = [(document["title"], document["text"]) for document in data["docs"].values()]
    queries = [(text, frozenset(place[d] for d in data["rel"][id])) for id, text in data["queries"].items()]
    return Collection(documents, [query for query in queries if query[1]])


def xquad(path: Path) -> Collection:
    """The paragraphs and their questions."""
    documents: list[tuple[str, str]] = []
    queries: list[tuple[str, frozenset[int]]] = []
    for article in json.loads(path.read_text())["articles"]:
        for paragraph in article["paragraphs"]:
            queries += [(qa["question"], frozenset({len(documents)})) for qa in paragraph["qas"]]
            documents.append((article["title"].replace("_", " "), paragraph["text"]))
    return Collection(documents, queries)


Ranked = Sequence[int]
Measure = Callable[[Ranked, frozenset[int]], float]


def ndcg(ranked: Ranked, relevant: frozenset[int], depth: int = 10) -> float:
    """Normalised discounted cumulative gain with gains of 0 and 1."""
    gain = sum(1 / math.log2(rank + 1) for rank, item in enumerate(ranked[:depth], start=1) if item in relevant)
    return gain / sum(1 / math.log2(rank + 1) for rank in range(1, min(depth, len(relevant)) + 1))


def recall(depth: int) -> Measure:
    """The share of the relevant among the first `depth`."""
    return lambda ranked, relevant: len(relevant.intersection(ranked[:depth])) / len(relevant)


def reciprocal_rank(ranked: Ranked, relevant: frozenset[int]) -> float:
    """Of the first relevant one."""
    return next((1 / rank for rank, item in enumerate(ranked, start=1) if item in relevant), 0.0)


MEASURES: dict[str, dict[str, Measure]] = {
    "cranfield": {"nDCG@10": ndcg, "recall@100": recall(100)},
    "xquad": {"recall@1": recall(1), "recall@5": recall(5), "recall@10": recall(10), "MRR": reciprocal_rank},
}


def ranked_lists(
    collection: Collection, embedder: Embedder, count: Callable[[str], int], passage_tokens: int
) -> list[dict[str, list[int]]]:
    """For each query the documents' order by words ("bm25") and by vectors ("vector")."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "library.db", migrations)
        library = Library(database, count, passage_tokens)
        uploads = [
            # A name of digits, which no query finds a document by.
            read_text(f"{n}.md", f"# {title}\n\n{text}\n", max_bytes=10_000_000)
            for n, (title, text) in enumerate(collection.documents)
        ]
        job = library.wait(library.submit(uploads).id)
        assert job.status == "done", job
        library.close()
        vectors = Vectors(database, embedder)
        vectors.wait()
        place = {document.id: n for n, document in enumerate(job.documents)}
        sql = "SELECT number, document_id FROM passages"
        of = {number: place[id] for number, id in database.read(lambda db: db.execute(sql).fetchall())}

        def rank_one(query: str) -> dict[str, list[int]]:
            lists = database.read(lambda db: rank(db, vectors, query, Filter()))
            # A document is where its best passage is.
            return {name: list(dict.fromkeys(of[item] for item in items)) for name, items in lists.items()}

        found = [rank_one(query) for query, _ in collection.queries]
        vectors.stop()
        database.close()
        return found


def fused(lists: dict[str, list[int]], weight: float) -> list[int]:
    """The documents' order in the fusion."""
    return [item for item, _ in fuse([lists["bm25"], lists["vector"]], [1.0, weight])]


def mean(rankings: Sequence[Ranked], collection: Collection, measure: Measure, half: slice = slice(None)) -> float:
    """Over the queries, or half of them."""
    pairs = list(zip(rankings, (relevant for _, relevant in collection.queries), strict=True))[half]
    return round(sum(measure(ranked, relevant) for ranked, relevant in pairs) / len(pairs), 4)


@click.command()
@click.argument("cranfield_file", type=click.Path(exists=True, path_type=Path))
@click.argument("xquad_file", type=click.Path(exists=True, path_type=Path))
@click.option("--embedder", "settings", multiple=True, default=("wordllama",), show_default=True)
@click.option("--weights/--no-weights", "every", help="Print what every weight gives, on both halves.")
@click.option("--out", type=click.Path(path_type=Path))
def main(cranfield_file: Path, xquad_file: Path, settings: tuple[str, ...], every: bool, out: Path | None) -> None:
    """Measure."""
    collections = {"cranfield": cranfield(cranfield_file), "xquad": xquad(xquad_file)}
    count = counter_of(load_model())
    results = []
    for setting in settings:
        embedder = load_embedder(setting)
        assert embedder is not None
        for name, collection in collections.items():
            for passages, tokens in (("whole", WHOLE), ("cut", CUT)):
                lists = ranked_lists(collection, embedder, count, tokens)
                rankings = {
                    "bm25": [found["bm25"] for found in lists],
                    "vector": [found["vector"] for found in lists],
                    "fused": [fused(found, embedder.weight) for found in lists],
                }
                if every:
                    rankings |= {f"weight {w}": [fused(found, w) for found in lists] for w in WEIGHTS}
                for ranking, ranked in rankings.items():
                    halves = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
                    figures = {
                        half: {label: mean(ranked, collection, m, part) for label, m in MEASURES[name].items()}
                        for half, part in halves.items()
                    }
                    results.append(
                        {"embedder": setting, "data": name, "passages": passages, "ranking": ranking, **figures}
                    )
                    print(f"{setting:10} {name:10} {passages:6} {ranking:11} {json.dumps(figures)}", flush=True)
    if out is not None:
        out.write_text(json.dumps({"machine": platform.platform(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
