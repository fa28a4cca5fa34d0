"""Which files of a folder are documents: by .gitignore, without hidden ones, and without walking in circles."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pathspec import GitIgnoreSpec

RULES = ".gitignore"

# The group in pathspec's patterns that is matched where a folder's name ends.
_FOLDER_MARK = "ps_d"


@dataclass(frozen=True)
class SourceFile:
    """A file to ingest. name: the document's, relative to `folder`, which is None for a file that was named itself."""

    path: Path
    name: str
    folder: Path | None


@dataclass
class Walk:
    """What is to be ingested of the paths that were asked for.

    failed: (name, reason) of what cannot be. skipped: entries that are hidden or ignored, a folder being one.
    """

    files: list[SourceFile] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: int = 0


def walk(paths: Iterable[Path]) -> Walk:
    """Every document of `paths`, which are files or folders, sorted within each.

    A file that is named itself is taken whatever the rules say. Names must be unique: the second of a name is failed.
    """
    found = Walk()
    for path in paths:
        if path.is_dir():
            _Folder(path, found).walk()
        else:
            found.files.append(SourceFile(path, printable(path.name), None))
    _refuse_equal_names(found)
    return found


def printable(name: str) -> str:
    """A file's name as text: bytes that are none become U+FFFD."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _refuse_equal_names(found: Walk) -> None:
    first: dict[str, Path] = {}
    for file in found.files:
        if (other := first.setdefault(file.name, file.path)) != file.path:
            reason = f"{other} has the same name here; ingest a folder that both are in"
            found.failed.append((str(file.path), reason))
    found.files = [file for file in found.files if first[file.name] == file.path]


@dataclass(frozen=True)
class _Rules:
    """A .gitignore, for paths below its folder."""

    folder: Path
    spec: GitIgnoreSpec


class _Folder:
    def __init__(self, root: Path, found: Walk) -> None:
        self._root = root
        self._found = found
        # Links to folders are followed out of these, and not back into them.
        self._reached = [root.resolve()]

    def walk(self) -> None:
        real = self._root.resolve()
        above = list(_rules_above(real))
        if _ignored(real, True, above):
            # It was asked for by name, so it is not its parents' business.
            above = []
        self._descend(self._root, real, above)

    def _descend(self, folder: Path, real: Path, above: list[_Rules]) -> None:
        """real: `folder` as its rules see it, its parents' links resolved."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self._found.failed.append((self._name(folder), _reason(error)))
            return
        rules = [*above, *_rules_of(real)]
        for entry in entries:
            path = folder / entry.name
            # A link is a file to Git, whatever it leads to.
            is_folder = entry.is_dir()
            ignored = _ignored(real / entry.name, is_folder and not entry.is_symlink(), rules)
            if entry.name.startswith(".") or ignored:
                self._found.skipped += 1
            elif is_folder:
                if not entry.is_symlink() or self._is_new(path):
                    self._descend(path, real / entry.name, rules)
            elif entry.is_file() or entry.is_symlink():
                self._found.files.append(SourceFile(path, self._name(path), self._root))

    def _is_new(self, link: Path) -> bool:
        target = link.resolve()
        if any(target.is_relative_to(known) or known.is_relative_to(target) for known in self._reached):
            return False
        self._reached.append(target)
        return True

    def _name(self, path: Path) -> str:
        return printable(path.relative_to(self._root).as_posix())


def _rules_above(folder: Path) -> Iterator[_Rules]:
    """The rules of the repository around `folder`, outermost first; none where there is no repository."""
    parents = list(folder.parents)
    top = next((n for n, parent in enumerate([folder, *parents]) if (parent / ".git").exists()), 0)
    for parent in reversed(parents[:top]):
        yield from _rules_of(parent)


def _rules_of(folder: Path) -> Iterator[_Rules]:
    try:
        lines = (folder / RULES).read_text(errors="replace").splitlines()
    except OSError:
        return
    yield _Rules(folder, GitIgnoreSpec.from_lines(lines))


def _ignored(path: Path, is_folder: bool, rules: list[_Rules]) -> bool:
    """What the innermost of `rules` says that says anything."""
    for each in reversed(rules):
        inner = path.relative_to(each.folder).as_posix() + ("/" if is_folder else "")
        for pattern in reversed(each.spec.patterns):
            if pattern.regex is not None and _matches(pattern.regex, inner):
                return bool(pattern.include)
    return False


def _matches(regex: re.Pattern[str], path: str) -> bool:
    """Whether a pattern is about `path` itself, and not about a folder above it, which was asked about before.

    pathspec's own answer (1.1) takes both together, and so has `*`, `!*/`, `!*.md` ignore every folder.
    """
    for match in regex.finditer(path):
        if _FOLDER_MARK not in regex.groupindex or match[_FOLDER_MARK] is None or match.end(_FOLDER_MARK) == len(path):
            return True
    return False


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
