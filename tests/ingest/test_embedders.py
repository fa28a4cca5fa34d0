"""Embedders against the packages that their weights come from."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingest.embedder import EmbedderError, package_folder
from ingest.embedders import check_embedder, load_embedder
from ingest.transformer import minilm_files

TEXTS = ["The ferry to Bodo leaves at 6:15.", "def f(x):\n    return x", "日本 🦜", "a", "word " * 900]


@pytest.fixture(scope="module")
def wordllama():
    return load_embedder("wordllama")


@pytest.fixture(scope="module")
def minilm():
    return load_embedder("minilm")


def test_wordllama_gives_the_vectors_of_its_own_package(wordllama):
    from wordllama import WordLlama

    own = WordLlama.load(cache_dir=package_folder("wordllama"), disable_download=True)
    expected = own.embed(TEXTS, norm=True)
    np.testing.assert_allclose(wordllama.embed(TEXTS), expected, atol=1e-5)
    assert wordllama.dimension == expected.shape[1] == 256


def test_minilm_gives_the_vectors_of_a_plain_run_of_its_model(minilm):
    import onnxruntime
    from tokenizers import Tokenizer

    model, tokenizer_file, _ = minilm_files()
    session = onnxruntime.InferenceSession(str(model))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    for text, vector in zip(TEXTS, minilm.embed(TEXTS), strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        mean = session.run(None, feeds)[0][0].mean(axis=0)
        # int8 activations are scaled by batch, so a text's neighbours show a little.
        assert vector @ (mean / np.linalg.norm(mean)) > 0.98


@pytest.mark.parametrize("name", ["wordllama", "minilm"])
def test_the_nearest_text_is_the_one_that_means_the_same(request, name):
    embedder = request.getfixturevalue(name)
    texts = ["Cats are small animals that purr.", "The stock market fell today.", "A ship crossed the ocean."]
    found = embedder.embed(["kitten", "shares lost value", "vessel at sea"]) @ embedder.embed(texts).T
    assert found.argmax(axis=1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["wordllama", "minilm"])
@pytest.mark.parametrize("texts", [[], [""], ["\ud800", "\0", " \n", "", "x" * 100_000, "🦜" * 30_000]])
def test_any_text_is_a_unit_vector_or_zero(request, name, texts):
    embedder = request.getfixturevalue(name)
    vectors = embedder.embed(texts)
    assert vectors.shape == (len(texts), embedder.dimension)
    assert vectors.dtype == np.float32
    lengths = np.linalg.norm(vectors, axis=1)
    assert np.all(np.isclose(lengths, 1, atol=1e-4) | (lengths == 0))


def test_none_is_no_embedder():
    check_embedder("none")
    assert load_embedder("none") is None


@pytest.mark.parametrize("setting", ["wordlama", "", "/nowhere/at/all", "~no-such-user/x", "a\0b"])
def test_an_unknown_embedder_is_refused_by_name(setting, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for refuse in (check_embedder, load_embedder):
        with pytest.raises(EmbedderError) as caught:
            refuse(setting)
        assert str(caught.value).startswith(f"embedder {setting!r} is neither wordllama, minilm, none nor")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("ingest.embedder.find_spec", lambda _: None)
    with pytest.raises(EmbedderError, match="pip install wordllama"):
        check_embedder("wordllama")
    with pytest.raises(EmbedderError, match=r"keepwhole\[minilm\]"):
        check_embedder("minilm")


def test_a_folder_of_a_sentence_transformer(tmp_path, minilm):
    with pytest.raises(EmbedderError, match=r"onnx/model\.onnx is missing"):
        check_embedder(str(tmp_path))
    model, tokenizer, _ = minilm_files()
    (tmp_path / "onnx").mkdir()
    shutil.copy(model, tmp_path / "onnx" / "model.onnx")
    with pytest.raises(EmbedderError, match=r"tokenizer\.json is missing"):
        check_embedder(str(tmp_path))
    shutil.copy(tokenizer, tmp_path / "tokenizer.json")
    check_embedder(str(tmp_path))
    folder = load_embedder(str(tmp_path))
    assert folder is not None
    assert (folder.name, folder.dimension) == (minilm.name, 384)
    np.testing.assert_allclose(folder.embed(TEXTS), minilm.embed(TEXTS), atol=1e-5)
    # Its own settings are followed: the first token's vector instead of the mean.
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    first = load_embedder(str(tmp_path))
    assert first is not None
    assert np.abs(first.embed(TEXTS[:1]) - minilm.embed(TEXTS[:1])).max() > 0.01


def test_loading_leaves_logging_as_it_was():
    load = "from ingest.embedders import load_embedder; load_embedder('wordllama')"
    code = f"import logging; {load}; print(logging.root.level)"
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert int(shown) == logging.WARNING
