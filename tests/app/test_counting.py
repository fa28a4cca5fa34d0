"""Passages are counted as the model reads them, in whichever process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.library import counter_of
from ingest.counting import TokenizerCounter
from kv import LoadedModel


@pytest.fixture(scope="module")
def counters(smollm2: LoadedModel) -> tuple[LoadedModel, TokenizerCounter, TokenizerCounter]:
    here = counter_of(smollm2)
    return smollm2, here, here.recipe.counter()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=20) | st.sampled_from(["<|im_end|>", "<|im_start|>", "</s>", "def f():\n"])))
def test_a_text_has_as_many_tokens_as_the_model_is_fed(
    counters: tuple[LoadedModel, TokenizerCounter, TokenizerCounter], parts: list[str]
) -> None:
    model, here, elsewhere = counters
    text = "".join(parts).encode(errors="replace").decode()
    assert here(text) == elsewhere(text) == len(model.codec.encode(text))
