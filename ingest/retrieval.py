"""Search: full text and vectors, each filtered inside, made one by weighted reciprocal rank fusion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sqlite_utils

from ingest.database import Database
from ingest.documents import check_metadata
from ingest.embedding import Vectors
from ingest.errors import InvalidInput
from ingest.queries import fts_query
from ingest.records import PASSAGE_COLUMNS, Filter, Ranks, StoredPassage, to_passage
from ingest.vectors import Ints

# Cormack, Clarke and Buettcher (SIGIR 2009): how much the first ranks count above the next.
RRF_K = 60
# How deep each list is fused. Deeper changes nothing that can still reach the top 50.
DEPTH = 200

_KINDS = ("prose", "code", "table", "list")
_MAX_PATH = 512


def fuse(lists: Sequence[Sequence[int]], weights: Sequence[float], k: int = RRF_K) -> list[tuple[int, float]]:
    """Weighted reciprocal rank fusion: (item, score), best first, equals by item.

    An item earns `weight / (k + rank)` from each list that has it, ranks from 1. Scores are scaled so that 1 is the
    first of every list. No list repeats an item.
    """
    scores: dict[int, float] = {}
    for items, weight in zip(lists, weights, strict=True):
        for rank, item in enumerate(items, start=1):
            scores[item] = scores.get(item, 0.0) + weight / (k + rank)
    # Term by term, as the items' own: the first of every list scores exactly 1.
    first = sum(weight / (k + 1) for weight in weights)
    return sorted(((item, score / first) for item, score in scores.items()), key=lambda pair: (-pair[1], pair[0]))


def search(database: Database, vectors: Vectors | None, query: str, top_k: int, filter: Filter) -> list[StoredPassage]:
    """The `top_k` passages that match `query` best; see `Library.search`."""

    def work(db: sqlite_utils.Database) -> list[StoredPassage]:
        lists = rank(db, vectors, query, filter)
        weights = {"bm25": 1.0, "vector": vectors.embedder.weight if vectors else 0.0}
        fused = fuse(list(lists.values()), [weights[name] for name in lists])
        return _passages(db, fused[:top_k], lists)

    return database.read(work)


def rank(
    db: sqlite_utils.Database, vectors: Vectors | None, query: str, filter: Filter, depth: int = DEPTH
) -> dict[str, list[int]]:
    """The lists to fuse, "bm25" and, where there are vectors, "vector": passages' numbers, best first; {} for no word.

    Each is at most `depth` long. Raises InvalidInput for a bad filter.
    """
    conditions, bound = _conditions(filter)
    match = fts_query(query)
    if match is None:
        return {}
    near = None
    if vectors is not None:
        documents = _documents(db, conditions, bound) if conditions else None
        near = vectors.search(query, depth, documents, filter.kind)
    if filter.kind is not None:
        conditions, bound = [*conditions, "passages.kind = ?"], [*bound, filter.kind]
    lists = {"bm25": _bm25(db, match, conditions, bound, depth)}
    if vectors is not None and near is not None:
        known, least = frozenset(lists["bm25"]), vectors.embedder.least_cosine
        # What no word matches must be near: the nearest of what has nothing to do with the query is no answer.
        lists["vector"] = [item for item, cosine in _by_passage(db, near).items() if cosine >= least or item in known]
    return lists


def _bm25(db: sqlite_utils.Database, match: str, conditions: list[str], bound: list[Any], depth: int) -> list[int]:
    if conditions:
        sql = (
            "SELECT passages.number FROM passages_fts JOIN passages ON passages.number = passages_fts.rowid"
            " JOIN documents ON documents.id = document_id"
            f" WHERE {' AND '.join(['passages_fts MATCH ?', *conditions])}"
            " ORDER BY bm25(passages_fts), passages.number LIMIT ?"
        )
    else:
        sql = "SELECT rowid FROM passages_fts WHERE passages_fts MATCH ? ORDER BY rank, rowid LIMIT ?"
    return [row[0] for row in db.execute(sql, [match, *bound, depth])]


def _documents(db: sqlite_utils.Database, conditions: list[str], bound: list[Any]) -> Ints:
    """The numbers of the documents that a filter lets through."""
    # One string: a row for each of many documents would hold the interpreter's lock.
    sql = f"SELECT group_concat(number) FROM documents WHERE {' AND '.join(conditions)}"
    numbers: str | None = db.execute(sql, bound).fetchone()[0]
    return np.fromstring(numbers or "", dtype=np.int64, sep=",")


def _by_passage(db: sqlite_utils.Database, near: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Cosines by passage number, nearest first. A vector whose passage is gone by now is left out."""
    rows = db.execute(
        "SELECT number, passage FROM vectors WHERE number IN (SELECT value FROM json_each(?))",
        [json.dumps([number for number, _ in near])],
    )
    passages: dict[int, int] = dict(rows.fetchall())
    return {passages[number]: cosine for number, cosine in near if number in passages}


