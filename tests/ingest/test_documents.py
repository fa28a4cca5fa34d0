from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.documents import check_name, printable_name, read_text, read_upload
from ingest.errors import InvalidInput, TooLarge, Unsupported

MAX = 1000


@pytest.mark.parametrize(
    "data",
    [
        "grün\r\nλ\rβ\n".encode(),
        "grün\r\nλ\rβ\n".encode("utf-8-sig"),
        b"\xff\xfe" + "grün\r\nλ\rβ\n".encode("utf-16-le"),
        b"\xfe\xff" + "grün\r\nλ\rβ\n".encode("utf-16-be"),
    ],
    ids=["utf-8", "utf-8 with mark", "utf-16-le", "utf-16-be"],
)
def test_reads_unicode_with_and_without_mark_and_normalises_line_ends(data):
    upload = read_upload("a.txt", data, max_bytes=MAX)
    assert upload.text == "grün\nλ\nβ\n"
    assert (upload.size, upload.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"ab\0c", 2),
        (b"\xc3\xbc\0", 2),
        (b"\xef\xbb\xbfab\xff", 5),
        (b"\xff\xfea\0\0\0", 4),
        (b"\xff\xfea\0\0\xd8", 4),
        (b"\xfe\xff\0a\0", 4),
    ],
)
def test_bytes_that_are_not_text_are_named_with_their_offset(data, offset):
    with pytest.raises(Unsupported, match=rf"notes\.txt.*byte {offset} is"):
        read_upload("notes.txt", data, max_bytes=MAX)


@pytest.mark.parametrize(("text", "offset"), [("ü\0", 1), ("ab\ud800", 2)])
def test_text_that_cannot_be_stored_is_named_with_its_offset(text, offset):
    with pytest.raises(Unsupported, match=f"character {offset} is"):
        read_text("a.txt", text, max_bytes=MAX)


def test_read_text_measures_its_utf8_bytes():
    upload = read_text("a.md", "ü\r\n", max_bytes=4)
    assert (upload.text, upload.size, upload.media_type) == ("ü\n", 4, "text/markdown")
    assert upload.sha256 == hashlib.sha256(b"\xc3\xbc\r\n").hexdigest()


def test_too_large_names_both_numbers():
    read_upload("a.txt", b"x" * 10, max_bytes=10)
    with pytest.raises(TooLarge, match=r"10 bytes and this has 11") as caught:
        read_upload("a.txt", b"x" * 11, max_bytes=10)
    assert (caught.value.size, caught.value.max_bytes) == (11, 10)


@pytest.mark.parametrize("data", [b"", b" \r\n\t", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_blank_documents_are_refused(data):
    with pytest.raises(InvalidInput, match=r"a\.txt.*must not be blank"):
        read_upload("a.txt", data, max_bytes=MAX)


@pytest.mark.parametrize("name", ["", "  ", "x" * 513, "a\nb", "a\0b", "\x1b[31m", "a\u2028b", "\ud800", "\x7f"])
def test_refuses_names_that_are_blank_long_or_unprintable(name):
    with pytest.raises(InvalidInput) as caught:
        read_upload(name, b"text", max_bytes=MAX)
    assert caught.value.field == "name"
    assert str(caught.value).isprintable()


def test_names_are_data_and_may_look_like_paths():
    assert read_upload("../../etc/passwd", b"x", max_bytes=MAX).name == "../../etc/passwd"


@given(st.text(st.characters(), max_size=600))
def test_printable_name_makes_any_name_acceptable(name):
    check_name(printable_name(name))


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("a.md", None, "text/markdown"),
        ("A.MARKDOWN", None, "text/markdown"),
        ("a.rst", None, "text/plain"),
        ("README", None, "text/plain"),
        ("notes.2024", None, "text/plain"),
        ("a.py", None, "text/x-python"),
        ("a.tsx", "application/octet-stream", "text/x-typescript"),
        ("a.ts", "video/mp2t", "text/x-typescript"),
        ("a.rs", "text/rust", "text/x-rust"),
        ("a.php", "application/x-php", "text/x-php"),
        ("a.csv", None, "text/x-csv"),
        ("a.vue", None, "text/x-vue"),
        ("a.ipynb", None, "text/x-json"),
        ("a.cts", "text/plain; charset=utf-8", "text/plain"),
        ("data", "application/json; charset=utf-8", "text/x-json"),
        ("a.txt", "Text/Markdown; charset=utf-8", "text/markdown"),
        ("a", "text/x-zig", "text/x-zig"),
        ("a", "text/vcard", "text/plain"),
        ("sales.csv", "application/vnd.ms-excel", "text/x-csv"),
        ("a.rs", "application/rls-services+xml", "text/x-rust"),
        ("a.ts", "video/vnd.dlna.mpeg-tts", "text/x-typescript"),
        ("map.geojson", "application/geo+json", "text/x-json"),
        ("map", "application/geo+json", "text/x-json"),
        ("feed", "application/rss+xml", "text/x-xml"),
        ("talk.srt", "application/x-subrip", "text/plain"),
        ("a.sh", "application/x-sh", "text/x-sh"),
        ("a.sql", "application/vnd.something", "text/x-sql"),
    ],
)
def test_media_type_is_given_or_from_the_ending(name, given, expected):
    assert read_upload(name, b"x", given, max_bytes=MAX).media_type == expected


