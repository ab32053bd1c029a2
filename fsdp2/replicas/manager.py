"""`ReplicaManager`: decides which replicas take part in a step, reduces over them, and heals those that are behind.
Layer: replicas.

It has the methods of ``torchft.Manager`` that `Replicas` calls. On each rank, in one step::

    start_quorum     in a thread: rank 0 joins the next round, and the other ranks follow. If the set of replicas has
                     changed, each rank makes a process group with the same rank of all replicas. Replicas that are
                     behind start to fetch state
    allreduce        waits for the thread; an error is kept, and later calls do nothing
    should_commit    all ranks of the replica exchange whether they have failed; those behind load the fetched state
"""

import atexit
import logging
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.errors import ArgumentError, CollectiveError, FSDPError
from fsdp2.replicas.peers import Peers
from fsdp2.replicas.rounds import Beat, Member, Round, Rounds, open_store
from fsdp2.replicas.serving import Server, fetch, unpack
from fsdp2.watch.exchange import Exchange, at_once

_log = logging.getLogger("fsdp2")


class ReplicaManager:
    """Coordinates the replicas of `Replicas`: which take part in a step, and their reductions. Collective: each rank of
    a replica must create one.

    Replicas meet in a store that outlives them: ``python -m fsdp2.replicas --port 29400`` on any machine. They reduce
    with gloo, in process groups that are not registered with torch.

    Args:
        address: ``host:port`` of the store.
        patience: seconds without a heartbeat after which a rank counts as dead. Its replica may come back.
        timeout: the most seconds that a reduction over replicas, or a transfer of state, may take.
        min_replicas: with fewer replicas, none takes a step.
        init_sync: all replicas take the parameters of one before the first step, so their initial values may differ.

    Attributes:
        kind: what this replica trains, set by `Replicas`. Replicas of different kinds do not train together.

    Raises:
        ArgumentError: `address` is not of that form, or the default process group is missing.
        CollectiveError: no store answers at the address.
    """

    def __init__(
        self,
        address: str,
        *,
        patience: float = 5.0,
        timeout: float = 60.0,
        min_replicas: int = 1,
        init_sync: bool = True,
    ):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ArgumentError(f"ReplicaManager: expected host:port of a store, got {address!r}")
        if not dist.is_initialized():
            raise ArgumentError("ReplicaManager: call torch.distributed.init_process_group for this replica first")
        self._timeout_s, self._init_sync = timeout, init_sync
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8).long()
        self._name = "".join(f"{byte:02x}" for byte in self._agreed("name", name, dist.ReduceOp.MAX))
        try:
            with socket.create_connection((host, int(port)), timeout) as connection:
                self._server = Server(connection.getsockname()[0], timeout)
            store = open_store(address, timedelta(seconds=max(timeout, 30.0)))
            store.set(f"at/{self._name}/{self._rank}", self._server.address)
            self._beat = Beat(store.clone(), f"beat/{self._name}/{self._rank}", patience / 5)
        except (RuntimeError, OSError) as error:
            raise CollectiveError(f"ReplicaManager: no store answers at {address}: {error}") from error
        self._rounds = Rounds(store, self._name, self._size, patience, timeout, min_replicas)
        self._agreed("begun", torch.ones(1), dist.ReduceOp.MIN)
        self._functions: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._place = _Place()
        self._round, self._quorum = Round(), Future[None]()
        self._peers: Peers | None = None
        self.kind = ""
        self._fetched: Future[Any] | None = None
        self._error: Exception | None = None
        atexit.register(self.shutdown)

    # --- a step -------------------------------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Register functions that load and return the state that a replica needs to heal."""
        self._functions[key] = load_state_dict, state_dict

    def start_quorum(self) -> None:
        """Begin a step."""
        self._error, self._fetched = None, None
        self._place.count += 1
        self._quorum = _in_background(self._meet)

    def wait_quorum(self) -> None:
        """Wait until the participants are known."""
        self._quorum.result()

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any = dist.ReduceOp.SUM) -> "_Done":
        """Sum `tensor` over the participants, in their order. Errors are not raised but kept; see `report_error`."""
        if reduce_op != dist.ReduceOp.SUM:
            raise ArgumentError(f"ReplicaManager.allreduce: expected reduce_op=SUM, got {reduce_op}")
        if self._error is None:
            try:
                self.wait_quorum()
                if not self.is_participating():
                    tensor.zero_()
                if self._peers is not None:
                    self._peers.sum(tensor)
            except Exception as error:
                self.report_error(error)
        return _Done()

    def report_error(self, error: Exception) -> None:
        """Record an error, so that no rank of this replica commits the step."""
        if self._error is None:
            self._error = error
            self._peers = None  # ends the waits of the others

    def errored(self) -> Exception | None:
        """The error of this step, if any."""
        return self._error

    def should_commit(self) -> bool:
        """End a step. Returns whether to step the optimizer; the same on all ranks of a replica. Raises FSDPError if
        this rank cannot continue, for example without the store."""
        staged = lost = None
        try:
            try:
                self.wait_quorum()
            except FSDPError as error:
                lost = error
                raise
            staged = None if self._fetched is None else unpack(*self._fetched.result())
            if self._rank == 0 and self._rounds.current() != self._round:
                raise CollectiveError("replicas: the others continued without this one")
        except Exception as error:
            self.report_error(error)
        is_well = self._agreed("commit", torch.tensor([float(self._error is None)]), dist.ReduceOp.MIN)[0] == 1
        self._place.is_well = is_well
        if lost is not None:
            raise lost
        if not is_well:
            _log.warning("replica %s: a step was not committed: %s", self._name[:8], self._error or "see another rank")
            self._peers = None
            return False
        self._server.close()
        if staged is not None:
            for key, (load, _) in self._functions.items():
                load(staged[key])
            self._place.batches = staged["batches"]
        self._place.batches += self.num_participants()
        self._place.step = max(member.step for member in self._round.members) + 1
        self._place.since = self._round.number
        return True

    def _meet(self) -> None:
        """The thread of `start_quorum`."""
        place, before = self._place, self._round
        try:
            if self._rank == 0:
                me = Member(self._name, place.step, place.since, place.is_well, self.kind)
                found = self._rounds.join(place.count, me)
            else:
                found = self._rounds.follow(place.count)
        except RuntimeError as error:
            if isinstance(error, FSDPError):
                raise
            raise CollectiveError(f"replicas: the store in which they meet is gone: {error}") from error
        self._round = found
        healthy, names = found.healthy(self._init_sync), found.names
        behind = [name for name in names if name not in healthy]
        helpers = {name: healthy[index % len(healthy)] for index, name in enumerate(behind)}
        self._server.open(found.number, self._state, [*helpers.values()].count(self._name))
        if self._name in helpers:
            key = f"at/{helpers[self._name]}/{self._rank}"
            address = bytes(self._rounds.store.get(key)).decode()
            self._fetched = _in_background(lambda: fetch(address, found.number, self._timeout_s))
        if found.made != before.made:
            self._peers = None
        if self._peers is None and len(names) > 1:
            store = dist.PrefixStore(f"group/{found.made}/{self._rank}", self._rounds.store)  # type: ignore[attr-defined]  # public
            self._peers = Peers(store, names.index(self._name), len(names), self._timeout_s)

    def _state(self) -> dict[str, Any]:
        return {"batches": self._place.batches, **{key: give() for key, (_, give) in self._functions.items()}}

    def _agreed(self, what: str, values: torch.Tensor, op: Any) -> list[Any]:
        """The values of all ranks of this replica, reduced. Collective."""
        world = dist.group.WORLD
        assert world is not None
        if world.size() > 1:
            values = values.to("cuda" if dist.get_backend(world) == "nccl" else "cpu")
            about = Exchange(f"replicas: {what}", None, world, values.numel(), values.nbytes, values.dtype)
            with at_once(about):
                dist.all_reduce(values, op=op)
        return values.tolist()

    # --- what is known ------------------------------------------------------------------------------------------------

    def current_step(self) -> int:
        """The number of steps that were committed."""
        return self._place.step

    def batches_committed(self) -> int:
        """The number of steps, times the replicas that took part in each."""
        return self._place.batches

    def num_participants(self) -> int:
        """The number of replicas that contribute to this step."""
        self.wait_quorum()
        return len(self._round.healthy(self._init_sync))

    def participating_rank(self) -> int | None:
        """The index of this replica among the contributing ones; None while it heals."""
        self.wait_quorum()
        healthy = self._round.healthy(self._init_sync)
        return healthy.index(self._name) if self._name in healthy else None

    def is_participating(self) -> bool:
        """Whether this replica contributes to this step."""
        return self.participating_rank() is not None

    def state_dict(self) -> dict[str, int]:
        """The progress to save in a checkpoint, for replicas that resume from it."""
        return {"step": self._place.step, "batches_committed": self._place.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from where `state_dict` was taken."""
        self._place.step, self._place.batches = state_dict["step"], state_dict["batches_committed"]

    def shutdown(self) -> None:
        """This replica leaves: the others need not wait for it."""
        self._rounds.stopped.set()
        with suppress(Exception):
            self._quorum.result(1.0)
        self._beat.end()
        self._server.end()
        self._peers = None
        atexit.unregister(self.shutdown)


class _Place:
    """The progress of this replica; see `Member`. `count`: the number of steps that it has begun."""

    def __init__(self) -> None:
        self.step = self.since = self.batches = self.count = 0
        self.is_well = True


class _Done:
    """A `Work` that is complete."""

    def wait(self) -> bool:
        return True


def _in_background(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in a daemon thread."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fsdp2-replica-meets", daemon=True).start()
    return future
