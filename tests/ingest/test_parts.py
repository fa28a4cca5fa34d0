"""Parts of what is too large for a passage: each can be understood by itself, and they join to the text."""

from __future__ import annotations

import pytest

from ingest.documents import read_upload
from ingest.passages import Passage, cut
from tests.ingest.helpers import words

NAMES = ("Tag", "Species", "Height")
ROWS = [(f"T-{n:03}", ("oak", "ash", "elm")[n % 3], f"{n} m") for n in range(60)]


def parts(name: str, text: str, max_tokens: int = 80) -> list[Passage]:
    upload = read_upload(name, text.encode(), max_bytes=1_000_000)
    passages = cut(upload.text, upload.media_type, words, max_tokens)
    assert "".join(passage.text for passage in passages) == upload.text
    return passages


def lines(delimiter: str, names: tuple[str, ...] = NAMES) -> str:
    return "".join(f"{delimiter.join(row)}\n" for row in [names, *ROWS])


MARKDOWN = "# Trees\n\nAll of them.\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in [NAMES, ("---",) * 3, *ROWS])
HTML = "<h1>Trees</h1><table>" + "".join(f"<tr><td>{'<td>'.join(row)}" for row in [NAMES, *ROWS]) + "</table>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", MARKDOWN),
        ("a.html", HTML),
        ("a.md", "- in a list\n\n" + MARKDOWN.partition("\n\n")[2].replace("\n", "\n  ").replace("All", "  All", 1)),
        ("a.csv", lines(",")),
        ("a.tsv", lines("\t")),
        ("a.csv", "sep=;\n" + lines(";")),
        ("a.csv", "Quarterly report,,\nPrinted 2024-03-01,,\n" + lines(",")),
        ("a.csv", "Quarterly report\n\n" + lines(";")),
        ("a.csv", lines("|", ("", *NAMES[1:]))),
    ],
)
def test_every_part_of_a_table_has_its_column_names(name, text):
    passages = [passage for passage in parts(name, text) if "T-" in passage.text]
    assert len(passages) > 3
    for passage in passages:
        seen = f"{passage.heading} {passage.text}"
        assert all(column in seen for column in ("Species", "Height")), passage


def test_a_wide_table_keeps_all_its_names():
    names = tuple(f"a_column_with_a_long_name_{n}" for n in range(14))
    text = "".join(",".join(row) + "\n" for row in [names, *[tuple("x" * 14) for _ in range(60)]])
    assert all(all(name in f"{p.heading} {p.text}" for name in names) for p in parts("a.csv", text))


def test_a_table_that_fits_says_its_names_once():
    text = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert [p.heading for p in parts("a.md", "# T\n\n" + text)] == ["T"]


def test_rows_without_names_above_have_none():
    assert {p.heading for p in parts("a.csv", "1,2,3\n" * 60)} == {""}
    assert {p.heading for p in parts("a.csv", "1,2,3\n" * 9 + "a,b,c\n" + "1,2,3\n" * 60)} == {""}


BODY = "".join(f"        step_{n}(rows, {n})\n" for n in range(40))
SOURCES = {
    "a.py": (f"class Till(Base):\n    def total(\n        self, rows: list[Row]\n    ) -> int:\n{BODY}",
             "Till > def total( self, rows: list[Row] ) -> int"),
    "a.go": (f"func (t *Till) Total(rows []Row) int {{\n{BODY}}}\n", "func (t *Till) Total(rows []Row) int"),
    "a.js": (f"export const total = async (rows) => {{\n{BODY}}}\n", "const total = async (rows) =>"),
    "a.java": (f"class Till {{\n  public int total(List<Row> rows) {{\n{BODY.replace(')', ');')}  }}\n}}\n",
               "Till > public int total(List<Row> rows)"),
    "a.c": (f"static int total(struct row *rows) {{\n{BODY.replace(')', ');')}}}\n",
             "static int total(struct row *rows)"),
    "a.rs": (f"impl Till {{\n  pub fn total(&self) -> u32 {{\n{BODY.replace(')', ');')}  }}\n}}\n",
             "Till > pub fn total(&self) -> u32"),
    "a.rb": (f"# Adds up\ndef total(rows)\n{BODY}end\n", "def total(rows)"),
    "a.sql": (f"CREATE TABLE rows (\n{BODY});\n", "CREATE TABLE rows ("),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_every_part_of_a_definition_but_the_first_has_its_signature(name):
    text, signature = SOURCES[name]
    first, *others = parts(name, text)
    assert first.part == f"1/{len(others) + 1}"
    assert len(others) > 2
    assert {part.heading for part in others} == {signature}


def test_a_method_that_is_whole_is_called_by_its_name():
    methods = "".join(f"    def f{n}(self):\n        return self.rows[{n}] + self.more({n})\n\n" for n in range(9))
    headings = [p.heading for p in parts("a.py", f"class Till(Base):\n{methods}", 40)]
    assert headings[1:4] == ["Till > f0", "Till > f1", "Till > f2"]


def test_every_part_of_a_section_has_its_heading():
    text = "# Trees\n\n## Oak\n\n" + "The oak stands in the park.\n\n" * 30
    assert {p.heading for p in parts("a.md", text)} == {"Trees > Oak"}
