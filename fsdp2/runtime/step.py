"""`Step`: where a root is in its step. Layer: runtime. Pure state and its errors; the root's context acts on it.

::

    forward -> backward -> optimizer                                                                 the usual step
    forward -> backward -> forward -> backward -> finalize_backward()                                gradients complete
                                                  finalize_backward(async_op=True) -> handle.wait()  gradients complete

A backward that raises ends no step: everything but `reset` is then refused.
"""

from collections.abc import Callable
from typing import NoReturn
from weakref import ref

from fsdp2._torch import backward_is_running
from fsdp2.errors import OrderError


class Step:
    """The step of one root, which may have several forwards and backwards.

    Attributes:
        awaits_backward: the root's forward ran with gradients, and its backward has not begun yet.
        is_manual: backward leaves gradients unreduced; fixed from the first backward until they are finalised.
        is_due: a manual backward ran and has not been finalised.
        is_finalizing: the gradients of manual backwards are being reduced now.
        is_partial: the running backward computes the gradients of some inputs only.
    """

    def __init__(self) -> None:
        self.awaits_backward = False
        self.is_manual = False
        self.is_due = False
        self.is_finalizing = False
        self.is_partial = False
        # The callback for the end of the running backward; None if no backward runs. Only autograd's engine holds a
        # strong reference, so the weak one is dead if backward raised.
        self._end: ref[Callable[[], None]] | None = None

    def in_backward(self) -> bool:
        """Whether a backward has begun and not ended; called from within one. Raises if the last one raised."""
        if self._end is None:
            return False
        if self._end() is None:
            _raise_unfinished("backward")
        return True

    def begin_backward(self, end: Callable[[], None], manual: bool) -> None:
        """A backward reached units of the root. `end` runs at its end; `manual`: the user has asked for that mode."""
        self._end = ref(end)
        self.is_partial = False
        if not self.is_due:
            self.is_manual = manual
        self.is_due = self.is_due or self.is_manual
        self.awaits_backward = False

    def end_backward(self) -> None:
        """The whole backward is over."""
        self._end = None

    def check_backward_ended(self) -> None:
        """Called before a forward. Raises if the last backward raised, and `reset` was not called."""
        if self._end is not None and not backward_is_running():
            _raise_unfinished("forward")

    def check_can_finalize(self, fqn: str, manual: bool) -> None:
        """Before gradients are finalised. Raises if the mode is off, a backward runs, or a forward waits for its
        backward."""
        where = f"finalize_backward of '{fqn}'"
        if not (manual or self.is_manual):
            raise OrderError(f"{where}: call set_manual_backward_finalization(True) before the backward")
        if backward_is_running() or self._end is not None:
            raise OrderError(f"{where}: a backward is running; call it after that has returned")
        if self.awaits_backward:
            raise OrderError(f"{where}: a forward has run, but not its backward; call it after the last backward")

    def reset(self) -> None:
        """The gradients are being reduced, or were discarded."""
        self.is_manual = self.is_due = self.awaits_backward = False
        self._end = None


def _raise_unfinished(what: str) -> NoReturn:
    raise OrderError(
        f"{what} was called, but the last backward has not finished; did it raise? Call reset_iter_state() on the "
        "root, on every rank, before the next iteration."
    )
