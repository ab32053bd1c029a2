"""`Board`: the keys through which ranks report what they have done, in the store of their rendezvous. Layer: watch.

It uses no collective and no process group: a rank that hangs in one can still read and write here, from another thread.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp2._torch.shared import store_of

_CALL_S = 30.0  # long, for overloaded machines; a store whose process has ended fails at once


class Board:
    """One client of the store, for one thread at a time. Every method raises RuntimeError if the store is gone.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        num_joint_steps: joint steps begun with this client (`fsdp2.watch.joint_step`).
        is_closing: the process is ending, and waits for no rank.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.num_joint_steps = 0
        self._store = store
        self._identities: dict[int, str] = {}
        self.is_closing = False

    def clone(self) -> "Board":
        """Another client, for another thread."""
        client = self._store.clone()
        client.set_timeout(timedelta(seconds=_CALL_S))
        return Board(client, self.rank, self.size)

    def identity_of(self, rank: int) -> str:
        """The `identity` that `rank` published when it began to watch; "" if it has not."""
        if rank not in self._identities:
            text = self.get(f"hello/{rank}")
            if text is None:
                return ""
            self._identities[rank] = text
        return self._identities[rank]

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """A value that was `put`, or None."""
        return bytes(self._store.get(key)).decode() if self.has(key) else None

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._store.check([key]))

    def claim(self, key: str, value: str) -> str:
        """Set a value if the key has none. Returns its value afterwards."""
        return bytes(self._store.compare_set(key, "", value)).decode()

    def count(self, key: str) -> int:
        """Add 1 to a number. Returns the sum."""
        return int(self._store.add(key, 1))

    def drop(self, keys: Sequence[str]) -> None:
        """Delete values, if the store can."""
        with suppress(NotImplementedError):
            for key in keys:
                self._store.delete_key(key)


def open_board() -> Board | None:
    """A board for all ranks of the default process group; None if its ranks are not processes that share a store."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or dist.get_backend(world) == "fake":
        return None
    store = store_of(world)
    if not _is_shared(store):
        return None
    client, rank = store.clone(), world.rank()
    client.set_timeout(timedelta(seconds=_CALL_S))
    # Process groups may be made again with the same store; every rank makes equally many.
    generation = int(client.add(f"fsdp2/watch/begun/{rank}", 1))
    prefixed = dist.PrefixStore(f"fsdp2/watch/{generation}", client)  # type: ignore[attr-defined]  # public
    return Board(prefixed, rank, world.size())


def _is_shared(store: Any) -> bool:
    """Whether other processes can reach the store. A HashStore belongs to one process."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]  # public
        store = store.underlying_store
    return isinstance(store, (dist.TCPStore, dist.FileStore))  # type: ignore[attr-defined]  # public
