"""How much memory an action takes, as the operating system sees it (Linux with glibc).

To be measured in a process of its own, as those of `mortal_ranks.py`: of freed memory glibc keeps up to 64 MiB,
and pieces between others that are in use. A tensor that lies in what earlier tests left is not seen, and messages that
come one after the other, each in another such piece, look as if they were there all at once.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["address_space", "extra_memory", "reads_proc"]

reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h


def extra_memory(action: Callable[[], Any]) -> int:
    """By how many bytes the resident memory of this process went up in between, at its peak."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 256 << 10)  # what is larger goes back when it is freed, for the rest of the process
    libc.mallopt(M_ARENA_MAX, 1)  # threads that wait for each other take no new arenas, of 64 MiB of addresses each
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def address_space() -> int:
    """What RLIMIT_AS limits, of this process."""
    return _status_bytes("VmSize")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
