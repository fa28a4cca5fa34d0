"""Passages' vectors: stored with them, kept in memory in the order of commits, made up for where they are missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import sqlite_utils

from ingest.database import Database
from ingest.embedder import Embedder, Floats, embed_passages
from ingest.vectors import Ints, VectorIndex, VectorRow

_log = logging.getLogger(__name__)

_BATCH = 64
_RETRY_SECONDS = 5.0


class VectorsState(msgspec.Struct, frozen=True, kw_only=True):
    """How far search by vectors is. embedder: its name. ready: whether the vectors there are have been loaded.

    missing: passages that have no vector of this embedder yet, which only bm25 finds; they are being embedded.
    """

    embedder: str
    ready: bool
    missing: int


class Change(NamedTuple):
    """What a transaction did to the vectors: documents' numbers that are gone, and rows that came."""

    removed: list[int]
    added: list[VectorRow]


class Vectors:
    """The vectors of one embedder, in the database and in memory.

    A background thread loads what is stored, then embeds what has no vector of this embedder: passages older than
    vectors, or embedded by another one. It can be stopped at any moment and goes on at the next start.
    """

    def __init__(self, database: Database, embedder: Embedder) -> None:
        self.embedder = embedder
        self._database = database
        self._index = VectorIndex(embedder.dimension)
        self._number = 0
        self._missing = 0
        self._ready = False
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedding", daemon=True)
        self._thread.start()

    @property
    def state(self) -> VectorsState:
        """How far it is."""
        return VectorsState(embedder=self.embedder.name, ready=self._ready, missing=self._missing)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the vectors take."""
        return self._index.nbytes

    def wait(self, timeout: float | None = None) -> bool:
        """Block until every passage has its vector: True; or for `timeout` seconds: False."""
        return self._settled.wait(timeout)

    def stop(self) -> None:
        """Stop the background thread; what it has written stays."""
        self._stopping.set()
        self._thread.join()

    def embed(self, passages: Iterable[tuple[str, str]]) -> list[bytes]:
        """The vectors of (heading, text), as they are stored."""
        return embed_passages(self.embedder, passages)

    def insert(self, db: sqlite_utils.Database, vectors: Iterable[tuple[str, bytes]]) -> list[VectorRow]:
        """Store (passage id, vector), inside a write; those of passages that are gone are left out."""
        number, rows = self._embedder_number(db), []
        for passage_id, vector in vectors:
            passage = db.execute(
                "SELECT passages.number, documents.number, kind FROM passages"
                " JOIN documents ON documents.id = document_id WHERE passages.id = ?",
                [passage_id],
            ).fetchone()
            if passage is None:
                continue
            # Not an update: a vector that changes gets a new number, or a search under way would mistake it.
            stored = db.execute(
                "INSERT OR REPLACE INTO vectors (passage, embedder, vector) VALUES (?, ?, ?)",
                [passage[0], number, vector],
            )
            assert stored.lastrowid is not None
            rows.append(VectorRow(stored.lastrowid, passage[1], passage[2], vector))
        return rows

    def apply(self, change: Change) -> None:
        """Do to the memory what a transaction did to the database. On the writer thread, once it is committed."""
        # Before that, loading will find it.
        if self._ready:
            self._index.remove_documents(change.removed)
            self._index.add(change.added)

    def search(
        self, query: str, count: int, documents: Ints | None, kind: str | None
    ) -> list[tuple[int, float]] | None:
        """The (vector number, cosine) of the nearest passages; None before they are loaded, and for no token."""
        if not self._ready:
            return None
        vector: Floats = self.embedder.embed([query])[0]
        return self._index.search(vector, count, documents, kind) if np.any(vector) else None

    def _run(self) -> None:
        done = 0
        while not self._stopping.is_set():
            try:
                if not self._ready:
                    self._database.write(self._load, self._loaded).result()
                done, embedded = self._embed_after(done)
                if embedded == 0:
                    self._missing = 0
                    self._settled.set()
                    return
                self._missing = max(0, self._missing - embedded)
            except Exception:
                # A full disk, say. Search goes on with what there is.
                _log.exception("embedding failed; trying again in %s s", _RETRY_SECONDS)
                self._stopping.wait(_RETRY_SECONDS)

    def _embed_after(self, number: int) -> tuple[int, int]:
        """Embed the next passages after this number that have no vector: (the last one's number, how many)."""
        batch = self._database.read(lambda db: self._without_vector(db, number))
        if not batch:
            return number, 0
        vectors = self.embed((heading, text) for _, _, heading, text in batch)
        pairs = [(id, vector) for (_, id, _, _), vector in zip(batch, vectors, strict=True)]
        self._database.write(lambda db: Change([], self.insert(db, pairs)), self.apply).result()
        return batch[-1][0], len(batch)

    def _load(self, db: sqlite_utils.Database) -> None:
        """Read all vectors, as a write, so that no other write comes between them and what follows."""
        self._index = VectorIndex(self.embedder.dimension)
        self._number = self._embedder_number(db)
        found = db.execute(
            "SELECT vectors.number, documents.number, kind, vector FROM vectors"
            " JOIN passages ON passages.number = passage JOIN documents ON documents.id = document_id"
            " WHERE embedder = ?",
            [self._number],
        )
        while rows := found.fetchmany(_BATCH * 64):
            self._index.add([VectorRow(*row) for row in rows])
        self._missing = db.execute("SELECT count(*) FROM passages").fetchone()[0] - len(self._index)

    def _loaded(self, _: None) -> None:
        self._ready = True

    def _embedder_number(self, db: sqlite_utils.Database) -> int:
        name = self.embedder.name
        db.execute("INSERT OR IGNORE INTO embedders (name, dimension) VALUES (?, ?)", [name, self.embedder.dimension])
        number: int = db.execute("SELECT number FROM embedders WHERE name = ?", [name]).fetchone()[0]
        return number

    def _without_vector(self, db: sqlite_utils.Database, after: int) -> Sequence[tuple[int, str, str, str]]:
        rows: list[tuple[int, str, str, str]] = db.execute(
            "SELECT passages.number, id, heading, text FROM passages"
            " LEFT JOIN vectors ON passage = passages.number AND embedder = ?"
            " WHERE passages.number > ? AND vectors.number IS NULL ORDER BY passages.number LIMIT ?",
            [self._number, after, _BATCH],
        ).fetchall()
        return rows
