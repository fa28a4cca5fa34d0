"""Starts servers by forking a process that has imported what `keepwhole serve` imports: most of a start is imports.

What runs is `keepwhole` as it is, from its command line on, in a process of its own. Nothing is forked that has loaded
a model, opened a database or started a thread of ours.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from typing import IO, NoReturn


class Forked:
    """A forked process, as far as tests ask of one what they ask of `subprocess.Popen`."""

    def __init__(self, starter: Starter, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._starter = starter
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("keepwhole", timeout or 0)
            self.returncode = self._starter.reap(self.pid)
            os.close(self._ended)
        return self.returncode

    def send_signal(self, how: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, how)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Starter:
    """The process that forks. One for a test run, or for each of its workers."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPWHOLE_")}
        with theirs:
            command = [sys.executable, "-m", "tests.app.starter", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def start(self, arguments: list[str], environment: dict[str, str], stderr: IO[bytes]) -> Forked:
        """Start `keepwhole` with these arguments and no other environment."""
        reading, writing = os.pipe()
        request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()}).encode()
        socket.send_fds(self._line, [request], [writing, stderr.fileno()])
        os.close(writing)
        return Forked(self, int(self._line.recv(100)), os.fdopen(reading))

    def reap(self, pid: int) -> int:
        """The exit status of a process that has ended."""
        self._line.send(str(pid).encode())
        return int(self._line.recv(100))

    def close(self) -> None:
        """End the process that forks."""
        self._line.close()
        self._process.wait()


def _serve(line: socket.socket) -> None:
    from kv.cpu import blas

    blas.load()
    import kv.model.oncpu  # noqa: F401

    while True:
        message, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not message:
            return
        if not descriptors:
            pid, status = os.waitpid(int(message), 0)
            line.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            line.close()
            _become(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        line.send(str(pid).encode())


def _become(request: dict[str, object], descriptors: list[int]) -> NoReturn:
    status = 1
    try:
        for descriptor, own in zip(descriptors, (1, 2), strict=True):
            os.dup2(descriptor, own)
            os.close(descriptor)
        # Anew: those of the parent know what their files could do.
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w"), open(2, "w")  # noqa: SIM115
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[arg-type]
        os.chdir(str(request["folder"]))
        sys.argv = ["keepwhole", *request["arguments"]]  # type: ignore[misc]
        from app.cli.commands import main

        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