@pytest.mark.parametrize(
    ("name", "given"),
    [("a.doc", None), ("a.PNG", "application/octet-stream"), ("a.md", "application/zip"), ("a", "image/svg+xml")],
)
def test_unreadable_media_types_name_what_is_supported(name, given):
    with pytest.raises(Unsupported, match="supported are Markdown"):
        read_upload(name, b"x", given, max_bytes=MAX)


@pytest.mark.parametrize("said", ["text/markdown", "text/x-html", "application/pdf"])
def test_what_is_said_goes_before_the_name(said):
    if said == "application/pdf":
        with pytest.raises(Unsupported, match="not a PDF document"):
            read_upload("a.txt", b"x", said, max_bytes=MAX)
    else:
        expected = {"text/x-html": "text/html"}.get(said, said)
        assert read_upload("a.txt", b"<p>x", said, max_bytes=MAX).media_type == expected


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("page", b"\n<!-- x -->\n<!DOCTYPE html><p>x", "text/html"),
        ("page", b"<html lang=en><p>x", "text/html"),
        ("page", b"<p>x", "text/plain"),
        ("page.txt", b"<html><p>x", "text/plain"),
    ],
)
def test_the_first_bytes_decide_where_the_name_says_nothing(name, data, expected):
    assert read_upload(name, data, max_bytes=MAX).media_type == expected


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"%PDF-1.7\n", "PDF document"),
        (b"PK\x03\x04rest", "ZIP archive"),
        (b"\x89PNG\r\n\x1a\n", "PNG image"),
        (b"\xff\xd8\xff\xe0", "JPEG image"),
        (b"{\\rtf1 text}", "RTF document"),
        (b"\x7fELF\x02", "ELF program"),
        (b"SQLite format 3\x00", "SQLite database"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.py"])
def test_bytes_of_another_format_than_the_name_says_are_named(name, data, shown):
    with pytest.raises(Unsupported, match=rf"^{name}: '{shown}' is not accepted; its name or media type says"):
        read_upload(name, data, max_bytes=MAX)


def test_keeps_flat_metadata():
    metadata = {"a": "x", "b": 1, "c": 1.5, "d": True, "e": None}
    assert read_upload("a", b"x", metadata=metadata, max_bytes=MAX).metadata == metadata


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        {1: "x"},
        {"": 1},
        {"a": []},
        {"a": {"b": 1}},
        {"a": math.nan},
        {"a": 2**63},
        {"a": "\ud800"},
        {"a": "x" * 5000},
        {str(n): n for n in range(65)},
    ],
    ids=["list", "number key", "empty key", "list value", "nested", "nan", "65 bit", "surrogate", "long", "65 keys"],
)
def test_refuses_metadata_that_is_not_a_flat_bounded_object(metadata):
    with pytest.raises(InvalidInput) as caught:
        read_upload("a", b"x", metadata=metadata, max_bytes=MAX)
    assert caught.value.field.startswith("metadata")
    assert str(caught.value).isprintable()
