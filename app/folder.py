"""The data folder belongs to one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

# Beside the database, as SQLite's own files are. It stays when it is released: a file that is removed while another
# process waits for it would be two locks.
_NAME = "library.db-lock"


class InUse(RuntimeError):
    """Another process has the folder."""


class FolderLock:
    """Held until released, or until the process is gone, however it ended."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def release(self) -> None:
        """Let others have the folder."""
        self._file.close()


def lock_folder(folder: Path) -> FolderLock:
    """Take the data folder for this process. Raises InUse with the process that has it."""
    file = (folder / _NAME).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read(20).decode(errors="replace").strip()
        file.close()
        raise InUse(f"the data folder {folder} is in use by process {owner or 'unknown'}") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return FolderLock(file)
