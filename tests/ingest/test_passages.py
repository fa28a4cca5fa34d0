from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.media_types import PDF
from ingest.passages import Passage, cut
from tests.ingest.helpers import words


def characters(text: str) -> int:
    return len(text)


def pairs(text: str) -> int:
    """Merges across borders, as BPE does, so that joined text has fewer tokens than its parts."""
    return len(re.sub(r"\n\n|\w\w|  ", "#", text))


def borders(text: str) -> int:
    """Joined text has more tokens than its parts: each word after a space costs one more."""
    return len(re.findall(r"\w+|\W", text)) + len(re.findall(r"\s\S", text))


COUNTERS = [words, characters, pairs, borders]
MEDIA_TYPES = ["text/markdown", "text/plain", "text/x-python", "text/x-csv", "text/x-json", "text/x-sql", PDF]

LINES = st.sampled_from(
    [
        "# Title",
        "### Deep *one*",
        "Setext",
        "===",
        "---",
        "A sentence. Another one! And a third?",
        "x" * 70,
        "```py",
        "```",
        "~~~~",
        "- item",
        "  - nested",
        "   1. more",
        "    indented code",
        "| a | b |",
        "|---|---|",
        "> quote",
        "> ```",
        "<div>",
        "<!--",
        "[ref]: /url",
        "def f(x):",
        "    return x",
        "@decorated",
        "}",
        "",
        "",
        "   ",
        "\t",
        "\u2028\x0b\x0c\x1c\x85",
        "漢字。仮名。",
        "a\rb",
        "\f",
        '"quoted,',
        "---\ntitle: front matter",
        "\ud800",
        "\0",
    ]
)
TEXTS = st.one_of(
    st.lists(LINES, max_size=40).map("\n".join),
    st.text(max_size=300),
    st.text(alphabet="#-`>|~ \n\t.*1ab\r", max_size=200),
)


@pytest.mark.parametrize("count_tokens", COUNTERS)
@given(text=TEXTS, media_type=st.sampled_from(MEDIA_TYPES), max_tokens=st.integers(16, 90))
@settings(max_examples=250, deadline=None)
@example(text="", media_type="text/markdown", max_tokens=16)
@example(text="\n \n\n", media_type="text/markdown", max_tokens=16)
@example(text="# a\n\n```\nnever closed\n\n\n", media_type="text/markdown", max_tokens=16)
@example(text="\n" * 300 + "a" + " " * 300, media_type="text/plain", max_tokens=16)
def test_passages_join_to_the_text_and_fit(count_tokens, text, media_type, max_tokens):
    passages = cut(text, media_type, count_tokens, max_tokens)
    assert "".join(passage.text for passage in passages) == text
    position = 0
    for passage in passages:
        assert (passage.start, passage.text) == (position, text[passage.start : passage.end])
        assert passage.text
        assert passage.tokens == count_tokens(passage.text) <= max_tokens
        position = passage.end
    assert_parts_count_up(passages)


def assert_parts_count_up(passages: list[Passage]) -> None:
    expected = 1
    for passage in passages:
        if passage.part is None:
            assert expected == 1
            continue
        number, total = map(int, passage.part.split("/"))
        assert number == expected
        assert total > 1
        expected = 1 if number == total else number + 1
    assert expected == 1


FENCES = st.lists(st.sampled_from(["x = 1", "", "# no heading", "- no item", "| no | table |"]), max_size=8).map(
    lambda lines: "\n".join(["```py", *lines, "```"])
)
PROSE = st.lists(st.sampled_from(["one two", "three. four five"]), min_size=1, max_size=6).map("\n".join)
HEADINGS = st.sampled_from(["# One", "## Two", "### Three"])
ITEMS = st.lists(st.sampled_from(["- apple", "- pear\n  and more"]), min_size=1, max_size=8).map("\n".join)
TABLES = st.lists(st.just("| 1 | 2 |"), max_size=8).map(lambda rows: "\n".join(["| a | b |", "|---|---|", *rows]))
GAPS = st.sampled_from(["\n\n", "\n\n\n", "\n  \n", "\n" * 30])


