"""How ranks agree on one save or load without a collective: through the key-value store. Layer: checkpoint.

Each rank reports what it has done and continues. The last rank to report has every record and finishes the work for
all; other ranks wait only to learn the outcome. An error of one rank is the outcome on all ranks. Works from any thread
(the store's client is a clone), needs no separate process group, and leaves only a few words per attempt in the store.
"""

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2._torch import store_of
from fsdp2.checkpoint.state import World
from fsdp2.errors import CheckpointError, CorruptError, MismatchError, ReplacedError

__all__ = ["Agreement", "world_of"]

DONE = "done"

# What was decided: the work counts; a rank failed; a rank waited for others in vain.
GO, FAILED, WAITED = "go", "failed", "waited"

# How often this process has begun an agreement of a name: the same on all ranks, which begin them in the same order.
# For each process group: when groups are made again, perhaps with a new process for one that died, all begin again.
_begun: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()

# The store drops the connection of a client that sends a value of more than 8 MiB.
PART_BYTES = 4 << 20
IN_PARTS = b"\0in parts: "  # no value begins like that: they are words and JSON


def world_of(group: dist.ProcessGroup | None) -> World:
    """The ranks of a group (None: all; without process groups, this process alone).

    Raises:
        CheckpointError: this rank is not of the group.
    """
    if not dist.is_initialized():
        return World(0, (0,))
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    if dist.get_rank() not in ranks:
        raise CheckpointError(f"rank {dist.get_rank()} is not among the ranks {ranks} of the process group")
    return World(ranks.index(dist.get_rank()), ranks)


