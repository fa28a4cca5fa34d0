"""Reading, cutting, embedding in a process of its own: a file that makes its parser spin or crash harms nothing else.

Nor does a large one hold up the threads of this process, such as those that answer people.

Run as `python -m ingest.reading FD FD`, this is that process: it takes requests from a socket, its pace from a pipe,
and answers each with the text of a file, its passages and their vectors, or with why it cannot be read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

import ingest
from ingest.blocks import Block
from ingest.counting import CounterRecipe
from ingest.documents import Upload, read_upload
from ingest.embedder import NONE, embed_passages
from ingest.embedders import load_embedder
from ingest.errors import InvalidInput, Unreadable
from ingest.pace import HURRY, REST, SHARE, Pace
from ingest.passages import Passage, cut
from ingest.splitters import split

_POLL_SECONDS = 0.05
_ORPHAN_SECONDS = 1.0
# Taking apart what the process sent is one call, during which no other thread here runs: so many at a time.
_PASSAGES_AT_ONCE = 250


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A file as text.

    warnings: what was left out of it. passages: what it was cut into; None without a counter to cut it by: then
    `blocks` says where. vectors: of the passages, as they are stored; None without an embedder.
    """

    text: str
    media_type: str
    passages: list[Passage] | None = None
    vectors: list[bytes] | None = None
    blocks: list[Block] | None = None
    warnings: list[str] = []


class Cutting(msgspec.Struct, frozen=True):
    """By what to cut: a counter, and the most tokens of a passage. embedder: the setting of one for passages."""

    counter: CounterRecipe
    passage_tokens: int
    embedder: str | None = None


class _File(msgspec.Struct, frozen=True, tag=True):
    path: str
    name: str
    media_type: str | None


class _Text(msgspec.Struct, frozen=True, tag=True):
    text: str
    media_type: str


class _Head(msgspec.Struct, frozen=True, tag=True):
    """text: None if the request had it. count: of the passages that follow; blocks if none do."""

    text: str | None
    media_type: str
    count: int
    blocks: list[Block] | None
    warnings: list[str] = []


class _Part(msgspec.Struct, frozen=True):
    """Some passages, without their texts, and their vectors one behind the other."""

    passages: list[Passage]
    vectors: bytes


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Interrupted(Exception):
    """The caller of `Reader.read` wanted to stop."""


