"""Which files `keepwhole ingest` takes, checked against Git where Git has a say."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from app.cli.walk import walk


def tree(folder: Path, *files: str, **rules: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(name))
    for place, text in rules.items():
        (folder / place.replace("__", "/").removeprefix("root") / ".gitignore").write_text(text)
    return folder


def names(*paths: Path) -> list[str]:
    return [file.name for file in walk(paths).files]


FILES = (
    "a.log", "b.md", "build/x.md", "build/keep/y.md", "src/build/z.md", "src/a.log", "src/keep.log", "src/deep/a.log",
    "src/deep/c.md", "docs/a b.txt", "docs/#note.md", "docs/!odd.md", "docs/x.tmp", "docs/sub/x.tmp", "foo/bar/baz.md",
    "trailing .md", "UP.LOG",
)  # fmt: skip


@pytest.mark.skipif(shutil.which("git") is None, reason="no git to compare with")
@pytest.mark.parametrize(
    "rules",
    [
        {"root": "*.log\n"},
        {"root": "*.log\n!keep.log\n"},
        {"root": "*.log\n", "src": "!*.log\n"},
        {"root": "*.log\n", "src": "!*.log\n", "src__deep": "*.log\n"},
        {"root": "build/\n"},
        {"root": "/build\n"},
        {"root": "build/*\n!build/keep/\n"},
        {"root": "build/\n!build/keep/y.md\n"},
        {"root": "docs/*.tmp\n"},
        {"root": "docs/**/*.tmp\nfoo/**/baz.md\n"},
        {"root": "\\#note.md\n\\!odd.md\n# comment\n\n"},
        {"root": "*\n!*/\n!*.md\n"},
        {"root": "foo/*\n!foo/bar\n", "foo": "bar/baz.md\n"},
        {"docs": "/sub\n*.txt\n"},
        {"root": "trailing\\ .md\n[ab].*\n"},
        {"src": "*\n", "src__deep": "!c.md\n"},
        {"src": "*\n!deep\n"},
        {"root": "**/build\n!build\n"},
        {"root": "build/**\n!build/keep\n"},
        {"root": "foo/**/bar\nsrc/**/deep\n"},
        {"root": "src/\n!src/\nsrc/deep/\n"},
        {"root": "*.md\n!/docs/*.md\n/docs/#*\n"},
        {"root": "*\n!*.md\n"},
        {"root": "*\n!src\n!src/**\n"},
        {"root": "docs\n!docs/sub/x.tmp\n"},
        {"root": "up.log\nfoo/bar/\n!baz.md\n"},
    ],
)
def test_gitignore_says_what_git_says(tmp_path: Path, rules: dict[str, str]) -> None:
    tree(tmp_path, *FILES, **rules)
    quiet = {"cwd": tmp_path, "check": True, "capture_output": True}
    subprocess.run(["git", "init", "-q"], **quiet)  # type: ignore[call-overload]
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    listed = subprocess.run(command, **quiet).stdout  # type: ignore[call-overload]
    expected = {name for name in listed.decode().split("\0") if name and not name.endswith(".gitignore")}
    assert set(names(tmp_path)) == expected


def test_rules_of_the_repository_above_count_unless_the_folder_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "docs/a.md", "docs/b.log", "build/c.md", root="*.log\nbuild/\n")
    assert names(tmp_path / "docs") == ["a.md", "b.log"]
    (tmp_path / ".git").mkdir()
    assert names(tmp_path / "docs") == ["a.md"]
    assert names(tmp_path / "build") == ["c.md"]
    assert names(tmp_path / "docs" / "b.log") == ["b.log"]


def test_hidden_entries_are_skipped_and_counted(tmp_path: Path) -> None:
    tree(tmp_path, "a.md", ".hidden.md", ".cache/b.md", "x.log", root="*.log\n")
    found = walk([tmp_path])
    assert [file.name for file in found.files] == ["a.md"]
    assert found.skipped == 4
    assert names(tmp_path / ".hidden.md") == [".hidden.md"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    inside = tree(tmp_path / "in", "a.md", "sub/b.md")
    outside = tree(tmp_path / "out", "c.md", "deep/d.md")
    (inside / "circle").symlink_to(inside)
    (inside / "sub" / "up").symlink_to("..")
    (inside / "again").symlink_to(inside / "sub")
    (inside / "other").symlink_to(outside)
    (inside / "other two").symlink_to(outside / "deep")
    (outside / "back").symlink_to(inside)
    (outside / "above").symlink_to(tmp_path)
    (inside / "file.md").symlink_to(inside / "a.md")
    (inside / "broken.md").symlink_to(inside / "nowhere.md")
    assert names(inside) == ["a.md", "broken.md", "file.md", "other/c.md", "other/deep/d.md", "sub/b.md"]


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    tree(tmp_path, "a.md")
    assert names(tmp_path) == ["a.md"]


def test_two_files_of_one_name_are_not_one_document(tmp_path: Path) -> None:
    tree(tmp_path, "a/README.md", "b/README.md", "b/x.md")
    found = walk([tmp_path / "a", tmp_path / "b"])
    assert [file.name for file in found.files] == ["README.md", "x.md"]
    ((name, reason),) = found.failed
    assert name == str(tmp_path / "b" / "README.md")
    assert str(tmp_path / "a" / "README.md") in reason
    # The same file twice is one.
    assert walk([tmp_path / "a", tmp_path / "a"]).failed == []


def test_names_that_are_no_text_are_made_text(tmp_path: Path) -> None:
    tree(tmp_path, os.fsdecode(b"bad\xff.md"))
    assert names(tmp_path) == ["bad\ufffd.md"]
