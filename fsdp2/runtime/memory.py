"""`ReleasedMemory`: unsharded storage that compute may still read, until it can be freed. Layer: runtime."""

from collections import deque

import torch

from fsdp2.runtime.schedule import num_kept
from fsdp2.runtime.storage import Storage
from fsdp2.runtime.streams import Streams


class ReleasedMemory:
    """Owns storage from a reshard until the all-gather stream may free it, which is when that stream has waited for the
    event that marks compute's last use.

    Attributes:
        streams: the streams of the device.
    """

    def __init__(self, streams: Streams):
        self.streams = streams
        self._released: deque[tuple[Storage, torch.Event | None]] = deque()

    def make_room(self, storage: Storage | None, prefetching: bool) -> None:
        """Called on the all-gather stream before `storage` (None: not created yet) is allocated: free released storage
        until at most two units are alive. `storage` itself, if released, is taken back."""
        for entry in [entry for entry in self._released if entry[0] is storage]:
            self._released.remove(entry)
            self.streams.wait(entry[1])
        while len(self._released) > num_kept(prefetching):
            self._free_oldest()

    def release(self, storage: Storage) -> None:
        """Take ownership of `storage`. The compute stream's last use of it has been enqueued."""
        self._released.append((storage, self.streams.record()))
        if self.streams.lazy:
            self._free_oldest()

    def free_all(self) -> None:
        """Free all released storage, once compute has finished with it."""
        with self.streams.gathering():
            while self._released:
                self._free_oldest()

    def _free_oldest(self) -> None:
        storage, event = self._released.popleft()
        self.streams.wait(event)
        storage.free()
