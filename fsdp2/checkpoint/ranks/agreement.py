"""How ranks agree on one save or load without a collective: through the key-value store. Layer: checkpoint.

The store holds only counters and short strings; the records of a save are in files (`run/records.py`). Each rank
reports that it is done, and continues. The last rank to report finishes the work for all; other ranks wait only for the
outcome. An error of one rank is the outcome on all ranks. Works from any thread (the store's client is a clone).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp2._torch.shared import store_of
from fsdp2.checkpoint.ranks.world import World
from fsdp2.errors import CheckpointError, CorruptError, MismatchError, ReplacedError

__all__ = ["Agreement", "some", "world_of"]

DONE = "done"
MAX_WORD = 1 << 20  # characters; the store drops clients that send a value of more than 8 MiB

# The possible decisions: the work will be committed; a rank failed; a rank timed out waiting for others.
GO, FAILED, WAITED = "go", "failed", "waited"


def world_of(group: dist.ProcessGroup | None) -> World:
    """The ranks of a group (None: all; without process groups, this process alone).

    Raises:
        CheckpointError: this rank is not in the group.
    """
    if not dist.is_initialized():
        return World(0, (0,))
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    if dist.get_rank() not in ranks:
        raise CheckpointError(f"rank {dist.get_rank()} is not among the ranks {ranks} of the process group")
    return World(ranks.index(dist.get_rank()), ranks)


class Agreement:
    """One task that all ranks share. Every rank must create it, in the same order as its other agreements.

    Args:
        purpose: what the ranks do, for keys and messages ("save step-00000100").
        timeout_s: how long a rank waits for the others while none makes progress.

    Attributes:
        has_failed: this rank has published an error, or got one as the outcome.
    """

    def __init__(self, purpose: str, world: World, group: dist.ProcessGroup | None, timeout_s: float):
        self._alive = store_of(group)  # on rank 0 also the server: keep it while another thread may need it
        self._purpose = purpose
        self._world = world
        self._timeout = timedelta(seconds=timeout_s)
        self.has_failed = False
        self._reported_at = time.monotonic()
        self._store = self._own_client()
        name = f"{purpose}/{'-'.join(map(str, world.ranks)) if world.size < 9 else hash(world.ranks)}"
        self._before, self._prefix = self._begin(name)

    def _own_client(self) -> Any:
        """A separate client of the store, so that waiting does not block other threads."""
        store = self._alive
        if store is None or self._world.size == 1:
            return dist.HashStore()  # type: ignore[attr-defined]  # public; the stubs lack it
        before = store.timeout
        with self._explained():
            store.set_timeout(min(before, self._timeout))  # without its server, cloning a store retries for minutes
            try:
                client = store.clone()
            finally:
                store.set_timeout(before)
            client.set_timeout(self._timeout)
        return client

    def _begin(self, name: str) -> tuple[str | None, str]:
        """The prefixes of the previous attempt (None for the first) and of this one. The store counts the attempts of
        each rank, even if its process was replaced.

        Attempts that a rank abandoned after a timeout are skipped, so a rank that missed such an attempt meets the
        others in the next one (see `meet`). A rank that is only late to a failed attempt joins it, and gets the reason
        from `check`."""
        while True:
            with self._explained():
                number = self._store.add(f"fsdp2/checkpoint/{name}/begun/{self._world.rank}", 1)
            before, prefix = (f"fsdp2/checkpoint/{name}/{each}" for each in (number - 1, number))
            if self._decision(prefix) != WAITED:
                return before if number > 1 else None, prefix

    def meet(self) -> None:
        """After a failed attempt: wait for the other ranks before any value of this rank is copied.

        Ranks can leave a failed attempt at different training steps. Then the next save of one rank could be paired
        with that of a rank at another step, and one checkpoint would mix two steps. Ranks that meet here with idle
        devices are at the same step, because no rank can advance without the others' collectives.

        Raises:
            CheckpointError: the others did not arrive in time, or one failed.
        """
        if self._before is not None and self._decision(self._before) != GO:
            self.gather(
                "After a failed attempt the ranks meet before they save, since one may have missed it; let every rank "
                "call save again"
            )

    def gather(
        self,
        advice: str,
        record: str = DONE,
        compare: Callable[[list[str]], Exception | None] = lambda records: None,
    ) -> None:
        """Wait until all ranks are here.

        Args:
            advice: part of the error message if some do not come.
            record: a short text that this rank passes to `compare`.
            compare: called on one rank with the records by rank. If it returns an error, all ranks raise it.

        Raises:
            CheckpointError: the others did not arrive in time, or one failed.
        """
        with self._explained():
            self._store.set(self._key(f"here/{self._world.rank}"), record)
            if self._store.add(self._key("here"), 1) == self._world.size:
                every = self._store.multi_get([self._key(f"here/{rank}") for rank in range(self._world.size)])
                if (error := compare([bytes(each).decode() for each in every])) is not None:
                    self.abandon(error)
                else:
                    self.claim("met", DONE)
        try:
            self._store.wait([self._key("met")], self._timeout)
        except RuntimeError as error:
            late = CheckpointError(f"{self._purpose}: {self._absent('here', 'arrived')}. {advice}")
            self.abandon(late, waited=True)
            raise late from error
        self.forget(f"here/{self._world.rank}")
        if self._get(self._key("met")) != DONE:  # a rank that failed later must not hide this rank's own error
            self.check()

    def claim(self, key: str, value: str) -> str:
        """The value that the first rank set for `key`."""
        content = value[:MAX_WORD].encode(errors="backslashreplace")
        with self._explained():
            return bytes(self._store.compare_set(self._key(key), "", content)).decode()

    def is_first(self, key: str) -> bool:
        """Whether this rank is the first one to call this for `key`."""
        return self.claim(key, str(self._world.rank)) == str(self._world.rank)

    def forget(self, *keys: str) -> None:
        """Delete keys that are no longer needed. Never raises, because the work is already committed."""
        with suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(self._key(key))

    def report(self) -> bool:
        """Report that this rank has done its part. Returns whether it is the last one, which must commit: `decide`, do
        the work, `finish`."""
        with self._explained():
            self._store.set(self._key(f"rank/{self._world.rank}"), DONE)
            return bool(self._store.add(self._key("count"), 1) == self._world.size)

    def check(self) -> None:
        """Raise if a rank has abandoned the work; see `decide`."""
        if self._decision(self._prefix) is not None:
            self.decide()

    def decide(self) -> None:
        """Called by the last rank before it commits: from now on no rank can abandon the work.

        Raises:
            CheckpointError: a rank has already abandoned it, because it timed out.
        """
        if self.claim("decision", GO) != GO:
            self.wait()  # raises the reason
            raise CheckpointError(f"{self._purpose}: was abandoned")

    def finish(self) -> None:
        """Publish that the work is done and committed."""
        self.claim("outcome", DONE)

    def abandon(self, error: BaseException, waited: bool = False) -> bool:
        """Publish that this rank has failed or gives up. The first such error becomes the outcome on all ranks. Never
        raises, because the store may be gone together with the rank that failed.

        Args:
            waited: this rank gives up because others did not arrive.

        Returns:
            Whether it is certain that the work will not be committed.
        """
        if self.has_failed:
            return True
        with suppress(CheckpointError):
            if self.claim("decision", WAITED if waited else FAILED) != GO:
                self.fail(error)
                return True
        return False

    def fail(self, error: BaseException) -> None:
        """Make an error the outcome, unless there is one already. Never raises."""
        self.has_failed = True
        with suppress(CheckpointError):
            self.claim("outcome", f"rank {self._world.rank}: {type(error).__name__}: {error}")
            self.claim("met", FAILED)  # release ranks that wait in `meet`, so that they see the outcome

    def failed_by(self, kind: type[Exception]) -> bool:
        """After a failure: whether the outcome is an error of that type. False if the store does not answer."""
        with suppress(CheckpointError, RuntimeError):
            key = self._key("outcome")
            return self._store.check([key]) and _kind_in(self._get(key)) == kind.__name__
        return False

    def wait(self) -> None:
        """Wait for the outcome.

        Raises:
            CheckpointError: a rank failed (its error is in the message), or did not report in time.
        """
        key, is_certain = self._key("outcome"), False
        while True:
            try:
                self._wait_while_progressing(key)
                break
            except RuntimeError as error:
                late = CheckpointError(f"{self._purpose}: {self._absent('rank', 'done their part')}")
                if is_certain or self.abandon(late, waited=True):
                    raise late from error
                is_certain = True  # all have reported: another rank commits, unless it has died
        outcome = self._get(key)
        self.has_failed = outcome != DONE
        self.forget(f"rank/{self._world.rank}")
        if outcome != DONE:
            # Raise the same type on all ranks, whichever rank found the error.
            kinds = (CorruptError, MismatchError, ReplacedError)
            kind = next((each for each in kinds if each.__name__ == _kind_in(outcome)), CheckpointError)
            raise kind(f"{self._purpose} failed: {outcome}")

    def report_progress(self) -> None:
        """Report progress to waiting ranks, so that a slow destination is not mistaken for a dead rank."""
        if time.monotonic() - self._reported_at > self._timeout.total_seconds() / 4:
            self._reported_at = time.monotonic()
            with self._explained():
                self._store.set(self._key("progress"), f"{self._world.rank} {self._reported_at}")

    def _wait_while_progressing(self, key: str) -> None:
        """Wait for a key as long as any rank makes progress."""
        while True:
            seen = self._last_progress()
            try:
                self._store.wait([key], self._timeout)
                return
            except RuntimeError:
                if self._last_progress() == seen:
                    raise

    def _last_progress(self) -> str | None:
        with self._explained():
            return self._get(self._key("progress")) if self._store.check([self._key("progress")]) else None

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _get(self, key: str) -> str:
        with self._explained():
            return bytes(self._store.get(key)).decode()

    def _decision(self, prefix: str) -> str | None:
        """The decision about an attempt; None if it is open."""
        key = f"{prefix}/decision"
        with self._explained():
            return self._get(key) if self._store.check([key]) else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the store (DistStoreError and DistNetworkError are RuntimeErrors) into `CheckpointError`."""
        try:
            yield
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._purpose}: the store that connects the ranks does not answer; the process that has it (rank "
                f"0, or torchrun) may have died ({error})"
            ) from error

    def _absent(self, where: str, what: str) -> str:
        """The ranks that have not reported, as text. Each rank that reports sets a key at `where`."""
        seconds = f"within {self._timeout.total_seconds():g} s"
        with self._explained():
            every = range(self._world.size)
            missing = [rank for rank in every if not self._store.check([self._key(f"{where}/{rank}")])]
        if not missing:
            return (
                f"all ranks have {what}, but the last one has not finished the work {seconds}: it may have died, or "
                "its disk hangs. The previous checkpoint still exists, under its name or as '.old-...'; the new one is "
                "complete if its folder has a manifest"
            )
        arrived = some([rank for rank in every if rank not in set(missing)])
        return f"ranks {some(missing)} have not {what} {seconds}; {what}: {arrived or 'none'}"


def _kind_in(outcome: str) -> str:
    """The name of the type of the error in an outcome."""
    return outcome.split(": ", 2)[1] if outcome != DONE else ""


def some(ranks: Sequence[int]) -> str:
    """Ranks as text, the first of them."""
    text = ", ".join(map(str, ranks[:8]))
    return text + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
