from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.encodings import decode
from ingest.errors import Unsupported

TEXTS = {
    "cp1252": "Das Mädchen grüßt die Bäume. Le café coûte 3 € — “oui”.",
    "cp1250": "Zażółć gęślą jaźń. Chrząszcz brzmi w trzcinie.",
    "iso8859_2": "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "cp1251": "Привет, мир! Это проверка кодировки документа.",
    "koi8_r": "Привет, мир! Это проверка кодировки документа.",
    "cp866": "Привет, мир! Это проверка кодировки документа.",
    "cp1253": "Αυτό είναι ένα ελληνικό κείμενο.",
    "shift_jis": "これは日本語の文章です。テストをしています。",
    "euc_jp": "これは日本語の文章です。テストをしています。",
    "iso2022_jp": "これは日本語の文章です。テストをしています。",
    "gb18030": "这是一个中文文档用来测试编码。",
    "big5": "這是一個中文文檔用來測試編碼。",
    "euc_kr": "이것은 한국어 문서입니다. 인코딩을 테스트합니다.",
    "utf-16-le": "Plain text as some Windows tools write it, grün.",
    "utf-16-be": "Plain text as some Windows tools write it, grün.",
    "utf-16": "漢字 with a mark",
    "utf-32": "漢字 with a mark",
    "utf-8-sig": "漢字 with a mark",
    "utf-8": "漢字 without a mark",
}


@pytest.mark.parametrize(("encoding", "text"), TEXTS.items(), ids=TEXTS)
def test_an_encoding_is_detected(encoding, text):
    assert decode("a.txt", text.encode(encoding)) == text


@pytest.mark.parametrize(
    ("encodings", "text"),
    [
        ("cp1250 iso8859_2", "Właśnie zauważyli, że zmiana sposobu myślenia była potrzebna."),
        ("cp1250 iso8859_2", "Těch policistů bylo víc než dřív, řekl tiskový mluvčí."),
        ("cp1250 iso8859_2", "A szerződés megfelelő intézmények között hétfőn jött létre."),
        ("cp1250 iso8859_2", "Odlučila je mnoge, nije što je nekad bila, žao mi je."),
        ("cp1254 iso8859_9", "Bankası olur mu? Arama yapılan en çarpıcı haber, Taş’ın eşi."),  # noqa: RUF001
        ("cp1252", "Übersetzt von Peña, García und Lefèvre: “naïve” — £5, © 2020"),
        ("cp1252", "English | Español | Português | 中文"),
        ("iso2022_kr", "역사적 예수"),
    ],
)
def test_the_alphabet_of_a_language_tells_its_encoding(encodings, text):
    for encoding in encodings.split():
        data = text.encode(encoding, "ignore")
        assert decode("a.txt", data) == data.decode(encoding)


@pytest.mark.parametrize("text", ["café au lait", "Müller", "naïve", "x = 'é'\n", "£5", "\u201cquoted\u201d"])
def test_a_few_accents_are_western_european(text):
    assert decode("a.txt", text.encode("cp1252")) == text


@pytest.mark.parametrize(
    ("encoding", "word"),
    [
        ("gb18030", "中文注释"),
        ("cp932", "テスト"),
        ("cp932", "これは説明"),
        ("cp1251", "Комментарий"),
        ("cp949", "한국어"),
    ],
)
def test_comments_are_read_among_ascii_code(encoding, word):
    text = "".join(f"def f{n}(x):  # {word}{n}\n    return x + {n}\n" for n in range(9))
    assert decode("a.py", text.encode(encoding)) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\x1b"), min_size=1))
def test_utf8_is_never_taken_for_anything_else(text):
    assert decode("a.txt", text.encode()) == text.removeprefix("\ufeff")


def test_what_the_sender_says_decides():
    data = "Привет".encode("koi8_r")
    assert decode("a.txt", data, "KOI8-R") == "Привет"
    assert decode("a.txt", b"\x93x\x94", "iso-8859-1") == "\u201cx\u201d"
    with pytest.raises(Unsupported, match="byte 0 is not UTF-8"):
        decode("a.txt", data, "utf-8")
    for unknown in ("klingon", "hex", "idna"):
        with pytest.raises(Unsupported, match=rf"'{unknown}'.*not known here"):
            decode("a.txt", data, unknown)


