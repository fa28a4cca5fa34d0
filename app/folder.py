"""The data folder belongs to one process at a time, which says in it where it can be reached."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

# Beside the database, as SQLite's own files are. It stays when it is released: a file that is removed while another
# process waits for it would be two locks.
_NAME = "library.db-lock"
_MOST = 500


class InUse(RuntimeError):
    """Another process has the folder. url: where it serves, if it is a server and knows."""

    def __init__(self, message: str, url: str | None) -> None:
        super().__init__(message)
        self.url = url


class FolderLock:
    """Held until released, or until the process is gone, however it ended."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def announce(self, url: str | None) -> None:
        """Write down who has the folder, and where it serves."""
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n{url or ''}\n".encode())
        self._file.flush()

    def release(self) -> None:
        """Let others have the folder."""
        self._file.close()


def lock_folder(folder: Path, url: str | None = None) -> FolderLock:
    """Take the data folder for this process, which will serve at `url`. Raises InUse with the process that has it."""
    file = (folder / _NAME).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        process, _, rest = file.read(_MOST).decode(errors="replace").partition("\n")
        file.close()
        raise InUse(
            f"the data folder {folder} is in use by process {process or 'unknown'}", rest.strip() or None
        ) from error
    lock = FolderLock(file)
    lock.announce(url)
    return lock
