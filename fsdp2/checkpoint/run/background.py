"""The running save: at most one per process, in the background if requested. Layer: checkpoint."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fsdp2.checkpoint.io.memory import new_buffer, wait_for
from fsdp2.checkpoint.io.planned_files import Piece
from fsdp2.checkpoint.state.extra import ExtraShare
from fsdp2.errors import CheckpointError

__all__ = ["SaveHandle", "in_flight", "stage"]


class SaveHandle:
    """A save in progress.

    Attributes:
        folder: where the checkpoint is, once it is complete.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._begun = threading.Lock()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self.unreported: BaseException | None = None  # the error, until `wait` has raised it

    def done(self) -> bool:
        """Whether the save has ended, successfully or not. Does not block."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the checkpoint is complete and durable.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it failed, here or on another rank; earlier checkpoints are unchanged.
            TimeoutError: it is still running after `timeout_s`.
        """
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"{self.folder}: the save is still running after {timeout_s} s")
        if self._error is not None:
            self.unreported = None
            raise CheckpointError(f"{self.folder}: the save failed: {self._error}") from self._error
        return self.folder

    def begin(self) -> bool:
        """Whether this is the first call. So the work is either done or given up, never both."""
        return self._begun.acquire(blocking=False)

    def run(self, work: Callable[[], None]) -> None:
        """Do the work synchronously, and record how it ended."""
        if not self.begin():
            return
        try:
            work()
        except BaseException as error:
            self._error = self.unreported = error
        finally:
            self._finished.set()


class InFlight:
    """The last save of this process."""

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None

    def start(self, folder: str, work: Callable[[], None], background: bool) -> SaveHandle:
        """Do the work. The previous save must have been settled."""
        handle = SaveHandle(folder)
        if not background:
            work()
            handle.run(lambda: None)
            return handle
        # Not a daemon thread: the process waits for it at exit, so the last checkpoint of a run is not lost.
        thread = threading.Thread(target=handle.run, args=(work,), name="fsdp2-save")
        try:
            self._handle = handle
            thread.start()
        except BaseException:  # no thread available, or Ctrl-C, after which it may be running
            if handle.begin():
                self._handle = None
            raise
        return handle

    def settle(self) -> None:
        """Wait for the last save. This slows down a trainer that is faster than its disk.

        Raises:
            CheckpointError: it failed, and the error has not been reported yet.
        """
        handle = self._handle
        try:
            if handle is not None and (not handle.done() or handle.unreported is not None):
                handle.wait()
        finally:
            # Waiting may be interrupted (Ctrl-C); then the save continues, and its memory is still in use.
            if handle is None or handle.done():
                self._handle = None

    def at_exit(self) -> None:
        """Called after the save has ended. A failure that was not reported must not look like success."""
        error = self._handle.unreported if self._handle is not None else None
        if error is not None:
            traceback.print_exception(error)
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(1)

    def after_fork(self) -> None:
        """In a forked child: forget the save, which belongs to the parent. Its thread does not exist here, so a wait
        would never end."""
        self._handle = None


in_flight = InFlight()
atexit.register(in_flight.at_exit)
os.register_at_fork(after_in_child=in_flight.after_fork)

# Host memory with the values that a background save writes. It is kept for the next save, since allocating new pages
# costs as much as the copy.
_arena: dict[torch.device, torch.Tensor] = {}


def stage(
    pieces: Mapping[str, list[Piece]], shares: list[ExtraShare]
) -> tuple[dict[str, list[Piece]], list[ExtraShare]]:
    """Copy all values to host memory (pinned for those of a GPU), and return pieces that refer to the copies.

    Reuses the memory of the last call, so no save may be running.
    """
    everything = [piece for own in (*pieces.values(), *(share.pieces for share in shares)) for piece in own]
    places, ends = [], dict[torch.device, int]()
    for piece in everything:
        device = piece.values.device
        places.append(-(-ends.get(device, 0) // 64) * 64)
        ends[device] = places[-1] + piece.nbytes
    for device, end in ends.items():
        if device not in _arena or _arena[device].numel() < end:
            _arena.pop(device, None)
            _arena[device] = new_buffer(end, device)
    copies: dict[int, Piece] = {}
    for piece, start in zip(everything, places, strict=True):
        room = _arena[piece.values.device][start : start + piece.nbytes]
        copy = room.view(piece.values.dtype).view(piece.values.shape)
        copy.copy_(piece.values, non_blocking=True)
        copies[id(piece)] = replace(piece, values=copy)
    wait_for(ends)  # the arena is read by the writing threads
    return {section: [copies[id(piece)] for piece in own] for section, own in pieces.items()}, [
        replace(share, pieces=[copies[id(piece)] for piece in share.pieces]) for share in shares
    ]