def test_a_byte_order_mark_goes_before_what_the_sender_says():
    assert decode("a.txt", "é".encode("utf-16"), "iso-8859-1") == "é"


@pytest.mark.parametrize(
    "declaration",
    ['<meta charset="cp866">', "<meta http-equiv=x content='text/html; charset=CP866'>", '<?xml encoding="cp866"?>',
     "# -*- coding: cp866 -*-", "#!/usr/bin/python\n# vim: set fileencoding=cp866 :"],
)  # fmt: skip
def test_what_a_text_declares_is_used_where_it_is_not_utf8(declaration):
    # Two letters that statistics take for something else.
    text = f"{declaration}\nщи!"
    assert decode("a", text.encode("cp866")) == text
    assert decode("a", text.encode()) == text


def test_a_wrong_declaration_is_overruled():
    text = '<meta charset="utf-8"><p>Das Mädchen grüßt die Bäume.'
    assert decode("a", text.encode("cp1252")) == text


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        ("λόγος".encode()[:-1], 8),
        ("ab漢字".encode()[:-1], 5),
        ("ab漢字".encode()[:-2], 5),
    ],
)
def test_a_truncated_file_is_named(data, offset):
    with pytest.raises(Unsupported, match=rf"byte {offset} starts a UTF-8 character that is cut off"):
        decode("a.txt", data)


def test_truncated_utf16_is_named():
    with pytest.raises(Unsupported, match=r"byte 6 is not UTF-16-LE: the file is truncated"):
        decode("a.txt", "\ufeffab".encode("utf-16-le") + b"c")


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_text(seed):
    data = random.Random(seed).randbytes(200)
    with pytest.raises(Unsupported, match=r"a\.bin.*byte \d+ is"):
        decode("a.bin", data)


def test_control_characters_outside_utf8_are_no_text():
    with pytest.raises(Unsupported, match=r"byte 5 is a control character"):
        decode("a.txt", b"caf\xe9 \x01")
    assert decode("a.txt", "\x1b[31mcafé\x1b[0m\f".encode("cp1252")) == "\x1b[31mcafé\x1b[0m\f"


def log(lines: int) -> bytes:
    return "".join(f"{n} INFO Zahlung für Müller über 30 € bestätigt\n" for n in range(lines)).encode()


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (log(9) + b"10 INFO \xff\n" + log(9), "10 INFO ÿ\n0 INFO Zahlung für Müller über 30 €"),
        (log(9)[17:], "r Müller über 30 € bestätigt\n1 INFO Zahlung für Müller"),
        (
            b"job finished\n" * 9 + "Zoë opened café\n".encode() + "old: Größe geprüft, naïve\n".encode("cp1252"),
            "Zoë opened café\nold: Größe geprüft, naïve\n",
        ),
    ],
    ids=["stray byte", "cut start", "two programs"],
)
def test_a_log_that_is_utf8_in_part_keeps_its_words(data, kept):
    warnings: list[str] = []
    assert kept in decode("a.log", data, None, warnings)
    assert len(warnings) == 1
    assert "not all of it is UTF-8" in warnings[0]


@pytest.mark.parametrize("encoding", ["gb18030", "big5", "cp932", "cp949", "cp1251", "koi8_r", "cp1253", "cp1252"])
def test_older_encodings_are_not_taken_for_utf8_with_flaws(encoding):
    text = {
        "gb18030": "第一章 中文文档用来测试编码。模型",
        "big5": "這是一個中文文檔用來測試編碼。",
        "cp932": "第一章 これは日本語の文章です。",
        "cp949": "이것은 한국어 문서입니다.",
        "cp1253": "Αυτό είναι ένα ελληνικό κείμενο.",
        "cp1252": "Le CAFÉ», NESCAFÉ® à 3 €, déjà bu à côté de la fenêtre",
    }.get(encoding, "Привет, мир! Это проверка кодировки.")
    warnings: list[str] = []
    decode("a.txt", (text + "\n").encode(encoding) * 5, None, warnings)
    assert warnings == []
