"""`Finalization`: the state of backwards that the user finalises by hand (docs/behaviour.md, 192-197). Layer: runtime.

::

    forward -> backward -> forward -> backward -> finalize_backward()                                gradients complete
                                                  finalize_backward(async_op=True) -> handle.wait()  gradients complete

Pure state and its errors; the root's context acts on it.
"""

from weakref import ref

from fsdp2.errors import OrderError


class Ticket:
    """An asynchronous finalisation that must be waited for.

    Attributes:
        owner: a weak reference to the finalization of the root; a root may be freed without having been waited for.
        is_void: its reductions were discarded.
    """

    def __init__(self, owner: "Finalization"):
        self.owner = ref(owner)
        self.is_void = False


class Finalization:
    """The finalisation of one root.

    Attributes:
        is_manual: backward leaves gradients unreduced; fixed from the first backward until they are finalised.
        is_due: a backward ran and has not been finalised.
        is_ending: the gradients of manual backwards are being reduced now.
        awaits_backward: the root's forward ran with gradients, and its backward has not begun yet.
    """

    def __init__(self) -> None:
        self.is_manual = False
        self.is_due = False
        self.is_ending = False
        self.awaits_backward = False

    def begin_backward(self, wanted: bool) -> None:
        """A backward reached the root's units; `wanted`: the user has turned manual mode on."""
        if not self.is_due:
            self.is_manual = wanted
        self.is_due = self.is_due or self.is_manual
        self.awaits_backward = False

    def check_can_finalize(self, fqn: str, wanted: bool, is_running: bool) -> None:
        """Before gradients are finalised.

        Raises:
            OrderError: the mode is off, a backward runs, or a forward waits for its backward.
        """
        where = f"finalize_backward of '{fqn}'"
        if not (wanted or self.is_manual):
            raise OrderError(f"{where}: call set_manual_backward_finalization(True) before the backward")
        if is_running:
            raise OrderError(f"{where}: a backward is running; call it after that has returned")
        if self.awaits_backward:
            raise OrderError(f"{where}: a forward has run, but not its backward; call it after the last backward")

    def end(self) -> None:
        """The gradients are being reduced, or were discarded."""
        self.is_manual = self.is_due = self.awaits_backward = False
