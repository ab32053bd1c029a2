"""`Exchange`: one kind of communication, as it is recorded, waited for and explained when it fails. Layer: watch."""

from collections.abc import Callable
from time import monotonic

import torch
import torch.distributed as dist

from fsdp2.comm.base import Pending
from fsdp2.errors import CollectiveError, FSDPError
from fsdp2.watch.current import current, waiting
from fsdp2.watch.settings import settings
from fsdp2.watch.trail import Entry, number_of, trail_of
from fsdp2.watch.watchdog import watchdog


class Exchange:
    """One kind of communication of a unit over one axis; made once and used in every step. As a context manager, around
    the start of the communication, it records it in the group's trail; `Arrival` is its counterpart for the wait.
    (Classes, because `contextmanager` costs four times as much, and six of these run per unit and step.)

    Args:
        what: the operation.
        fqn: of the unit; None if it is about no unit.
        numel, nbytes, dtype: as in `fsdp2.events.Event`.

    Attributes:
        fqn: the unit.
        group_name: the process group's.
        trail: of the group.
        begin_like: see `fsdp2.watch.trail.TakesPart`.

    Raises:
        CollectiveError: a peer died, the group timed out, or the ranks did different things.
        StepError: another rank has failed in a step that all make or none.
    """

    __slots__ = (
        "__weakref__",
        "_axis",
        "_entry",
        "_number",
        "_numbers",
        "begin_like",
        "fqn",
        "group_name",
        "trail",
        "what",
    )

    def __init__(
        self,
        what: str,
        fqn: str | None,
        group: dist.ProcessGroup,
        numel: int = 0,
        nbytes: int = 0,
        dtype: torch.dtype | None = None,
    ):
        self.what = what
        self.fqn = fqn
        self._axis = group.rank(), group.size()
        self.trail = trail_of(group)
        self._numbers = self.trail.numbers
        self.group_name = self.trail.name
        self._entry = Entry(what, fqn, numel, nbytes, "" if dtype is None else str(dtype))
        self._number = number_of(self._entry)
        self.begin_like: Callable[[], Pending] | None = None
        self.trail.known[self._number] = self
        watchdog()

    @property
    def mark(self) -> int:
        """What messages of it carry: the same on all ranks, and different for another unit, operation or size."""
        return self._number

    def rename(self, fqn: str) -> None:
        """The unit has another name."""
        self.fqn = fqn
        self._entry = self._entry._replace(unit=fqn)
        self._number = number_of(self._entry)
        self.begin_like = None  # its messages would carry the old mark
        self.trail.known[self._number] = self

    def __enter__(self) -> "Exchange":
        if current.step is not None:
            current.step.begin_exchange()
        self._numbers.append(self._number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Turn an error of the backend into one that says what the other ranks did, as far as they answer."""
        if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, FSDPError)):
            return
        dog, found = watchdog(), None
        if dog is not None and settings().is_on and _is_of_backend(error):
            with waiting(self, has_failed=True):
                found = dog.explain()
        rank, size = self._axis
        whose = "" if self.fqn is None else f"unit '{self.fqn}': "
        message = f"{whose}{self.what} failed on rank {rank} of {size} of its group: "
        if found is None:
            found = (
                f"{error}. Another rank died, or did something else: did all ranks run the same modules in the same "
                "order?"
            )
        raise CollectiveError(message + found) from error


class Arrival:
    """What an `Exchange` waits for, as a `Pending` of its own."""

    __slots__ = ("_exchange", "_pending")

    def __init__(self, exchange: Exchange, pending: Pending):
        self._exchange = exchange
        self._pending = pending

    def wait(self) -> None:
        """See `Pending`."""
        current.since = monotonic()
        current.awaited = self._exchange
        try:
            self._pending.wait()
        except BaseException as error:
            self._exchange.explain(error)
            raise
        finally:
            current.awaited = None


def _is_of_backend(error: RuntimeError) -> bool:
    """Whether the backend raised it, not code of the user's that runs within a collective."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "pair closure" in text or "timed out" in text
