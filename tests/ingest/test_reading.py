"""The process that reads and cuts: the same passages as here, for large texts too, and nobody waits for it in vain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from ingest.counting import TokenizerCounter
from ingest.database import Database
from ingest.errors import Unreadable
from ingest.library import Library, migrations
from ingest.pace import HURRY, REST, REST_SECONDS, WORK_SECONDS, Pace
from ingest.passages import Passage, cut
from ingest.reading import Cutting, Interrupted, Reader
from tests.ingest.helpers import words

MOST = 24
CONTROL = "|"


def counter() -> TokenizerCounter:
    """Counts as `helpers.words` does, save that a token for "|" is none of text's."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, CONTROL: 1, "é": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    return TokenizerCounter(tokenizer, [1])


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader(Cutting(counter().recipe, MOST))
    yield reader
    reader.rest()


def cut_by(reader: Reader, text: str, media_type: str) -> list[Passage] | None:
    return reader.cut(text, media_type, seconds=60, stop=lambda: False).passages


def test_a_counter_counts_what_text_becomes() -> None:
    count = counter()
    assert count("") == 0
    assert count("one two, three") == words("one two, three") == 6
    # Character by character once a control token is spelt, and without it.
    assert count("ab|cd") == 4
    assert count.recipe.counter()("ab|cd é") == count("ab|cd é") == 6


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(
        st.sampled_from("ab.é \n#`-|\t\u3002\U0001f600") | st.characters(exclude_categories=["Cs"]), min_size=1
    ),
    media_type=st.sampled_from(["text/plain", "text/markdown", "text/x-python", "text/csv"]),
)
def test_the_process_cuts_as_this_one_does(reader: Reader, text: str, media_type: str) -> None:
    assert cut_by(reader, text, media_type) == cut(text, media_type, counter(), MOST)


def test_more_passages_than_one_message_holds(reader: Reader, tmp_path: Path) -> None:
    text = "".join(f"Seal {n} dives for 😀 and comes up with fish number {n * n}.\n\n" for n in range(3000))
    path = tmp_path / "seals"
    path.write_text(text.replace("\n", "\r\n"))
    reading = reader.read(path, "seals.txt", None, seconds=60, stop=lambda: False)
    assert (reading.text, reading.media_type) == (text, "text/plain")
    assert reading.passages == cut(text, "text/plain", counter(), MOST)
    assert len(reading.passages or ()) > 1000
    assert "".join(passage.text for passage in reading.passages or ()) == text


def test_without_a_counter_it_says_where_to_cut() -> None:
    reader = Reader()
    reading = reader.cut("# Seals\n\nThey dive.", "text/markdown", seconds=60, stop=lambda: False)
    assert reading.passages is None
    assert [block.role for block in reading.blocks or ()] == ["heading", "body"]
    reader.rest()


def test_cutting_is_given_up_at_the_limit_and_when_nobody_wants_it(reader: Reader) -> None:
    slow = "word " * 2_000_000
    began = time.monotonic()
    with pytest.raises(Unreadable, match=r"reading and cutting it took more than 0\.5 s, the limit"):
        reader.cut(slow, "text/plain", seconds=0.5, stop=lambda: False)
    assert not reader.awake
    with pytest.raises(Interrupted):
        reader.cut(slow, "text/plain", seconds=60, stop=lambda: time.monotonic() > began + 1)
    assert time.monotonic() < began + 30
    assert cut_by(reader, "They dive.", "text/plain") == cut("They dive.", "text/plain", counter(), MOST)


def test_the_process_rests_as_long_as_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr("ingest.pace.time.sleep", rests.append)
    before = signal.getsignal(signal.SIGALRM)
    heard, words = os.pipe()
    pace = Pace(heard)

    def work(alarms: int) -> int:
        """Rests during so many alarms, or none."""
        rests.clear()
        until = time.monotonic() + alarms * WORK_SECONDS
        with pace.kept():
            while time.monotonic() < until:
                pass
        return len(rests)

    try:
        assert work(alarms=5) == 0
        os.write(words, HURRY + REST)
        assert work(alarms=5) > 0
        assert set(rests) == {REST_SECONDS}
        assert work(alarms=5) > 0
        os.write(words, HURRY)
        # It may be told in the midst of work.
        work(alarms=2)
        assert work(alarms=5) == 0
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(heard)
        os.close(words)


def test_what_is_cut_while_it_rests_is_the_same() -> None:
    text = "The seal dives. " * 20_000
    asked: list[bool] = []
    reader = Reader(Cutting(counter().recipe, MOST), busy=lambda: bool(asked.append(True)) or len(asked) % 8 < 6)
    assert cut_by(reader, text, "text/plain") == cut(text, "text/plain", counter(), MOST)
    assert asked
    reader.rest()


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    reader = Reader(Cutting(counter().recipe, 0))
    with pytest.raises(Unreadable, match="max_tokens must be at least 16, not 0"):
        cut_by(reader, "seal", "text/plain")
    reader.rest()


@pytest.mark.parametrize("length", [10, 20_000, 300_000])
def test_a_library_keeps_the_same_passages_wherever_they_were_cut(tmp_path: Path, length: int) -> None:
    text = ("The seal dives. " * (length // 16 + 1))[:length] + "\n"
    database = Database(tmp_path / "library.db", migrations)
    library = Library(database, counter(), 40)
    job = library.submit([library.receive_text("seal.txt", text, max_bytes=1_000_000)])
    (document,) = library.wait(job.id, 60).documents
    assert document.status == "done"
    stored, cursor = [], None
    while True:
        page = library.passages(document.id, cursor, 200)
        stored += [(passage.start, passage.end, passage.tokens, passage.text) for passage in page.items]
        if (cursor := page.next_cursor) is None:
            break
    assert stored == [(p.start, p.end, p.tokens, p.text) for p in cut(text, "text/plain", counter(), 40)]
    library.close()
    database.close()