class Agreement:
    """One common piece of work. Every rank of the world makes one, for the same purposes in the same order.

    Args:
        purpose: what it is about, for keys and messages ("save step-00000100").
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, purpose: str, world: World, group: dist.ProcessGroup | None, timeout_s: float):
        self._alive = store_of(group)  # rank 0's also is the server, which must not go while another thread needs it
        self._purpose = purpose
        self._world = world
        self._timeout = timedelta(seconds=timeout_s)
        self._failed = False
        self._store = self._own_client()
        self._values = _Values(self._store, world.rank)
        name = f"{purpose}/{'-'.join(map(str, world.ranks)) if world.size < 9 else hash(world.ranks)}"
        self._before, self._prefix = self._begin(group, name)

    def _own_client(self) -> Any:
        """A separate client of the store, which no other thread waits with."""
        store = self._alive
        if store is None or self._world.size == 1:
            return dist.HashStore()  # type: ignore[attr-defined]  # public; the stubs lack it
        before = store.timeout
        with self._explained():
            store.set_timeout(min(before, self._timeout))  # a clone of a store that has just gone would try for minutes
            try:
                client = store.clone()
            finally:
                store.set_timeout(before)
            client.set_timeout(self._timeout)
        return client

    def _begin(self, group: dist.ProcessGroup | None, name: str) -> tuple[str | None, str]:
        """The prefixes of the attempt before, if there is one, and of this one: the next attempt in which nobody has
        waited in vain. So a rank that missed one meets the others in the next (see `meet`); a rank that is only late
        learns from `check` why the attempt failed. An attempt that counts is passed over too: all ranks have been
        there, so it was this one in an earlier life."""
        if self._world.size == 1:
            return None, f"fsdp2/checkpoint/{name}/1"
        key = group if group is not None else dist.group.WORLD
        assert key is not None, "a world of several ranks has a group"
        begun = _begun.setdefault(key, Counter())
        while True:
            begun[name] += 1
            before, prefix = (f"fsdp2/checkpoint/{name}/{number}" for number in (begun[name] - 1, begun[name]))
            if self._decision(prefix) not in (WAITED, GO):
                return before if begun[name] > 1 else None, prefix

    def meet(self) -> None:
        """After an attempt that failed: wait for the other ranks, before anything of this rank is copied.

        Ranks can leave such an attempt at different steps of the training: one gave up and trained on, another comes to
        it only now. Nobody knows then whose next save belongs to whose, and with copies of the values, which stay when
        training goes on, they would put two steps into one checkpoint. Ranks that are here at the same time, with
        nothing under way on their devices, are at the same step: one cannot be ahead without the others' collectives.

        Raises:
            CheckpointError: the others have not come in time, or one has failed.
        """
        if self._before is None or self._decision(self._before) == GO:
            return
        with self._explained():
            self._store.set(f"{self._prefix}/here/{self._world.rank}", DONE)
            if self._store.add(f"{self._prefix}/here", 1) == self._world.size:
                self.claim("met", DONE)
        try:
            self._store.wait([f"{self._prefix}/met"], self._timeout)
        except RuntimeError as error:
            late = CheckpointError(
                f"{self._purpose}: {self._absent('here', 'come')}. After a failed attempt the ranks meet before they "
                "save, since one may have missed it; let every rank call save again"
            )
            self.abandon(late, waited=True)
            raise late from error
        self.forget(f"here/{self._world.rank}")
        if self.get("met") != DONE:  # one that has failed since they met must not hide this rank's own error
            self.check()

    def _decision(self, prefix: str) -> str | None:
        """What has been decided about an attempt; None if nothing has."""
        with self._explained():
            key = f"{prefix}/decision"
            return self._store.get(key).decode() if self._store.check([key]) else None

    def nonce(self) -> str:
        """A random word, the same on all ranks."""
        return self.claim("nonce", uuid.uuid4().hex[:12])

    def claim(self, key: str, value: str) -> str:
        """The value that the first rank gave for `key`."""
        with self._explained():
            return self._values.claim(f"{self._prefix}/{key}", value)

    def share(self, key: str, value: str) -> None:
        """Publish a value that many ranks share; most of them then need not send it."""
        with self._explained():
            there = self._store.check([f"{self._prefix}/{key}"])
        if not there:
            self.claim(key, value)

    def get(self, key: str) -> str:
        """A value that some rank claimed."""
        with self._explained():
            return self._values.get(f"{self._prefix}/{key}")

    def forget(self, *keys: str) -> None:
        """Delete claimed values that are no longer needed. Never raises, because the work is already committed."""
        with suppress(RuntimeError):
            for key in keys:
                self._values.delete(f"{self._prefix}/{key}")

    def report(self, record: str) -> bool:
        """This rank has done its part. Whether it is the last one, which then makes it count: `decide`, the work,
        `finish`."""
        with self._explained():
            self._values.set(f"{self._prefix}/rank/{self._world.rank}", record)
            return bool(self._store.add(f"{self._prefix}/count", 1) == self._world.size)

    def records(self) -> list[str]:
        """What each rank reported, in the order of ranks; for the last one."""
        with self._explained():
            return self._values.get_all([f"{self._prefix}/rank/{rank}" for rank in range(self._world.size)])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the store, in words: its DistStoreError and DistNetworkError are RuntimeErrors."""
        try:
            yield
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._purpose}: the store that connects the ranks does not answer; the process that has it (rank "
                f"0, or torchrun) may have died ({error})"
            ) from error

    def check(self) -> None:
        """Check that no rank has abandoned the work by now; see `decide`."""
        if self._decision(self._prefix) is not None:
            self.decide()

    def decide(self) -> None:
        """For the last rank, before it commits: from here on no rank can abandon the work.

        Raises:
            CheckpointError: a rank has abandoned it meanwhile (it had waited for too long).
        """
        if self.claim("decision", GO) != GO:
            self.wait()  # raises: that is why
            raise CheckpointError(f"{self._purpose}: was abandoned")

    def finish(self) -> None:
        """The work is done, and counts."""
        self.claim("outcome", DONE)

    def abandon(self, error: BaseException, waited: bool = False) -> bool:
        """This rank has failed, or gives up; the first such error is everybody's outcome. Never raises: the store may
        be gone together with the rank that failed.

        Args:
            waited: it gives up because others have not come.

        Returns:
            whether it is certain that the work will not be made to count any more.
        """
        if self._failed:
            return True
        with suppress(CheckpointError):
            if self.claim("decision", WAITED if waited else FAILED) != GO:
                self.fail(error)
                return True
        return False

    def fail(self, error: BaseException) -> None:
        """Make an error the outcome, if there is none yet. Never raises."""
        self._failed = True
        with suppress(CheckpointError):
            self.claim("outcome", f"rank {self._world.rank}: {type(error).__name__}: {error}")
            self.claim("met", FAILED)  # who waits there for this rank goes on, and finds the outcome

    def failed_by(self, kind: type[Exception]) -> bool:
        """After a failure: whether an error of that kind is everybody's outcome. False where nobody can tell."""
        with suppress(CheckpointError, RuntimeError):
            return self._store.check([f"{self._prefix}/outcome"]) and _kind_in(self.get("outcome")) == kind.__name__
        return False

    def wait(self) -> None:
        """Wait for the outcome.

        Raises:
            CheckpointError: a rank has failed (its error is in the message), or has not reported in time.
        """
        key = f"{self._prefix}/outcome"
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            late = CheckpointError(f"{self._purpose}: {self._absent('rank', 'done their part')}")
            if self.abandon(late, waited=True):
                raise late from error
            self._wait_for_the_last(key)
        outcome = self.get("outcome")
        self._failed = outcome != DONE
        self.forget(f"rank/{self._world.rank}")
        if outcome != DONE:
            # Of the same kind on all ranks, whichever found it first.
            name = _kind_in(outcome)
            kinds = (CorruptError, MismatchError, ReplacedError)
            kind = next((each for each in kinds if each.__name__ == name), CheckpointError)
            raise kind(f"{self._purpose} failed: {outcome}")

    def _wait_for_the_last(self, key: str) -> None:
        """Somebody is making it count just now, or died while doing so."""
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            with self._explained():
                finished = self._store.check([key])
            if not finished:
                raise CheckpointError(
                    f"{self._purpose}: all ranks have done their part, and the last one has begun to make it count, "
                    f"but has not said within {2 * self._timeout.total_seconds():g} s that it has: it may have died, "
                    "or its disk hangs. What was saved before is there, under its name or as '.old-...'; the new "
                    "checkpoint counts if its folder has a manifest"
                ) from error

    def _absent(self, where: str, what: str) -> str:
        """Who has not reported, in words.

        Args:
            where: ranks that have leave a key there.
            what: they have done then.
        """
        seconds = f"within {self._timeout.total_seconds():g} s"
        with self._explained():
            keys = [f"{self._prefix}/{where}/{rank}" for rank in range(self._world.size)]
            arrived = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        missing = sorted(set(range(self._world.size)) - set(arrived))
        if not missing:
            return f"all ranks have {what}, but the last one did not finish the work {seconds}"
        return f"ranks {_some(missing)} have not {what} {seconds}; {what}: {_some(arrived) or 'none'}"


