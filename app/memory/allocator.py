"""Memory that is freed goes back to the system: the one platform choice of the C library's allocator.

glibc learns from every large block that is freed to keep blocks of that size for itself, up to 32 MB. K/V buffers come
and go in all sizes, and the process would come to take twice what it holds. It also gives threads heaps of their own,
none of which uses what is free in another. Elsewhere nothing needs to be done: macOS returns large blocks, and MLX on a
GPU has an allocator of its own.
"""

from __future__ import annotations

import ctypes
import platform

# From malloc.h, and the size that glibc starts from.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_BYTES = 128 * 1024
_ARENAS = 2


def return_freed_memory(libc: str | None = None) -> bool:
    """Let blocks of 128 kB and more go back to the system when freed. Returns whether that was needed and done.

    libc: what the C library is, as `platform.libc_ver` says; None asks it.
    """
    if (platform.libc_ver()[0] if libc is None else libc) != "glibc":
        return False
    glibc = ctypes.CDLL(None)
    return bool(glibc.mallopt(_M_MMAP_THRESHOLD, _BYTES) and glibc.mallopt(_M_ARENA_MAX, _ARENAS))