class Reader:
    """Reads files in a process that is started when needed, and ended when it takes too long. For one thread.

    cutting: by what that process is to cut; None if its caller does. busy: asked all the while whether somebody waits
    for an answer, so that it is to rest most of the time.
    """

    def __init__(self, cutting: Cutting | None = None, busy: Callable[[], bool] = lambda: False) -> None:
        self._cutting = cutting
        self._busy = busy
        self._words: int | None = None
        self._said: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def awake(self) -> bool:
        """Whether the process is there, so that the next file need not wait for its start."""
        return self._process is not None

    def read(
        self, path: Path, name: str, media_type: str | None, *, seconds: float, stop: Callable[[], bool]
    ) -> Reading:
        """The file at `path`, called `name`, read and cut.

        `media_type` is what its sender says. `stop` is asked all the while. Raises Unreadable, with the reason, for a
        file that is refused, takes more than `seconds`, or crashes its parser; Interrupted once `stop()` is true.
        """
        return self._ask(_File(str(path), name, media_type), seconds, stop)

    def cut(self, text: str, media_type: str, *, seconds: float, stop: Callable[[], bool]) -> Reading:
        """What was read already, cut. As `read`."""
        return self._ask(_Text(text, media_type), seconds, stop, text)

    def _ask(self, request: _File | _Text, seconds: float, stop: Callable[[], bool], text: str = "") -> Reading:
        connection = self._connection or self._start()
        used, last = 0.0, time.monotonic()

        def received() -> bytes:
            nonlocal used, last
            while not connection.poll(_POLL_SECONDS):
                if stop():
                    raise Interrupted
                # Of the time that it was to rest, its share counts.
                passed = time.monotonic() - last
                used, last = used + (passed * SHARE if self._say_pace() else passed), last + passed
                if used > seconds:
                    raise Unreadable(f"reading and cutting it took more than {seconds:g} s, the limit")
            return connection.recv_bytes()

        try:
            connection.send_bytes(msgspec.msgpack.encode(request))
            head = msgspec.msgpack.decode(received(), type=_Head | _Refusal)
            if isinstance(head, _Head):
                if head.text is not None:
                    text = head.text
                passages: list[Passage] = []
                vectors: list[bytes] = []
                while len(passages) < head.count:
                    part = msgspec.msgpack.decode(received(), type=_Part)
                    passages += _with_text(text, part.passages)
                    vectors += _apart(part.vectors, len(part.passages))
        except (EOFError, OSError) as error:
            raise Unreadable(f"its parser crashed{self._how_it_ended()}") from error
        except BaseException:
            self.rest()
            raise
        if isinstance(head, _Refusal):
            raise Unreadable(head.reason)
        cut_here = head.blocks is None
        return Reading(
            text=text,
            media_type=head.media_type,
            passages=passages if cut_here else None,
            vectors=vectors or None,
            blocks=head.blocks,
            warnings=head.warnings,
        )

    def rest(self) -> None:
        """End the process; the next file starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        if self._words is not None:
            os.close(self._words)
        self._process = self._connection = self._words = self._said = None

    def _say_pace(self) -> bool:
        """Tell the process whether to rest, if that is news; returns whether it is to."""
        busy = self._busy()
        if self._words is not None and self._said != (word := REST if busy else HURRY):
            os.write(self._words, word)
            self._said = word
        return busy

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        heard, self._words = os.pipe()
        # -P: a file called json.py in the current folder must not become a module of that process.
        command = [sys.executable, "-P", "-m", "ingest.reading", str(theirs.fileno()), str(heard)]
        paths = [str(Path(ingest.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), heard],
            # Ctrl-C is for its parent, which ends it.
            start_new_session=True,
        )
        theirs.close()
        os.close(heard)
        ours.send_bytes(msgspec.msgpack.encode(self._cutting))
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


def _with_text(text: str, passages: list[Passage]) -> Iterator[Passage]:
    return (msgspec.structs.replace(passage, text=text[passage.start : passage.end]) for passage in passages)


def _apart(vectors: bytes, count: int) -> list[bytes]:
    size = len(vectors) // count
    return [vectors[start : start + size] for start in range(0, len(vectors), size)] if size else []


class _Work:
    """What the process does with a request."""

    def __init__(self, cutting: Cutting | None) -> None:
        self._count = None if cutting is None else cutting.counter.counter()
        self._most = 0 if cutting is None else cutting.passage_tokens
        self._embedder = load_embedder(NONE if cutting is None or cutting.embedder is None else cutting.embedder)

    def answer(self, request: _File | _Text) -> Iterator[_Head | _Refusal | _Part]:
        """What to send back, piece by piece."""
        try:
            warnings: list[str] = []
            sent = None
            if isinstance(request, _Text):
                text, media_type = request.text, request.media_type
            else:
                upload = self._read(request)
                sent = text = upload.text
                media_type, warnings = upload.media_type, upload.warnings
            if self._count is None:
                yield _Head(sent, media_type, 0, split(text, media_type), warnings)
                return
            passages = cut(text, media_type, self._count, self._most)
        except FileNotFoundError:
            yield _Refusal("its bytes are lost; upload it again")
        except InvalidInput as error:
            yield _Refusal(str(error))
        except Exception as error:
            yield _Refusal(f"{type(error).__name__}: {error}")
        else:
            yield _Head(sent, media_type, len(passages), None, warnings)
            for start in range(0, len(passages), _PASSAGES_AT_ONCE):
                some = passages[start : start + _PASSAGES_AT_ONCE]
                embedded = embed_passages(self._embedder, ((p.heading, p.text) for p in some)) if self._embedder else []
                # The text is sent already.
                yield _Part([msgspec.structs.replace(passage, text="") for passage in some], b"".join(embedded))

    @staticmethod
    def _read(request: _File) -> Upload:
        data = Path(request.path).read_bytes()
        return read_upload(request.name, data, request.media_type, max_bytes=len(data))


def _give_way() -> None:
    """Work in what the rest of the machine leaves: answers being written for people come first."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


def main() -> None:
    """Answer requests until the parent closes the socket, or is gone."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    _give_way()
    pace = Pace(int(sys.argv[2]))
    try:
        work = _Work(msgspec.msgpack.decode(connection.recv_bytes(), type=Cutting | None))
        while True:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=_File | _Text)
            with pace.kept():
                for message in work.answer(request):
                    connection.send_bytes(msgspec.msgpack.encode(message))
    except EOFError:
        return


if __name__ == "__main__":
    main()