class _Values:
    """Texts of any length in a store that takes no long ones: a long one is in parts, whose number is at its key.

    Args:
        owner: whose parts they are, in the keys: several ranks may set one key at a time.
    """

    def __init__(self, store: Any, owner: int):
        self._store = store
        self._owner = owner
        self._parts: dict[str, list[str]] = {}  # of the long ones that this client has seen: to delete them

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._put_parts(key, value))

    def claim(self, key: str, value: str) -> str:
        """The value that the first one set."""
        brief = self._put_parts(key, value)
        first = bytes(self._store.compare_set(key, "", brief))
        if first != brief:
            self._delete_parts(key)
        return self._whole(key, first)

    def get(self, key: str) -> str:
        return self._whole(key, bytes(self._store.get(key)))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        return [self._whole(key, bytes(value)) for key, value in zip(keys, self._store.multi_get(keys), strict=True)]

    def delete(self, key: str) -> None:
        self._delete_parts(key)
        self._store.delete_key(key)

    def _put_parts(self, key: str, value: str) -> bytes:
        """What goes to the key; parts are there before it."""
        content = value.encode(errors="backslashreplace")
        if len(content) <= PART_BYTES:
            return content
        count = -(-len(content) // PART_BYTES)
        self._parts[key] = _part_keys(key, self._owner, count)
        for number, part in enumerate(self._parts[key]):
            self._store.set(part, content[number * PART_BYTES : (number + 1) * PART_BYTES])
        return IN_PARTS + f"{self._owner} {count}".encode()

    def _whole(self, key: str, brief: bytes) -> str:
        if not brief.startswith(IN_PARTS):
            return brief.decode()
        owner, count = map(int, brief.removeprefix(IN_PARTS).split())
        self._parts[key] = _part_keys(key, owner, count)
        return b"".join(bytes(self._store.get(part)) for part in self._parts[key]).decode()

    def _delete_parts(self, key: str) -> None:
        for part in self._parts.pop(key, ()):
            self._store.delete_key(part)


def _part_keys(key: str, owner: int, count: int) -> list[str]:
    return [f"{key}/part/{owner}/{number}" for number in range(count)]


def _kind_in(outcome: str) -> str:
    """The name of the type of an error that became the outcome."""
    return outcome.split(": ", 2)[1] if outcome != DONE else ""


def _some(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
