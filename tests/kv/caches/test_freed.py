"""What a session lets go of is free at once, with Python's collector off: its cycles would hold K/V for minutes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest

from kv import LoadedModel, Session
from kv.session.session import NewBlock
from tests.kv.feeding import tiny_llama
from tests.kv.streams import SYSTEM, loaded, words

VOCABULARY = 20_000
# Masks and the like, which are small and stay. A block of these sessions takes twice that.
SMALL = 40_000


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded(tiny_llama(width=16, words=VOCABULARY))


@pytest.fixture
def base(llama: LoadedModel) -> Iterator[int]:
    """Bytes that are held before a session comes."""
    warm = filled(llama)
    for block in ("b0", "b2"):
        # What scoring keeps for good, it has now.
        warm.evict(block)
    warm.close()
    gc.collect()
    gc.disable()
    yield mx.get_active_memory()
    gc.enable()


def filled(model: LoadedModel) -> Session:
    session = Session(model, budget=512, prefill_step=64)
    blocks = [NewBlock("system", words(1, SYSTEM), pinned=True), *(NewBlock(f"b{i}", words(i, 100)) for i in range(4))]
    for _ in session.prefill(blocks):
        pass
    return session


def test_a_closed_session_holds_nothing(llama: LoadedModel, base: int) -> None:
    session = filled(llama)
    assert mx.get_active_memory() - base >= session.nbytes
    session.close()
    del session
    assert mx.get_active_memory() - base < SMALL


def test_what_is_evicted_is_free_when_it_has_left(llama: LoadedModel, base: int) -> None:
    session = filled(llama)
    for block in ("b0", "b2"):
        session.evict(block)
        assert mx.get_active_memory() - base < session.nbytes + SMALL
    session.take_out(["b1"])
    assert mx.get_active_memory() - base < session.nbytes + SMALL
    session.close()


def test_the_last_logits_do_not_hold_those_of_the_whole_pass(llama: LoadedModel, base: int) -> None:
    session = filled(llama)
    for _ in session.prefill([], answer=NewBlock("answer", words(9, 60)), logits=True):
        pass
    assert session.next_logits is not None
    one = session.next_logits.nbytes
    assert one == 4 * VOCABULARY
    assert mx.get_active_memory() - base < session.nbytes + one + SMALL
    session.close()
