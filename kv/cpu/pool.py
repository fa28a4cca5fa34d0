"""Threads that share one kernel at a time, chunk by chunk, and sleep in between. Imports Numba, no MLX.

Numba's own layers cut a loop into one piece a thread, so that a thread which a neighbour holds up holds up all, and the
one that needs no library (workqueue) breaks when two Python threads enter. Here whoever is running takes the next
chunk: a thread that comes late finds less to do, or nothing. Nobody holds the GIL.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# A kernel: void (const int64 *arguments, int64 chunk, int64 thread).
KERNEL = types.void(types.CPointer(types.int64), types.int64, types.int64)

# Where things are in the words that threads share, a cache line apart where several write.
_TICKET, _DONE, _KERNEL, _ARGUMENTS, _ASLEEP, _SEMAPHORE, _WORDS = 0, 8, 16, 17, 24, 32, 40
# A ticket is [job | chunks of it | next chunk]: read in one piece, so that a late thread never takes the number of a
# chunk from one job and what to do from another.
_BITS = 20
MOST_CHUNKS = (1 << _BITS) - 1
# How often a thread looks for work before it sleeps: some 30 microseconds, less than waking one takes.
_LOOKS = 600

_sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _add(_context: Any, address: Any, value: Any) -> Any:
    """Add to a word that threads share; returns what it was."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _put(_context: Any, address: Any, value: Any) -> Any:
    """Set a word that threads share; returns what it was."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _get(_context: Any, address: Any) -> Any:
    """A word that threads share."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _pause(_context: Any) -> Any:
    """Leave the core to its other thread for a moment."""

    def generate(context: Any, builder: Any, __: Any, ___: Any) -> Any:
        nothing, number = ir.VoidType(), ir.IntType(32)
        if platform.machine() == "x86_64":
            hint = ir.FunctionType(nothing, [])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.x86.sse2.pause"), [])
        elif platform.machine() == "aarch64":
            hint = ir.FunctionType(nothing, [number])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint"), [number(1)])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def _call(_context: Any, kernel: Any, arguments: Any, chunk: Any, thread: Any) -> Any:
    """Call the kernel at an address."""

    def generate(context: Any, builder: Any, __: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word.as_pointer(), word, word])
        kernel = builder.inttoptr(values[0], function.as_pointer())
        builder.call(kernel, [builder.inttoptr(values[1], word.as_pointer()), values[2], values[3]])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), generate


@numba.njit(nogil=True, cache=True, inline="never")
def _work(words: int, thread: int) -> int:
    """Take chunks until there are none left; returns how many were taken."""
    taken = 0
    while True:
        # Looked at first: adding for nothing would take the line from those that add for something.
        ticket = _get(words + 8 * _TICKET)
        if ticket & MOST_CHUNKS >= (ticket >> _BITS) & MOST_CHUNKS:
            return taken
        ticket = _add(words + 8 * _TICKET, 1)
        chunk = ticket & MOST_CHUNKS
        if chunk >= (ticket >> _BITS) & MOST_CHUNKS:
            return taken
        # The job cannot end, and its words cannot change, before this chunk is done.
        _call(_get(words + 8 * _KERNEL), _get(words + 8 * _ARGUMENTS), chunk, thread)
        _add(words + 8 * _DONE, 1)
        taken += 1


@numba.njit(nogil=True, cache=True)
def _serve(words: int, thread: int) -> None:
    """What a thread of the pool does, for ever."""
    looks = 0
    while True:
        if _work(words, thread):
            looks = 0
        looks += 1
        if looks < _LOOKS:
            _pause()
            continue
        _add(words + 8 * _ASLEEP, 1)
        ticket = _get(words + 8 * _TICKET)
        if ticket & MOST_CHUNKS >= (ticket >> _BITS) & MOST_CHUNKS:
            _sem_wait(words + 8 * _SEMAPHORE)
        _add(words + 8 * _ASLEEP, -1)
        looks = 0


@numba.njit(nogil=True, cache=True, inline="never")
def run(words: int, kernel: int, arguments: int, chunks: int) -> None:
    """Run a kernel's chunks 0, 1, …, on this thread and all that can be woken. One caller at a time.

    words: a `Pool`'s. kernel: address of a `KERNEL`. arguments: what it gets. chunks: 1 to `MOST_CHUNKS`.
    """
    if chunks == 1:
        _call(kernel, arguments, 0, 0)
        return
    job = (_get(words + 8 * _TICKET) >> (2 * _BITS)) + 1
    _put(words + 8 * _KERNEL, kernel)
    _put(words + 8 * _ARGUMENTS, arguments)
    _put(words + 8 * _DONE, 0)
    _put(words + 8 * _TICKET, ((job & MOST_CHUNKS) << (2 * _BITS)) | (chunks << _BITS))
    for _ in range(min(_get(words + 8 * _ASLEEP), chunks - 1)):
        _sem_post(words + 8 * _SEMAPHORE)
    _work(words, 0)
    looks = 0
    while _get(words + 8 * _DONE) < chunks:
        looks += 1
        if looks < _LOOKS:
            _pause()
        else:
            # Whoever has the last chunk has been put aside: it may have this thread's core.
            _sched_yield()


class Pool:
    """Threads for `run`. threads: how many work, the calling one included."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # One job at a time: a process may hold several models, and tests run them on several threads.
        self.lock = threading.Lock()
        self._held = np.zeros(_WORDS + 8, dtype=np.int64)
        # From a cache line's start on.
        self.words = (self._held.ctypes.data + 63) // 64 * 64
        if ctypes.CDLL(None, use_errno=True).sem_init(ctypes.c_void_p(self.words + 8 * _SEMAPHORE), 0, 0):
            raise OSError(ctypes.get_errno(), "sem_init")
        self._scratch = np.empty((threads, 1), dtype=np.float32)
        for thread in range(1, threads):
            threading.Thread(target=_serve, args=(self.words, thread), name=f"kernels-{thread}", daemon=True).start()

    def scratch(self, floats: int) -> npt.NDArray[np.float32]:
        """Room for so many numbers a thread, [threads, floats or more]: kept, since fresh memory is slow."""
        if self._scratch.shape[1] < floats:
            self._scratch = np.empty((self.threads, floats), dtype=np.float32)
        return self._scratch


@lru_cache(maxsize=1)
def shared() -> Pool:
    """The process's pool: a thread for each core that it may use."""
    return Pool(len(os.sched_getaffinity(0)))
