"""Sessions that wait on disk: an idle session's whole cache in one file, back without reading. On the MLX thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from pathlib import Path

import structlog

from app.memory import whole_files
from kv.session.session import Session

log = structlog.get_logger()

_STEM = re.compile(r"(\w+)")


class Snapshots:
    """One file a session, the oldest first to go under the cap.

    folder: where they are; those of an earlier process are taken over. max_bytes: the cap; 0 turns snapshots off.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: dict[str, tuple[Path, str]] = {}
        for path, (session_id,), checksum in whole_files.left(folder, _STEM):
            self._files[session_id] = (path, checksum)
        self._shrink()

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path, _ in self._files.values())

    def keep(self, known: Set[str]) -> None:
        """Delete the files of sessions other than these."""
        for session_id in self._files.keys() - known:
            self.drop(session_id)

    def save(self, session_id: str, session: Session) -> None:
        """Write a session's cache, if there is room for it at all."""
        self.drop(session_id)
        if session.nbytes > self._max_bytes:
            return
        if written := whole_files.write(self._folder, session_id, lambda path: session.save(path, session_id)):
            self._files[session_id] = written
            self._shrink()

    def take(self, session_id: str, load: Callable[[Path, str], Session]) -> Session | None:
        """A session's cache, which leaves the disk: once it is used, the file would be out of date.

        load: reads the file of that checksum; what it refuses with ValueError is dropped, and logged.
        """
        held = self._files.get(session_id)
        if held is None:
            return None
        try:
            return load(*held)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            log.warning("snapshot refused; the session is rebuilt", session_id=session_id, error=str(error))
            return None
        finally:
            self.drop(session_id)

    def drop(self, session_id: str) -> None:
        """Delete a session's file, if there is one."""
        if held := self._files.pop(session_id, None):
            held[0].unlink(missing_ok=True)

    def _shrink(self) -> None:
        while self._files and self.nbytes > self._max_bytes:
            self.drop(next(iter(self._files)))
