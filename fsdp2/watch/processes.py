"""Processes of this machine, as /proc shows them. Layer: ground."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["machine", "stat_of"]


@cache
def machine() -> str:
    """Identifies this kernel and PID namespace (containers have their own); "" without /proc."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def stat_of(pid: int) -> tuple[str, str] | None:
    """(the kernel's letter for its state, its start time) of a process; empty if it has ended, None if it is hidden. A
    PID may be reused, by a process with a later start time."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "", ""
    except OSError:
        pass
    return None