def _passages(
    db: sqlite_utils.Database, fused: Sequence[tuple[int, float]], lists: Mapping[str, Sequence[int]]
) -> list[StoredPassage]:
    rows = db.execute(
        f"SELECT passages.number, {PASSAGE_COLUMNS} FROM passages JOIN documents ON documents.id = document_id"
        " WHERE passages.number IN (SELECT value FROM json_each(?))",
        [json.dumps([item for item, _ in fused])],
    )
    by_number = {row[0]: row[1:] for row in rows}
    ranks = {name: {item: rank for rank, item in enumerate(items, start=1)} for name, items in lists.items()}
    return [
        to_passage(by_number[item], score, Ranks(**{name: places.get(item) for name, places in ranks.items()}))
        for item, score in fused
    ]


def _conditions(filter: Filter) -> tuple[list[str], list[Any]]:
    """What a filter asks of the document, as SQL. Raises InvalidInput; the kind is checked, and asked elsewhere."""
    conditions: list[str] = []
    bound: list[Any] = []
    if filter.document_id is not None:
        ids = [filter.document_id] if isinstance(filter.document_id, str) else filter.document_id
        conditions.append("documents.id IN (SELECT value FROM json_each(?))")
        bound.append(json.dumps(ids))
    if filter.name is not None:
        conditions.append("documents.name = ?")
        bound.append(filter.name)
    if filter.path is not None:
        conditions.append("(documents.name = ? OR documents.name GLOB ?)")
        bound += _path(filter.path)
    if filter.kind is not None and filter.kind not in _KINDS:
        raise InvalidInput("filter.kind", filter.kind, f"it must be one of {', '.join(_KINDS)}")
    for key, value in check_metadata(filter.metadata, "filter.metadata").items():
        # json_each, since a path for json_extract cannot hold every key.
        conditions.append(
            "EXISTS (SELECT 1 FROM json_each(documents.metadata) AS entry"
            f" WHERE entry.key = ? AND {_same_value(value)})"
        )
        bound += [key] if value is None or isinstance(value, bool) else [key, value]
    return conditions, bound


def _path(path: str) -> tuple[str, str]:
    """(the exact name, the GLOB pattern) of which a name must match either; see `Filter`."""
    if not 1 <= len(path) <= _MAX_PATH:
        raise InvalidInput("filter.path", path, f"it must have 1 to {_MAX_PATH} characters and this has {len(path)}")
    if "\0" in path or any("\ud800" <= character <= "\udfff" for character in path):
        raise InvalidInput("filter.path", path, "it must be valid text without NUL")
    # A bracket is a character of a name here, as in "[id].ts", though SQLite's GLOB would open a set with it.
    pattern = path.replace("[", "[[]")
    return (path, pattern) if "*" in path or "?" in path else (path.rstrip("/"), pattern.rstrip("/") + "/*")


def _same_value(value: object) -> str:
    if value is None:
        return "entry.type = 'null'"
    if isinstance(value, bool):
        return "entry.type = 'true'" if value else "entry.type = 'false'"
    if isinstance(value, str):
        return "entry.type = 'text' AND entry.value = ?"
    return "entry.type IN ('integer', 'real') AND entry.value = ?"