@st.composite
def structured(draw):
    """A Markdown text and the blocks it was made of, as (kind, text)."""
    kinds = {"fence": FENCES, "prose": PROSE, "heading": HEADINGS, "list": ITEMS, "table": TABLES}
    blocks: list[tuple[str, str]] = []
    text = draw(st.sampled_from(["", "\n\n", "\n" * 20]))
    for kind in draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=10)):
        # Two lists in a row are one list.
        if kind == "list" and blocks and blocks[-1][0] == "list":
            continue
        block = draw(kinds[kind])
        blocks.append((kind, block))
        text += block + draw(GAPS)
    return text, blocks


@pytest.mark.parametrize("count_tokens", COUNTERS)
@given(case=structured(), max_tokens=st.integers(16, 120))
@settings(max_examples=250, deadline=None)
def test_a_block_that_fits_is_never_cut(count_tokens, case, max_tokens):
    text, blocks = case
    passages = cut(text, "text/markdown", count_tokens, max_tokens)
    position = 0
    for _, block in blocks:
        start = text.index(block, position)
        position = start + len(block)
        if count_tokens(block) <= max_tokens:
            holders = [p for p in passages if p.start < position and p.end > start]
            assert len(holders) == 1, block
            if holders[0].text.strip() == block:
                assert holders[0].part is None


@given(case=structured(), max_tokens=st.integers(16, 120))
@settings(max_examples=250, deadline=None)
def test_a_fence_shares_a_passage_only_with_its_whole_section(case, max_tokens):
    text, blocks = case
    passages = cut(text, "text/markdown", words, max_tokens)
    for passage in passages:
        inside = [kind for kind, block in blocks if block in passage.text]
        if "fence" in inside and len(set(inside) - {"heading"}) > 1:
            assert passage.start == 0 or passage.text.startswith("#")
            assert passage.end == len(text) or text[passage.end] == "#"


def simple(text: str, max_tokens: int = 30, media_type: str = "text/markdown") -> list[tuple[str, str, str]]:
    return [(p.text, p.kind, p.heading) for p in cut(text, media_type, words, max_tokens)]


def test_a_heading_starts_a_passage_and_carries_its_path():
    text = "intro\n\n# A\n\none\n\n## B\n\ntwo\n\n# C\n\nthree\n"
    assert simple(text) == [
        ("intro\n\n", "prose", ""),
        ("# A\n\none\n\n", "prose", "A"),
        ("## B\n\ntwo\n\n", "prose", "A > B"),
        ("# C\n\nthree\n", "prose", "C"),
    ]


def test_a_heading_directly_under_another_stays_with_it():
    assert simple("# A\n\n### B\n\ntext") == [("# A\n\n### B\n\ntext", "prose", "A > B")]


def test_a_heading_without_text_gives_no_path_to_what_follows():
    assert simple("## A\n\n## B\n\ntext") == [("## A\n\n## B\n\ntext", "prose", "B")]


def test_small_paragraphs_of_a_section_are_packed_together():
    texts = [text for text, _, _ in simple("# A\n\n" + "one two three\n\n" * 6)]
    assert texts == ["# A\n\n" + "one two three\n\n" * 3, "one two three\n\n" * 3]


def test_a_small_section_with_code_is_one_passage_of_the_kind_that_fills_most_of_it():
    mostly_code = "# A\n\nRun:\n\n```\nx = f(1) + 2\ny\n```\n"
    assert simple(mostly_code, 40) == [(mostly_code, "code", "A")]
    mostly_prose = "# A\n\nOne two three four five.\n\n```\nx\n```\n"
    assert simple(mostly_prose, 40) == [(mostly_prose, "prose", "A")]


def test_code_stands_alone_in_a_section_too_large_for_one_passage():
    code = "```\na b c d e f g h\n```\n\n"
    assert simple("# A\n\n" + "one two three\n\n" + code + "four five\n", 28) == [
        ("# A\n\none two three\n\n", "prose", "A"),
        (code, "code", "A"),
        ("four five\n", "prose", "A"),
    ]


def test_an_oversized_fence_is_cut_at_lines_and_numbered():
    text = "# A\n\n```\n" + "".join(f"line {n}\n" for n in range(20)) + "```\n"
    passages = cut(text, "text/markdown", words, 30)
    assert [p.part for p in passages] == [f"{n}/{len(passages)}" for n in range(1, len(passages) + 1)]
    assert {p.kind for p in passages[1:]} == {"code"}
    assert passages[0].text.startswith("# A\n\n```\nline 0\n")
    assert all(p.text.endswith("\n") for p in passages)


