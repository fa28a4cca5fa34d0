"""Sessions that wait on disk: an idle session's whole cache in one file, back without reading. On the MLX thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from kv.session import Session

log = structlog.get_logger()

# session, checksum
_NAME = re.compile(r"(\w+)\.(\w+)\.safetensors")
_PART = ".part.safetensors"


class Snapshots:
    """One file a session, the oldest first to go under the cap.

    folder: where they are; those of an earlier process are taken over. max_bytes: the cap; 0 turns snapshots off.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: dict[str, tuple[Path, str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            if path.name.endswith(_PART):
                path.unlink()
            elif named := _NAME.fullmatch(path.name):
                self._files[named[1]] = (path, named[2])
        self._shrink()

    @property
    def sessions(self) -> list[str]:
        """Ids of the sessions that wait here."""
        return list(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path, _ in self._files.values())

    def save(self, session_id: str, session: Session) -> bool:
        """Write a session's cache. Returns whether it is there now."""
        self.drop(session_id)
        if session.nbytes > self._max_bytes:
            return False
        part = self._folder / f"{session_id}{_PART}"
        try:
            digest = session.save(part, session_id)
            path = part.rename(self._folder / f"{session_id}.{digest}.safetensors")
        except (OSError, RuntimeError) as error:
            log.warning("session could not be written to disk", session_id=session_id, error=str(error))
            with suppress(OSError):
                part.unlink()
            return False
        self._files[session_id] = (path, digest)
        self._shrink()
        return session_id in self._files

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
