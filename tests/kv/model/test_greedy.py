"""The embedded model's greedy answers from kernels, against mlx-lm's own model dequantised to float32."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model

from kv import LoadedModel, load_model
from kv.session.session import NewBlock, Session

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux's CPUs"),
]
PASSAGE = (
    "The ferry to Hestholmen leaves the pier in Bergen at noon and returns at six, unless the wind is from the west. "
    "Tickets cost forty crowns and are sold by the harbour master, whose office is closed on Mondays. "
)
QUESTIONS = ["When does the ferry return?", "What does a ticket cost?", "Who sells tickets?"]


@pytest.fixture(scope="module")
def stock() -> Any:
    model = load_model(on_gpu=True).model
    # First: scales of 16 bits would give weights of 16 bits, which are rounded.
    model.set_dtype(mx.float32)
    return dequantize_model(model)


def check(model: LoadedModel, stock: Any, passage: str, question: str, count: int) -> None:
    """Each greedy token is the one that float32 would have taken, or one within 1e-3 of the logits' range of it."""
    template = model.template
    blocks = [
        NewBlock("passage", template.wrap(template.passage, passage)),
        NewBlock("question", template.wrap(template.user, question)),
    ]
    session = Session(model, budget=2048, prefill_step=256)
    prompt = template.assistant.before
    for _ in session.prefill(blocks, answer=NewBlock("answer", prompt)):
        pass
    given, token = [], prompt[-1]
    while len(given) < count and (not given or given[-1] not in model.stop_ids):
        token = int(np.array(session.step(token)).argmax())
        given.append(token)
    text = [*blocks[0].tokens, *blocks[1].tokens, *prompt, *given]
    wanted = np.array(stock(mx.array([text]))[0, -len(given) - 1 : -1])
    for logits, token in zip(wanted, given, strict=True):
        assert logits.max() - logits[token] <= 1e-3 * np.ptp(logits)


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_float32(smollm2: LoadedModel, stock: Any, question: str) -> None:
    check(smollm2, stock, PASSAGE * 2, question, 8)


@pytest.mark.slow
@pytest.mark.skipif("XQUAD_FILE" not in os.environ, reason="XQUAD_FILE names no xquad-dev.json")
def test_fifty_held_questions_are_answered_as_by_float32(smollm2: LoadedModel, stock: Any) -> None:
    paragraphs = [
        paragraph
        for article in json.loads(Path(os.environ["XQUAD_FILE"]).read_text())["articles"]
        for paragraph in article["paragraphs"]
    ]
    for paragraph in paragraphs[:50]:
        check(smollm2, stock, paragraph["text"], paragraph["qas"][0]["question"], 16)