def test_a_heading_that_finds_no_room_before_a_cut_block_is_no_part_of_it():
    text = "# One two three four\n\n" + "a b c d e f\n" * 2
    assert [p.part for p in cut(text, "text/markdown", words, 16)] == [None, "1/2", "2/2"]


def test_an_oversized_list_is_cut_between_items():
    text = "- one two three\n  four\n" * 5
    passages = cut(text, "text/markdown", words, 33)
    assert [p.part for p in passages] == ["1/3", "2/3", "3/3"]
    assert all(p.kind == "list" and p.text.startswith("- ") for p in passages)


@pytest.mark.parametrize("lead", range(1, 20))
def test_code_inside_an_oversized_list_is_not_cut(lead):
    code = "  ```\n  a b\n\n  c d\n  ```\n"
    text = "- see\n\n  " + "more " * lead + "\n\n" + code + "\n  " + "and " * 20 + "\n- last\n"
    passages = cut(text, "text/markdown", words, 30)
    assert sum(code in p.text for p in passages) == 1


def test_a_markdown_table_is_a_table():
    text = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert simple(text, 60) == [(text, "table", "")]


def test_a_passage_without_a_main_kind_is_prose():
    text = "One two three.\n\n- a b c\n- d e f\n\n```\ng h\n```\n"
    assert simple(text, 60) == [(text, "prose", "")]


def test_a_lone_carriage_return_ends_no_line():
    assert simple("a\r\r\rb\n\n# Title\n\ntext\n") == [
        ("a\r\r\rb\n\n", "prose", ""),
        ("# Title\n\ntext\n", "prose", "Title"),
    ]


def test_a_long_line_is_cut_at_sentences_then_words_then_characters():
    sentences = "One two three four. Five six seven eight! Nine ten eleven twelve."
    assert [t for t, _, _ in simple(sentences, 16, "text/plain")] == [
        "One two three four. ",
        "Five six seven eight! ",
        "Nine ten eleven twelve.",
    ]
    phrase = "alpha beta gamma delta epsilon zeta eta theta iota kappa"
    assert [t.split() for t, _, _ in simple(phrase, 16, "text/plain")] == [
        ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"],
        ["iota", "kappa"],
    ]
    assert [p.tokens for p in cut("x" * 40, "text/plain", characters, 16)] == [16, 16, 8]


def test_link_definitions_do_not_make_a_fence_too_large():
    code = "```\n" + "a " * 10 + "\n```\n"
    text = code + "\n[a]: /one/two/three/four/five/six/seven\n\nend\n"
    assert [(p.kind, p.part) for p in cut(text, "text/markdown", words, 32)] == [("code", None), ("prose", None)]


def test_blank_lines_that_do_not_fit_leave_a_fence_whole():
    code = "```\n" + "a " * 10 + "\n```"
    assert words(code) == 28
    passages = cut(code + "\n" * 40, "text/markdown", words, 30)
    assert passages[0].text.rstrip() == code
    assert {p.part for p in passages} == {None}


def test_a_deeply_nested_list_does_not_swallow_what_follows():
    text = "".join("  " * depth + "- a\n" for depth in range(15)) + "\n# After\n\ntext\n"
    assert cut(text, "text/markdown", words, 1000)[-1].heading == "After"


def test_source_code_is_cut_before_definitions_and_their_decorators():
    units = [
        "import os\nimport re\nimport sys\n\n\n",
        "# about f\n@cached\ndef f():\n    a = 1\n\n    return a\n\n",
        "class C:\n    x = 1\n\n    y = 2\n",
    ]
    assert simple("".join(units), 45, "text/x-python") == [
        (unit, "code", heading) for unit, heading in zip(units, ["", "f", "C"], strict=True)
    ]


def test_closing_brackets_stay_with_what_they_close():
    text = "a\n\ng(\n    b,\n\n)\n\n"
    assert [t for t, _, _ in simple(text, 16, "text/x-js")] == ["a\n\n", "g(\n    b,\n\n)\n\n"]


def test_a_csv_file_is_a_table_cut_between_rows():
    passages = cut("a,b\n" + "1,2\n" * 20, "text/x-csv", words, 16)
    assert {p.kind for p in passages} == {"table"}
    assert all(p.text.endswith("\n") for p in passages)


def test_a_row_with_line_ends_in_quotes_is_not_cut():
    row = '1,"first\n\nsecond"\n'
    passages = cut("id,note\n" + row * 6, "text/x-csv", words, 20)
    assert sum(p.text.count(row) for p in passages) == 6
    assert {p.heading for p in passages} == {"id, note"}
    assert [p.heading for p in cut("1;2\n3;4\n", "text/x-csv", words, 20)] == [""]


