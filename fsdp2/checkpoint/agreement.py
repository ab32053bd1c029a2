"""How ranks agree on one save or load without a collective: through the key-value store. Layer: checkpoint.

A rank says what it has done and goes on. Whoever is the last to say so knows what all have done, and finishes the work
for all; nobody has to wait for that but to learn the outcome. An error of one rank is everybody's outcome. Works from
any thread (the store's client is a clone), needs no process group of its own, and leaves nothing in the store but a few
words an attempt.
"""

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp2._torch import local_store, store_of
from fsdp2.checkpoint.state import World
from fsdp2.errors import CheckpointError, CorruptError, MismatchError

__all__ = ["Agreement", "world_of"]

DONE = "done"

# What was decided: the work counts; a rank failed; a rank waited for others in vain.
GO, FAILED, WAITED = "go", "failed", "waited"

# How often this process has begun an agreement of a name: the same on all ranks, which begin them in the same order.
_begun: Counter[str] = Counter()


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
        self._prefix = self._begin(
            f"{purpose}/{'-'.join(map(str, world.ranks)) if world.size < 9 else hash(world.ranks)}"
        )

    def _own_client(self) -> Any:
        """A client of the store that nobody else waits with."""
        store = self._alive
        if store is None or self._world.size == 1:
            return local_store()
        before = store.timeout
        with self._explained():
            store.set_timeout(min(before, self._timeout))  # a clone of a store that has just gone would try for minutes
            try:
                client = store.clone()
            finally:
                store.set_timeout(before)
            client.set_timeout(self._timeout)
        return client

    def _begin(self, name: str) -> str:
        """The prefix of the keys: with the number of the next attempt in which nobody has waited in vain. So a rank
        that missed one meets the others in the next; a rank that is only late learns from `check` why the attempt
        failed."""
        while True:
            _begun[name] += 1
            prefix = f"fsdp2/checkpoint/{name}/{_begun[name]}"
            if self._decision(prefix) != WAITED:
                return prefix

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
            text = value.encode(errors="backslashreplace").decode()
            return str(self._store.compare_set(f"{self._prefix}/{key}", "", text).decode())

    def share(self, key: str, value: str) -> None:
        """Put a value there that many ranks have alike; most of them then need not send it."""
        with self._explained():
            there = self._store.check([f"{self._prefix}/{key}"])
        if not there:
            self.claim(key, value)

    def get(self, key: str) -> str:
        """A value that some rank claimed."""
        with self._explained():
            return str(self._store.get(f"{self._prefix}/{key}").decode())

    def forget(self, *keys: str) -> None:
        """Delete claimed values that nobody needs any more. Never raises: the work counts already."""
        with suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(f"{self._prefix}/{key}")

    def report(self, record: str) -> bool:
        """This rank has done its part. Whether it is the last one, which then makes it count: `decide`, the work,
        `finish`."""
        with self._explained():
            self._store.set(f"{self._prefix}/rank/{self._world.rank}", record)
            return bool(self._store.add(f"{self._prefix}/count", 1) == self._world.size)

    def records(self) -> list[str]:
        """What each rank reported, in the order of ranks; for the last one."""
        with self._explained():
            keys = [f"{self._prefix}/rank/{rank}" for rank in range(self._world.size)]
            return [record.decode() for record in self._store.multi_get(keys)]

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
        """See that nobody has abandoned the work by now; see `decide`."""
        if self._decision(self._prefix) is not None:
            self.decide()

    def decide(self) -> None:
        """For the last one, before it makes the work count: from here on nobody can abandon it.

        Raises:
            CheckpointError: somebody has, in the meantime (it had waited for too long).
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

    def wait(self) -> None:
        """Wait for the outcome.

        Raises:
            CheckpointError: a rank has failed (its error is in the message), or has not reported in time.
        """
        key = f"{self._prefix}/outcome"
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            late = CheckpointError(f"{self._purpose}: {self._absent()}")
            if self.abandon(late, waited=True):
                raise late from error
            with self._explained():  # somebody is making it count just now
                self._store.wait([key], self._timeout)
        outcome = self.get("outcome")
        self._failed = outcome != DONE
        self.forget(f"rank/{self._world.rank}")
        if outcome != DONE:
            # Of the same kind on all ranks, whichever found it first.
            name = outcome.split(": ", 2)[1]
            kind = next((each for each in (CorruptError, MismatchError) if each.__name__ == name), CheckpointError)
            raise kind(f"{self._purpose} failed: {outcome}")

    def _absent(self) -> str:
        """Who has not reported, in words."""
        seconds = f"within {self._timeout.total_seconds():g} s"
        with self._explained():
            arrived = [rank for rank in range(self._world.size) if self._has_reported(rank)]
        missing = sorted(set(range(self._world.size)) - set(arrived))
        if not missing:
            return f"all ranks have done their part, but the last one did not finish the work {seconds}"
        return f"ranks {_some(missing)} have not done their part {seconds}; done: {_some(arrived) or 'none'}"

    def _has_reported(self, rank: int) -> bool:
        return bool(self._store.check([f"{self._prefix}/rank/{rank}"]))


def _some(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
