"""What the kernel says of other processes of this machine. Layer: watch.

A process that does not answer may be dead, stopped, or alive and short of processor time. Time does not tell them
apart, and a machine that runs too much at once must not look like a dead rank; /proc tells.
"""

import os
from enum import Enum
from pathlib import Path


class Fate(Enum):
    """What is known of a process."""

    RUNNING = "runs"
    STOPPED = "is stopped"
    GONE = "was killed"
    UNKNOWN = "is on another machine"


def identity() -> str:
    """Who this process is, for `fate_of`; "" where there is no /proc."""
    stat = _stat(os.getpid())
    return "" if stat is None else f"{_machine()} {os.getpid()} {stat[1]}"


def fate_of(identity: str) -> Fate:
    """What has become of the process that called itself that. One that a debugger has stopped counts as running."""
    machine, pid, begun = identity.split() if identity else ("", "0", "")
    if not machine or machine != _machine():
        return Fate.UNKNOWN
    stat = _stat(int(pid))
    if stat is None or stat[1] != begun or stat[0] in "ZX":
        return Fate.GONE
    return Fate.STOPPED if stat[0] == "T" else Fate.RUNNING


def _machine() -> str:
    """A name for this kernel and its numbers of processes: containers number theirs apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """(state, when it began); None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
