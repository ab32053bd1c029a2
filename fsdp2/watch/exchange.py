"""`Watched`: a collective that is recorded, and explained when it fails; `Exchange`: its description. Layer: watch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.comm.base import Collective, Operand, Tensors, wrap_collective
from fsdp2.errors import CollectiveError, FSDPError
from fsdp2.events import emit
from fsdp2.watch.current import current, waiting
from fsdp2.watch.settings import settings
from fsdp2.watch.trail import Entry, number_of, trail_of
from fsdp2.watch.watchdog import watchdog

# The next CUDA call, whatever it is, raises the error of a failed kernel, such as for an index out of bounds.
_NOT_OF_THE_BACKEND = (torch.OutOfMemoryError, torch.AcceleratorError, FSDPError)


class Exchange:
    """One kind of communication over one group.

    Args:
        what: the operation.
        fqn: the unit's FQN; None if it belongs to no unit.
        numel, nbytes, dtype: as in `fsdp2.events.Event`.
        device: the device of what is sent; None for the CPU. On other devices a wait does not block the process.

    Attributes:
        group_name: the name of the process group.
        trail: the group's trail.
        number: the number of its entries in the trail.
        device: the device if a wait does not block the process, otherwise None.
    """

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
        self.group_name = self.trail.name
        self.number = number_of(Entry(what, fqn, numel, nbytes, "" if dtype is None else str(dtype)))
        # Without a watchdog (fake groups, fake tensors) the device may not exist.
        self.device = None if watchdog() is None or device is None or device.type == "cpu" else device

    def begin(self) -> None:
        """Record in the trail that it starts."""
        if current.failure is not None:
            raise self._error(current.failure)
        if current.step is not None:
            current.step.begin_exchange()
        self.trail.numbers.append(self.number)

    def give_up(self, error: BaseException) -> None:
        """It could not start because of `error`; see `explain`."""
        if isinstance(error, torch.OutOfMemoryError):  # memory is allocated before messages are sent
            self.trail.take_back()
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Replace an error of the backend by one that says what the other ranks did, if they answer.

        Raises:
            CollectiveError: a peer died, the group timed out, or the ranks did different things.
        """
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

    def _error(self, found: str) -> CollectiveError:
        rank, size = self._axis
        whose = "" if self.fqn is None else f"unit '{self.fqn or '(root)'}': "
        return CollectiveError(f"{whose}{self.what} failed on rank {rank} of {size} of its group: {found}")


class Watched(Collective):
    """A collective that is recorded in the group's trail at its start, and whose errors are explained."""

    def __init__(self, inner: Collective):
        info = inner.info
        super().__init__(info, inner.call, inner.comm, inner.operands)
        self._exchange = Exchange(
            info.kind.replace("_", "-"), info.fqn, info.group, info.numel, info.nbytes, info.dtype, info.device
        )
        self._trail = self._exchange.trail
        self._numbers, self._number = self._trail.numbers, self._exchange.number
        self._device = self._exchange.device
        self._reduces = info.kind in ("reduce_scatter", "all_reduce")
        self._shapes: list[list[tuple[int, torch.dtype, torch.device]]] = []
        self._trail.known[self._number] = self

    def start(self, *tensors: Tensors) -> Any:
        """Also raises `StepError` if another rank has failed in a joint step."""
        emit(*self.event)
        if tensors and not self._shapes:
            self._shapes = [[(t.numel(), t.dtype, t.device) for t in each] for each in tensors]
        if self._reduces:
            self._trail.has_reduced = True
        # Inlines `Exchange.begin`, to save a call: six of these run per unit and step.
        if current.failure is not None or current.step is not None:
            self._exchange.begin()
        else:
            self._numbers.append(self._number)
        try:
            started = self.call(*tensors)
        except BaseException as error:
            self._exchange.give_up(error)
            raise
        return started, -1 if self._device is None else self._trail.position - 1

    def wait(self, started: Any) -> None:
        pending, place = started
        emit(*self.waits)
        current.since = monotonic()
        current.awaited = self._exchange
        try:
            pending.wait()
        except BaseException as error:
            self._exchange.explain(error)
            raise
        finally:
            current.awaited = None
        if self._device is not None:  # the process has passed the wait; the current stream may not have
            current.queued.add(self._exchange, place, self._device)
        emit(*self.done)

    def begin_like(self) -> Callable[[], None]:
        """Start one of the same sizes on scratch memory, for the sake of the other ranks. Returns a function that waits
        for it."""
        call = self.call
        if self.comm is not None:
            operands = [Operand(full.new_zeros(full.numel()), bounds) for full, bounds in self.operands]
            call = self.comm.plan_all_gather(operands, self.info).call
        tensors = [[torch.zeros(n, dtype=dtype, device=device) for n, dtype, device in each] for each in self._shapes]
        return call(*tensors).wait


@contextmanager
def at_once(exchange: Exchange) -> Iterator[None]:
    """Wrap a call that starts a communication and waits for it."""
    exchange.begin()
    try:
        with waiting(exchange):
            yield
    except BaseException as error:
        exchange.give_up(error)
        raise
    if exchange.device is not None:
        current.queued.add(exchange, exchange.trail.position - 1, exchange.device)


def _is_of_backend(error: RuntimeError) -> bool:
    """Whether the backend raised it, not user code that runs within a collective."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "pair closure" in text or "timed out" in text


wrap_collective.append(Watched)