def test_a_row_too_large_for_csv_is_cut_like_any_text():
    text = 'a,"' + "x" * 200_000 + '"\n1,2\n'
    assert "".join(p.text for p in cut(text, "text/x-csv", characters, 1000)) == text


NESTED = {
    "quote": ("> ", "> "),
    "item": ("- ", "  "),
    "item in item": ("- - ", "    "),
    "item in quote": ("> 1. ", ">    "),
    "quote in item": ("* > ", "  > "),
}


@pytest.mark.parametrize("opener", ["```", "~~~", "`````", "~~~~ py"])
@pytest.mark.parametrize(("first", "rest"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("lead", range(0, 20, 3))
def test_a_fence_that_fits_is_whole_wherever_it_is_nested(opener, first, rest, lead):
    closer = opener.split()[0]
    inside = ["a b", "", "# no heading", "- no item", closer[:-1] if len(closer) > 3 else "``"]
    code = "".join(f"{rest}{line}".rstrip() + "\n" for line in [opener, *inside, closer])
    around = "".join(f"{rest}{'more ' * 9}\n{rest}\n".replace(" \n", "\n") for _ in range(6))
    text = f"{first}{'one ' * lead}see\n{rest.rstrip()}\n{code}{rest.rstrip()}\n{around}"
    passages = cut(text, "text/markdown", words, 80)
    assert len(passages) > 2
    assert sum(code.strip() in p.text for p in passages) == 1
    assert "".join(p.text for p in passages) == text


def test_a_nested_table_is_whole_and_a_table():
    table = "  | a | b |\n  |---|---|\n  | 1 | 2 |\n"
    text = f"- {'more ' * 30}\n\n{table}\n  {'and ' * 30}\n"
    assert [p.kind for p in cut(text, "text/markdown", words, 40) if table in p.text] == ["table"]


@pytest.mark.parametrize("opener", ["```", "~~~", "- ```", "> ```", "    code"])
def test_an_unclosed_fence_loses_nothing(opener):
    text = f"# A\n\n{opener}\n" + "x = 1\n\n# not a heading\n" * 9
    passages = cut(text, "text/markdown", words, 40)
    assert "".join(p.text for p in passages) == text


def test_front_matter_is_no_heading():
    front = "---\ntitle: A\ntags:\n  - b\n---\n"
    assert simple(front + "\ntext " * 12, 40)[0] == (front + "\n", "code", "")
    assert simple("---\n\ntext\n\n---\n")[0][1:] == ("prose", "")


def test_a_heading_is_its_text_without_markup():
    (passage,) = cut("## [Un*released*](https://example.org) `x` &amp; y\n", "text/markdown", words, 200)
    assert passage.heading == "Unreleased x & y"


def test_an_endless_heading_is_shortened():
    (passage,) = cut("# " + "h" * 5000 + "\n\ntext", "text/markdown", words, 200)
    assert len(passage.heading) == 120


def test_refuses_a_limit_that_one_character_could_exceed():
    with pytest.raises(ValueError, match="max_tokens must be at least 16, not 15"):
        cut("a", "text/plain", words, 15)


@pytest.mark.parametrize(
    ("text", "media_type"),
    [
        ("word " * 400_000, "text/plain"),
        ("a" * 2_000_000, "text/markdown"),
        ("```\n" + "x = 1\n" * 80_000, "text/markdown"),
        ("- item\n" * 20_000, "text/markdown"),
        (("- " * 50 + "a\n") * 2_000, "text/markdown"),
        ("# h\n\na\n\n" * 20_000, "text/markdown"),
        ("# h\n" * 40_000, "text/markdown"),
        ("[" * 200_000, "text/markdown"),
        ("." * 1_000_000, "text/plain"),
        ("x = 1\n\n" * 30_000, "text/x-python"),
    ],
    ids=["words", "word", "fence", "items", "nested", "sections", "headings", "brackets", "dots", "code"],
)
def test_cost_is_near_linear(text, media_type):
    counted = 0

    def count(piece: str) -> int:
        nonlocal counted
        counted += len(piece)
        return len(piece) // 4 + 1

    start = time.monotonic()
    cut(text, media_type, count, 256)
    assert counted < 8 * len(text)
    assert time.monotonic() - start < 30
