"""`Board`: the keys through which ranks tell each other what they have done, in the store through which they met.
Layer: watch.

No collective and no process group: a rank that hangs in one can still read and write here, from another thread.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp2._torch.shared import store_of

_CALL_S = 30.0  # a machine that runs too much at once; a store whose process has ended fails at once


class Board:
    """One client of the store, for one thread at a time. Every method raises RuntimeError if the store is gone.

    Attributes:
        rank: this one.
        size: the number of ranks.
        num_joint_steps: begun with this client (`fsdp2.watch.joint_step`).
        is_closing: the process ends, and waits for nobody.
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
        """What `rank` called itself when it began to watch; "" if it has not."""
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
        """A value that was `put`; None if there is none."""
        return bytes(self._store.get(key)).decode() if self.has(key) else None

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._store.check([key]))

    def claim(self, key: str, value: str) -> str:
        """Set a value if there is none; the value that is there afterwards."""
        return bytes(self._store.compare_set(key, "", value)).decode()

    def count(self, key: str) -> int:
        """Add 1 to a number; the sum."""
        return int(self._store.add(key, 1))

    def drop(self, keys: Sequence[str]) -> None:
        """Delete values, if the store can."""
        with suppress(NotImplementedError):
            for key in keys:
                self._store.delete_key(key)


def open_board() -> Board | None:
    """A board for all ranks of the default process group; None where its ranks are not processes that share a store."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or dist.get_backend(world) == "fake":
        return None
    store = store_of(world)
    if not _is_shared(store):
        return None
    client, rank = store.clone(), world.rank()
    client.set_timeout(timedelta(seconds=_CALL_S))
    # Process groups may be made again with the same store; every rank makes as many.
    generation = int(client.add(f"fsdp2/watch/begun/{rank}", 1))
    prefixed = dist.PrefixStore(f"fsdp2/watch/{generation}", client)  # type: ignore[attr-defined]  # public
    return Board(prefixed, rank, world.size())


def _is_shared(store: Any) -> bool:
    """Whether other processes can reach it. A HashStore is of one process, so its other ranks never come."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]  # public
        store = store.underlying_store
    return isinstance(store, (dist.TCPStore, dist.FileStore))  # type: ignore[attr-defined]  # public
