"""Reading in a process of its own: a file that makes its parser spin, or crash, harms nothing else.

Run as `python -m ingest.reading FD`, this is that process: it takes requests from a socket, and answers each with the
text and the blocks of a file, or with why it cannot be read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

import ingest
from ingest.blocks import Block
from ingest.documents import read_upload
from ingest.errors import InvalidInput, Unreadable
from ingest.splitters import split

_POLL_SECONDS = 0.05
_ORPHAN_SECONDS = 1.0


class Reading(msgspec.Struct, frozen=True, tag=True):
    """A file as text, and its blocks."""

    text: str
    media_type: str
    blocks: list[Block]


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


class _Request(msgspec.Struct, frozen=True):
    path: str
    name: str
    media_type: str | None


class Interrupted(Exception):
    """The caller of `Reader.read` wanted to stop."""


class Reader:
    """Reads files in a process that is started when needed, and ended when it takes too long. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def read(
        self, path: Path, name: str, media_type: str | None, *, seconds: float, stop: Callable[[], bool]
    ) -> Reading:
        """The text and blocks of the file at `path`, called `name`.

        `media_type` is what its sender says. `stop` is asked all the while. Raises Unreadable, with the reason, for a
        file that is refused, takes more than `seconds`, or crashes its parser; Interrupted once `stop()` is true.
        """
        connection = self._connection or self._start()
        started = time.monotonic()
        try:
            connection.send_bytes(msgspec.msgpack.encode(_Request(str(path), name, media_type)))
            while not connection.poll(_POLL_SECONDS):
                if stop():
                    raise Interrupted
                if time.monotonic() - started > seconds:
                    raise Unreadable(f"reading it took more than {seconds:g} s, the limit")
            answer = msgspec.msgpack.decode(connection.recv_bytes(), type=Reading | _Refusal)
        except (EOFError, OSError) as error:
            raise Unreadable(f"its parser crashed{self._how_it_ended()}") from error
        except BaseException:
            self.rest()
            raise
        if isinstance(answer, _Refusal):
            raise Unreadable(answer.reason)
        return answer

    def rest(self) -> None:
        """End the process; the next file starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        # -P: a file called json.py in the current folder must not become a module of that process.
        command = [sys.executable, "-P", "-m", "ingest.reading", str(theirs.fileno())]
        paths = [str(Path(ingest.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ctrl-C is for its parent, which ends it.
            start_new_session=True,
        )
        theirs.close()
        self._connection = ours
        return ours

    def _how_it_ended(self) -> str:
        process = self._process
        try:
            status = None if process is None else process.wait(1)
        except subprocess.TimeoutExpired:
            status = None
        self.rest()
        return "" if status is None else f" (signal {-status})" if status < 0 else f" (status {status})"


def _read(request: _Request) -> Reading | _Refusal:
    try:
        data = Path(request.path).read_bytes()
        upload = read_upload(request.name, data, request.media_type, max_bytes=len(data))
        return Reading(upload.text, upload.media_type, split(upload.text, upload.media_type))
    except FileNotFoundError:
        return _Refusal("its bytes are lost; upload it again")
    except InvalidInput as error:
        return _Refusal(str(error))
    except Exception as error:
        return _Refusal(f"{type(error).__name__}: {error}")


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


def main() -> None:
    """Answer requests until the parent closes the socket, or is gone."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    # Answers being written for people come first.
    os.nice(5)
    while True:
        try:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=_Request)
        except EOFError:
            return
        connection.send_bytes(msgspec.msgpack.encode(_read(request)))


if __name__ == "__main__":
    main()
