"""`Board`: the keys through which ranks tell each other what they have done, in the store through which they met.
Layer: watch.

No collective and no process group: a rank that hangs in one can still read and write here, from another thread.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from fsdp2._torch import store_of

PART_BYTES = 4 << 20  # the store drops a client that sends a value of more than 8 MiB
_ARRIVAL_S = 5.0  # within which all ranks of a first step have begun to watch
_CALL_S = 30.0  # a machine that runs too much at once; a store whose process has ended fails at once


class Board:
    """One client of the store, for one thread at a time. Every method raises RuntimeError if the store is gone.

    Attributes:
        rank: this one.
        size: the number of ranks.
        num_joint_steps: begun with this client (`fsdp2.watch.joint_step`).
    """

    def __init__(self, store: Any, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.num_joint_steps = 0
        self._store = store
        self._present: set[int] = set()
        self._patience_s = _ARRIVAL_S

    def clone(self) -> "Board":
        """Another client, for another thread."""
        client = self._store.clone()
        client.set_timeout(timedelta(seconds=_CALL_S))
        return Board(client, self.rank, self.size)

    def arrive(self, identity: str) -> None:
        """Say that this rank watches."""
        self.put(f"hello/{self.rank}", identity)

    def identity_of(self, rank: int) -> str | None:
        """What `rank` called itself when it arrived; None if it has not."""
        return self.get(f"hello/{rank}")

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks have arrived. Those that exist on paper only never do: the first call waits for them, but
        only some seconds."""
        deadline = monotonic() + self._patience_s
        while missing := [rank for rank in ranks if rank not in self._present]:
            self._present.update(rank for rank in missing if self.has(f"hello/{rank}"))
            if monotonic() > deadline:
                break
            sleep(0.001)
        self._patience_s = 0.0
        return self._present.issuperset(ranks)

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        content = value.encode()
        parts = range(0, len(content), PART_BYTES)
        for number, start in enumerate(parts[1:], 1):
            self._store.set(f"{key}/{number}", content[start : start + PART_BYTES])
        self._store.set(key, f"{len(parts)} ".encode() + content[:PART_BYTES])

    def get(self, key: str) -> str | None:
        """A value that was `put`; None if there is none."""
        if not self._store.check([key]):
            return None
        count, content = bytes(self._store.get(key)).split(b" ", 1)
        rest = [bytes(self._store.get(f"{key}/{number}")) for number in range(1, int(count))]
        return b"".join([content, *rest]).decode()

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._store.check([key]))

    def claim(self, key: str, value: str) -> str:
        """Set a value if there is none; the value that is there afterwards."""
        return bytes(self._store.compare_set(key, "", f"1 {value}")).decode().partition(" ")[2]

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number; the sum."""
        return int(self._store.add(key, more))

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
    before = store.timeout
    # Cloning a store whose server is gone would retry for minutes.
    store.set_timeout(min(before, timedelta(seconds=_CALL_S)))
    try:
        client = store.clone()
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        store.set_timeout(before)
    client.set_timeout(timedelta(seconds=_CALL_S))
    rank = world.rank()
    # Process groups may be made anew with the same store; every rank makes as many.
    generation = int(client.add(f"fsdp2/watch/begun/{rank}", 1))
    prefixed = dist.PrefixStore(f"fsdp2/watch/{generation}", client)  # type: ignore[attr-defined]  # public
    return Board(prefixed, rank, world.size())


def _is_shared(store: Any) -> bool:
    """Whether other processes can reach it. A HashStore is of one process, so its other ranks never come."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]  # public
        store = store.underlying_store
    return isinstance(store, (dist.TCPStore, dist.FileStore))  # type: ignore[attr-defined]  # public
