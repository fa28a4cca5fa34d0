"""What is freed goes back to the system, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from app.memory.allocator import return_freed_memory

# Frees every other block of many sizes, after one large block has taught glibc to keep such blocks, and says what of
# the freed is still resident.
SCRIPT = """
import ctypes, sys
from app.memory.allocator import return_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def block(size):
    pointer = libc.malloc(size)
    ctypes.memset(pointer, 1, size)
    return pointer
if sys.argv[1] == "yes":
    assert return_freed_memory()
libc.free(block(30_000_000))
before = resident()
blocks = [block(1_000_000) for _ in range(200)]
for pointer in blocks[::2]:
    libc.free(pointer)
print(resident() - before)
"""


def resident(returned: str) -> int:
    run = subprocess.run([sys.executable, "-c", SCRIPT, returned], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_blocks_go_back_to_the_system() -> None:
    # Half of 200 MB are freed.
    assert resident("no") > 190_000_000
    assert resident("yes") < 110_000_000


@pytest.mark.parametrize("libc", ["", "musl"])
def test_other_c_libraries_are_left_alone(libc: str) -> None:
    assert not return_freed_memory(libc)
