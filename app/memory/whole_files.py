"""Files that are there whole or not at all: written under another name first, and named by their checksum."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger()

_ENDING = ".safetensors"
_PART = f".part{_ENDING}"


def left(folder: Path, stem: re.Pattern[str]) -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """Files that an earlier process left, oldest first: path, the groups of `stem` in the name, checksum.

    The folder is made if it is missing. What a process was writing when it stopped is deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
        if path.name.endswith(_PART):
            path.unlink()
            continue
        name, _, checksum = path.name.removesuffix(_ENDING).rpartition(".")
        if path.suffix == _ENDING and (named := stem.fullmatch(name)):
            yield path, named.groups(), checksum


def write(folder: Path, stem: str, save: Callable[[Path], str]) -> tuple[Path, str] | None:
    """Write a file whose name is `stem` and its checksum: its path and that. None, and logged, if the disk refuses.

    save: writes to the path it is given, and returns the checksum.
    """
    part = folder / f"{stem}{_PART}"
    try:
        checksum = save(part)
        return part.rename(folder / f"{stem}.{checksum}{_ENDING}"), checksum
    except (OSError, RuntimeError) as error:
        log.warning("K/V could not be written to disk", file=part.name, error=str(error))
        with suppress(OSError):
            part.unlink()
        return None
