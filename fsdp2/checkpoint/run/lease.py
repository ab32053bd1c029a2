"""Which process saves to a name: a file next to the folder, for as long as the save lasts. Layer: checkpoint.

The lease of ``step-00001000`` is ``.lease-step-00001000``. It names its holder: host, process, start time, job, save. A
second job that saves to the name gets an error with these. A lease is taken over if its process is gone (on the same
host), or if it has not been renewed for `LEASE_S` (on other hosts).

It is only advisory. The process that commits renames only its own folders (see `folders.py`), so nothing is lost if two
processes both believe that they hold the lease. That matters, because no file system can distinguish a dead process
from one that is suspended for long. Since a suspended process may resume, the lease is checked again before each change
under the name.

The file appears atomically with its content (a hard link, otherwise an exclusive create), also on NFS. Storages that
cannot rename folders have no lease: nothing is replaced there, and only one process can create the manifest.
"""

import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass

from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CheckpointError
from fsdp2.watch.processes import machine, stat_of

__all__ = [
    "LEASE_NAME",
    "LEASE_S",
    "Lease",
    "check_lease",
    "end_lease",
    "has_lease",
    "is_leased",
    "lease_name",
    "take_lease",
]

LEASE_S = 60.0  # after the last renewal; then another host may take the lease over
RENEW_S = 10.0
LOOK_S = 0.5
MAX_BYTES = 4096
LEASE_NAME = re.compile(r"\.lease-.+", re.DOTALL)
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def lease_name(name: str) -> str:
    """The lease of a folder."""
    return f".lease-{name}"


@dataclass(frozen=True)
class Holder:
    """The holder of a lease.

    Attributes:
        id: the id of the save.
        place: kernel and process namespace: process ids are only comparable within one.
        started: when the process began, in ticks since boot: its id may have been reused since.
        job: the job id of the scheduler.
        since: seconds since 1970.
    """

    id: str = ""
    host: str = ""
    place: str = ""
    pid: int = 0
    started: str = ""
    job: str = ""
    since: float = 0.0

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        for_s = max(0.0, time.time() - self.since)
        return f"process {self.pid} on {self.host}{job} (save {self.id}, since {for_s:.0f} s)"


@dataclass(frozen=True)
class _Found:
    """A lease file. If it is being written, or its content is no lease, the holder is unknown."""

    holder: Holder
    inode: int
    renewed: float

    @property
    def is_dead(self) -> bool | None:
        """Whether its process is gone; None if this host cannot tell."""
        found = stat_of(self.holder.pid) if self.holder.place == machine() != "" else None
        return None if found is None else found[0] in "ZX" or found[1] != self.holder.started


