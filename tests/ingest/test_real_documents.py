"""Documents that others wrote: what is installed beside the tests, and the standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from ingest.documents import read_upload
from ingest.passages import Passage, cut
from tests.ingest.helpers import words

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
INSTALLED = Path(sysconfig.get_path("purelib"))

ENDINGS = ("c", "cc", "cpp", "csv", "css", "go", "h", "hpp", "html", "java", "js", "json", "jsonl", "md", "py", "rs")
ENDINGS += ("rst", "toml", "ts", "txt", "yaml")
MAX_BYTES = 200_000
PER_ENDING = 3


def sample() -> Iterator[Path]:
    """A few files of each ending, the largest first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in INSTALLED.rglob("*.*"):
        ending = path.suffix[1:].lower()
        if ending in ENDINGS and path.is_file() and 0 < (size := path.stat().st_size) <= MAX_BYTES:
            found.setdefault(ending, []).append((size, path))
    for files in found.values():
        yield from (path for _, path in sorted(files, reverse=True)[:PER_ENDING])


def readmes() -> list[Path]:
    """The long descriptions of installed packages: Markdown, with a header of e-mail above it."""
    return sorted(path for path in INSTALLED.glob("*.dist-info/METADATA") if description(path).strip())


def description(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n\n")[2]


def check(text: str, passages: list[Passage], max_tokens: int) -> None:
    assert "".join(p.text for p in passages) == text
    position = 0
    for passage in passages:
        assert (passage.start, passage.text) == (position, text[passage.start : passage.end])
        assert passage.tokens == words(passage.text) <= max_tokens
        position = passage.end


@pytest.mark.parametrize("path", list(sample()), ids=lambda path: path.name)
@pytest.mark.parametrize("max_tokens", [60, 500])
def test_installed_files_join_to_their_text(path, max_tokens):
    data = path.read_bytes()
    upload = read_upload(path.name, data, max_bytes=MAX_BYTES)
    passages = cut(upload.text, upload.media_type, words, max_tokens)
    check(upload.text, passages, max_tokens)
    with_crlf = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    upload = read_upload(path.name, with_crlf, max_bytes=2 * MAX_BYTES)
    assert cut(upload.text, upload.media_type, words, max_tokens) == passages


@pytest.mark.parametrize("path", readmes()[::3], ids=lambda path: path.parent.name)
def test_fences_and_tables_of_installed_readmes_are_whole(path):
    text = description(path)
    passages = cut(text, "text/markdown", words, 300)
    check(text, passages, 300)
    lines = text.splitlines(keepends=True) if text.isascii() else re.findall(r"[^\n]*\n|[^\n]+", text)
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("fence", "table_open") and token.map is not None:
            block = "".join(lines[slice(*token.map)]).strip("\n")
            if words(block) <= 300:
                assert any(block in p.text for p in passages), block


@pytest.mark.parametrize(
    "name", ["argparse.py", "dataclasses.py", "asyncio/base_events.py", "enum.py", "typing.py", "json/decoder.py"]
)
@pytest.mark.parametrize("max_tokens", [80, 400])
def test_functions_and_classes_of_the_standard_library_are_whole(name, max_tokens):
    text = (STANDARD_LIBRARY / name).read_text(encoding="utf-8")
    passages = cut(text, "text/x-python", words, max_tokens)
    check(text, passages, max_tokens)
    lines = text.splitlines(keepends=True)
    checked = 0
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min(node.lineno, *(decorator.lineno for decorator in node.decorator_list), node.lineno)
        definition = "".join(lines[first - 1 : node.end_lineno]).rstrip("\n")
        if words(definition) <= max_tokens:
            checked += 1
            assert any(definition in p.text for p in passages), definition
    assert checked > 0
