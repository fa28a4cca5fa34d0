"""Embedders: text in, unit vectors out. `wordllama`, the default, is a table of token vectors and needs no runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingest.embedder import MINILM, NONE, WORDLLAMA, Embedder, EmbedderError, Floats, encodable, package_folder, unit
from ingest.transformer import TransformerEmbedder, folder_files, minilm_files

_TEXTS_AT_ONCE = 256


def check_embedder(setting: str) -> None:
    """Raise EmbedderError unless `load_embedder(setting)` finds its files. Loads nothing."""
    if setting == WORDLLAMA:
        _wordllama_files()
    elif setting == MINILM:
        minilm_files()
    elif setting != NONE:
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
