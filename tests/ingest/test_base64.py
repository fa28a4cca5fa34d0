from __future__ import annotations

import base64
import random
import time

import pytest

from ingest.documents import read_upload

PICTURE = base64.b64encode(random.Random(1).randbytes(60_000)).decode()
WRAPPED = "\n".join(PICTURE[start : start + 76] for start in range(0, len(PICTURE), 76))
SOURCE = (
    "# Trip\n\nBefore. ![plan](data:image/png;base64,{run}) After.\n\n"
    "![][image1]\n\n[image1]: <data:image/png;base64,{run}>"
)


def read(text: str, name: str = "a.md") -> tuple[str, list[str]]:
    upload = read_upload(name, text.encode(), max_bytes=10_000_000)
    return upload.text, upload.warnings


def test_pictures_inside_markdown_leave_their_media_type():
    text, warnings = read(SOURCE.format(run=PICTURE))
    assert text == ("# Trip\n\nBefore. ![plan](data:image/png) After.\n\n![][image1]\n\n[image1]: <data:image/png>")
    assert warnings == [
        f"2 pieces of base64, {2 * len('data:image/png;base64,' + PICTURE)} characters, such as pictures"
    ]


@pytest.mark.parametrize("run", [PICTURE, f"\n{WRAPPED}\n"], ids=["one line", "wrapped"])
@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.py"])
def test_base64_that_says_nothing_of_itself_is_left_out(name, run):
    text, warnings = read(f"before {run} after", name)
    assert text.split()[0] == "before"
    assert text.split()[-1] == "after"
    assert "characters of base64]" in text
    assert len(text) < 100
    assert len(warnings) == 1


@pytest.mark.parametrize("run", ["ACGT" * 1000, "0123456789abcdef" * 500, "x" * 5000, "a/b/" * 900, "word " * 900])
def test_long_runs_of_other_things_stay(run):
    assert read(run) == (run, [])


def test_a_short_data_uri_stays():
    text = "![](data:image/gif;base64,R0lGODlhAQABAAAAACw=)"
    assert read(text) == (text, [])


def test_looking_for_base64_takes_no_longer_for_texts_that_nearly_are():
    started = time.process_time()
    read(("a" * 999 + ".") * 2000)
    read(("A" * 70 + "\n") * 20_000 + "-")
    read("data:image/png;base64" * 50_000)
    assert time.process_time() - started < 3
