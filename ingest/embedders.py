"""Embedders: text in, unit vectors out. `wordllama`, the default, is a table of token vectors and needs no runtime."""

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
_TEXTS_AT_ONCE = 256


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


def check_embedder(setting: str) -> None:
    """Raise EmbedderError unless `load_embedder(setting)` finds its files. Loads nothing."""
    if setting == WORDLLAMA:
        _wordllama_files()
    elif setting == MINILM:
        from ingest.transformer import minilm_files

        minilm_files()
    elif setting != NONE:
        from ingest.transformer import folder_files

        folder_files(setting)


def load_embedder(setting: str) -> Embedder | None:
    """The embedder that a setting names; None for "none".

    setting: "wordllama", "minilm" (with the extra of that name), or a sentence-transformers folder with an ONNX export.
    Raises EmbedderError.
    """
    if setting == NONE:
        return None
    if setting == WORDLLAMA:
        return StaticEmbedder(*_wordllama_files())
    from ingest.transformer import TransformerEmbedder, folder_files, minilm_files

    if setting == MINILM:
        return TransformerEmbedder(*minilm_files(), setting)
    return TransformerEmbedder(*folder_files(setting), setting)


class StaticEmbedder:
    """The mean of the tokens' vectors: WordLlama's 256 dimensions, cut out of a language model's embedding table."""

    setting: str | None = WORDLLAMA
    name = "wordllama-256"
    dimension = 256
    # Chosen on half the queries of two data sets, see tests/benchmarks/retrieval.py.
    weight = 0.2
    # Of XQuAD's questions 98 in 100 are nearer than this to their paragraph; most small talk is further from all.
    least_cosine = 0.2

    def __init__(self, weights: Path, tokenizer: Path) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        # Read without importing the package: that would set the root logger to INFO.
        self._table: Floats = load_file(weights)["embedding.weight"].astype(np.float32)
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        # Padding would make the longest text of a batch the cost of every text.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def embed(self, texts: Sequence[str]) -> Floats:
        """As in `Embedder`."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            batch = [encodable(text) for text in texts[start : start + _TEXTS_AT_ONCE]]
            for row, encoding in enumerate(self._tokenizer.encode_batch(batch, add_special_tokens=False), start):
                if encoding.ids:
                    vectors[row] = self._table[encoding.ids].mean(axis=0)
        return unit(vectors)


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


def _wordllama_files() -> tuple[Path, Path]:
    folder = package_folder("wordllama")
    if folder is None:
        raise EmbedderError(
            f"embedder {WORDLLAMA!r}: its package is not installed (it has wheels for Python 3.11 to 3.13 on macOS and"
            f" on x86-64 Linux); pip install wordllama, or choose {NONE!r} to search by words alone"
        )
    weights = folder / "weights" / "l2_supercat_256.safetensors"
    tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    for file in (weights, tokenizer):
        if not file.is_file():
            raise EmbedderError(f"embedder {WORDLLAMA!r}: {file} is missing; reinstall wordllama")
    return weights, tokenizer
