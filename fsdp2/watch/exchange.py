"""`Exchange`: one kind of communication, as it is recorded, waited for and explained when it fails. Layer: watch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import torch
import torch.distributed as dist

from fsdp2.comm.base import Pending
from fsdp2.errors import CollectiveError, FSDPError
from fsdp2.watch.current import current, waiting
from fsdp2.watch.settings import settings
from fsdp2.watch.trail import Entry, number_of, trail_of
from fsdp2.watch.watchdog import watchdog

# A kernel that failed, such as for an index out of bounds, is told by the next call of CUDA, whatever it is.
_NOT_OF_THE_BACKEND = (torch.OutOfMemoryError, torch.AcceleratorError, FSDPError)


class Exchange:
    """One kind of communication of a unit over one axis; made once and used in every step. As a context manager, around
    the start of the communication, it records it in the group's trail; `Arrival` is its counterpart for the wait.
    (Classes, because `contextmanager` costs four times as much, and six of these run per unit and step.)

    Args:
        what: the operation.
        fqn: of the unit; None if it is about no unit.
        numel, nbytes, dtype: as in `fsdp2.events.Event`.
        device: of what travels; None: the CPU. On others a wait does not block the process.

    Attributes:
        fqn: the unit.
        group_name: the process group's.
        trail: of the group.
        begin_like: begins such an exchange, with memory that nobody reads; None if it cannot.

    Raises:
        CollectiveError: a peer died, the group timed out, or the ranks did different things.
        StepError: another rank has failed in a step that all make or none.
    """

    __slots__ = (
        "__weakref__",
        "_axis",
        "_device",
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
        device: torch.device | None = None,
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
        # Without a watchdog (fake groups, fake tensors) there may be no such device.
        self._device = None if watchdog() is None or device is None or device.type == "cpu" else device

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

    @property
    def place(self) -> int:
        """Where its last entry is in the trail, if a wait for it does not block the process; else -1."""
        return -1 if self._device is None else self.trail.position - 1

    def pass_wait(self, place: int) -> None:
        """The process has come past the wait for the entry at `place`; the current stream may not have."""
        if self._device is not None:
            current.queued.add(self, place, self._device)

    def _error(self, found: str) -> CollectiveError:
        rank, size = self._axis
        whose = "" if self.fqn is None else f"unit '{self.fqn or '(root)'}': "
        return CollectiveError(f"{whose}{self.what} failed on rank {rank} of {size} of its group: {found}")

    def __enter__(self) -> "Exchange":
        if current.failure is not None:
            raise self._error(current.failure)
        if current.step is not None:
            current.step.begin_exchange()
        self._numbers.append(self._number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        if isinstance(error, torch.OutOfMemoryError):  # memory comes before messages: nothing has begun
            self.trail.take_back()
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Turn an error of the backend into one that says what the other ranks did, as far as they answer."""
        if not isinstance(error, RuntimeError) or isinstance(error, _NOT_OF_THE_BACKEND):
            return
        dog, found = watchdog(), None
        if dog is not None and settings().is_on and _is_of_backend(error):
            with waiting(self, has_failed=True):
                found = dog.explain()
        if found is None:
            found = (
                f"{error}. Another rank died, or did something else: did all ranks run the same modules in the same "
                "order?"
            )
        raise self._error(found) from error


class Arrival:
    """What an `Exchange` waits for, as a `Pending` of its own."""

    __slots__ = ("_exchange", "_pending", "_place")

    def __init__(self, exchange: Exchange, pending: Pending):
        self._exchange = exchange
        self._pending = pending
        self._place = exchange.place

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
        self._exchange.pass_wait(self._place)


@contextmanager
def at_once(exchange: Exchange) -> Iterator[None]:
    """Around the start of a communication and the wait for it, in one call."""
    with exchange, waiting(exchange):
        yield
    exchange.pass_wait(exchange.place)


def _is_of_backend(error: RuntimeError) -> bool:
    """Whether the backend raised it, not code of the user's that runs within a collective."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "pair closure" in text or "timed out" in text