class Lease:
    """A lease of this process, which is renewed until `release`."""

    def __init__(self, file: str = "", fd: int = -1):
        self._file = file
        self._fd = fd
        if fd >= 0:
            _renewer.add(fd)

    def release(self) -> None:
        """Release it; never raises. A lease that another process has taken over stays."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with suppress(OSError):
            if os.lstat(self._file).st_ino == os.fstat(fd).st_ino:
                os.unlink(self._file)
        _renewer.close(fd)


class _Renewer:
    """Renews all leases of this process, in one thread, which ends when there are none."""

    def __init__(self) -> None:
        self._fds: set[int] = set()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, fd: int) -> None:
        with self._change:
            self._fds.add(fd)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fsdp2-lease", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread available: a save without renewal is better than none
                    self._thread = None

    def close(self, fd: int) -> None:
        with self._change:
            self._fds.discard(fd)
            os.close(fd)

    def _run(self) -> None:
        with self._change:
            while self._fds:
                self._change.wait(RENEW_S)
                for fd in self._fds:
                    with suppress(OSError):
                        os.utime(fd)  # the file itself, even if another file has its name by now
            self._thread = None


_renewer = _Renewer()


def _after_fork() -> None:
    """In the child the thread does not exist, and its lock may be held forever."""
    global _renewer
    _renewer = _Renewer()


os.register_at_fork(after_in_child=_after_fork)


def take_lease(storage: Storage, path: str, save_id: str, timeout_s: float) -> Lease:
    """Take the lease of `path`, on one process of a save.

    Raises:
        CheckpointError: another save holds it, or may hold it: its host is another one, it was renewed recently, and
            `timeout_s` is too short to observe whether it is renewed again.
    """
    if not storage.renames:
        return Lease()
    folder, name = storage.split(path)
    storage.make_folder(folder)
    file = storage.join(folder, lease_name(name))
    deadline = time.monotonic() + timeout_s
    first: _Found | None = None
    while True:
        # Such names are swept with those of dead saves, in case this process dies now.
        fd, now = _made(storage.join(folder, f".tmp-{name}-{uuid.uuid4().hex[:12]}"), file, save_id)
        if fd is not None:
            return Lease(file, fd)
        found = _look(file)
        if found is None:
            continue
        dead = found.is_dead
        if dead is None:
            dead = now - found.renewed > LEASE_S
            first = first or found
            if not dead and found == first and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                continue
        if not dead:
            raise CheckpointError(
                f"{path}: is being saved by {found.holder}. Two jobs must not save to one name: stop one, or save to "
                "another folder."
            )
        _clear(file, found)


def check_lease(storage: Storage, path: str, save_id: str) -> None:
    """Check that a save still holds its lease. Any of its processes may call this.

    Raises:
        CheckpointError: another save has taken it over.
    """
    if not storage.renames:
        return
    folder, name = storage.split(path)
    found = _look(storage.join(folder, lease_name(name)))
    if found is not None and found.holder.id in (save_id, ""):
        return
    # A file that another host made may not be visible by its name yet; the listing of the folder is fresh.
    if found is None and lease_name(name) in storage.names(folder):
        return
    who = f"by {found.holder}" if found is not None else "by one that has ended"
    raise CheckpointError(
        f"{path}: the lease of this save was taken over {who}, since it was not renewed for {LEASE_S:g} s: the process "
        "that held it has died or was suspended. Two jobs save there; stop one."
    )


def has_lease(storage: Storage, path: str, save_id: str) -> bool:
    """Whether a save certainly still holds its lease. Any of its processes may call this."""
    folder, name = storage.split(path)
    found = _look(storage.join(folder, lease_name(name)))
    return found is not None and found.holder.id == save_id


def end_lease(storage: Storage, path: str, save_id: str) -> None:
    """Delete the lease of a committed save, from any of its processes. This happens before the other ranks continue,
    because one of them may begin the next save there. Never raises."""
    if storage.renames:
        folder, name = storage.split(path)
        file = storage.join(folder, lease_name(name))
        with suppress(OSError):
            found = _look(file)
            if found is not None and found.holder.id == save_id:
                os.unlink(file)


def is_leased(storage: Storage, path: str) -> bool:
    """Whether a process may be saving to `path` now."""
    if not storage.renames:
        return False
    folder, name = storage.split(path)
    found = _look(storage.join(folder, lease_name(name)))
    if found is None:
        return False
    dead = found.is_dead
    return time.time() - found.renewed < LEASE_S if dead is None else not dead


def _made(part: str, file: str, save_id: str) -> tuple[int | None, float]:
    """Try to create a lease: its file descriptor (None if there is a lease already), and the time by the clock of the
    file server.

    Args:
        part: the name of the file until it becomes the lease.
    """
    content = _encoded(save_id)
    fd: int | None = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o666)
    assert fd is not None
    made = None
    try:
        os.write(fd, content)
        now = os.fstat(fd).st_mtime
        try:
            os.link(part, file)
        except (FileExistsError, FileNotFoundError):  # there is a lease; or another process has swept the part
            pass
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with suppress(FileExistsError):
                made = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS, 0o666)
                os.write(made, content)
        if os.fstat(fd).st_nlink > 1:  # NFS may have made the link and lost the answer
            made, fd = fd, None
    finally:
        if fd is not None:
            os.close(fd)
        with suppress(OSError):
            os.unlink(part)
    return made, now


def _clear(file: str, found: _Found) -> None:
    """Remove a dead lease, but not another one that may have replaced it."""
    aside = f"{file}-{uuid.uuid4().hex[:12]}"
    with suppress(FileNotFoundError):
        os.rename(file, aside)
        now = _look(aside)
        if now is not None and now != found:
            with suppress(OSError):
                os.link(aside, file)
        os.unlink(aside)


def _look(file: str) -> _Found | None:
    """The lease that exists; None if there is none."""
    try:
        fd = os.open(file, os.O_RDONLY | FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None
        raise
    try:
        status = os.fstat(fd)
        content = os.read(fd, MAX_BYTES)
    finally:
        os.close(fd)
    holder = Holder()
    with suppress(ValueError, TypeError, RecursionError):
        holder = Holder(**json.loads(content))
    return _Found(holder, status.st_ino, status.st_mtime)


def _encoded(save_id: str) -> bytes:
    job = next((os.environ[name] for name in JOBS if os.environ.get(name)), "")
    pid = os.getpid()
    _, started = stat_of(pid) or ("", "")
    holder = Holder(save_id, socket.gethostname(), machine(), pid, started, job[:200], time.time())
    return json.dumps(asdict(holder)).encode()
