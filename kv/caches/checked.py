"""Files that are checked whole before anything of them is used."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checksum(path: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bits as hex. Raises OSError if there is no such file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def check(path: Path, expected: str) -> None:
    """Raise ValueError unless a file has that checksum, OSError if there is none."""
    if (found := checksum(path)) != expected:
        raise ValueError(f"{path.name}: checksum {found}, not {expected}")


def check_about(path: Path, about: dict[str, str], **expected: str) -> None:
    """Raise ValueError unless a file's metadata say what they must."""
    for key, value in expected.items():
        if about.get(key) != value:
            raise ValueError(f"{path.name}: {key} is {about.get(key)!r}, not {value!r}")
