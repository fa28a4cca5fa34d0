"""What search needs of an embedder, and what those that there are have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

WORDLLAMA = "wordllama"
MINILM = "minilm"
NONE = "none"

# A query may be megabytes of text; beyond this it says nothing new about what is looked for.
_MAX_CHARS = 20_000


class EmbedderError(ValueError):
    """An embedder that is not known or not installed; the message says what there is, or what to install."""


class Embedder(Protocol):
    """What search needs of an embedder. `embed` may be called from any thread.

    setting: what `load_embedder` makes another by, in another process; None if that cannot be done.
    name: kept beside each vector; another name means that passages have to be embedded anew.
    dimension: of a vector.
    weight: of its ranks against bm25's 1, in rank fusion.
    least_cosine: what no word of a query matches must be at least this near it to be found at all.
    """

    setting: str | None
    name: str
    dimension: int
    weight: float
    least_cosine: float

    def embed(self, texts: Sequence[str]) -> Floats:
        """Unit vectors [len(texts), dimension]; a row of zeros for a text without tokens."""
        ...


def embed_passages(embedder: Embedder, passages: Iterable[tuple[str, str]]) -> list[bytes]:
    """The vectors of (heading, text), as they are stored: float16, little-endian."""
    vectors = embedder.embed([f"{heading}\n{text}" if heading else text for heading, text in passages])
    return [vector.tobytes() for vector in vectors.astype("<f2")]


def encodable(text: str) -> str:
    """`text` as tokenizers take it: not too long, and without lone surrogates."""
    return text[:_MAX_CHARS].encode(errors="replace").decode()


def unit(vectors: Floats) -> Floats:
    """Rows scaled to length 1; rows of zeros stay."""
    lengths = np.sqrt(np.sum(vectors * vectors, axis=1, keepdims=True))
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)


def package_folder(package: str) -> Path | None:
    """Where a package's files are, found without importing it; None if it is not installed."""
    spec = find_spec(package)
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])
