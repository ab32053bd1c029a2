"""Private names of torch for `fsdp2.plan`: fake tensors, and counting their memory. Ground layer."""

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from fsdp2._torch import real_tensors, running_backward
from fsdp2._torch.shared import TorchDispatchMode

# The errors of fake tensors for an operator that needs values, or that torch cannot run without them.
FAKE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)

_UPDATES = {
    torch.ops.aten.index_put.default: ("IndexBackward0", torch.ops.aten.index_put_.default),
    torch.ops.aten.index_add.default: ("IndexSelectBackward0", torch.ops.aten.index_add_.default),
    torch.ops.aten.scatter_add.default: ("GatherBackward0", torch.ops.aten.scatter_add_.default),
}


class MemoryMode(TorchDispatchMode):
    """A dispatch mode that counts memory. While any mode is active, torch computes some sums of gradients, and
    gradients of indexing, out of place instead of in place (`isTensorSubclassLike` in its C++). This takes more memory,
    so the mode restores the in-place operation if nothing else holds the tensor. No public API counts references."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _holders_of_a_sum()  # cached now: autograd does not work while a mode handles an operator

    @staticmethod
    def as_without(op: Any, args: Sequence[Any]) -> Any:
        """What autograd would call instead of `op` if no mode were active."""
        if torch.is_grad_enabled() or running_backward() < 0:
            return op
        if op is torch.ops.aten.add.Tensor:
            return torch.ops.aten.add_.Tensor if _holders(args[0]) == _holders_of_a_sum() else op
        if op in _UPDATES:
            node = torch._C._current_autograd_node()
            name, update = _UPDATES[op]
            return update if node.name() == name else op
        return op


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The number of references to a tensor, in C++ and in Python, and the number of tensors on its memory."""
    storage = tensor.untyped_storage()
    count: Any = tensor
    return count._use_count(), getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata)


@cache
def _holders_of_a_sum() -> tuple[int, int, int]:
    """The same for a gradient that only the engine holds, as a dispatch mode sees it."""
    seen: list[tuple[int, int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is torch.ops.aten.add.Tensor:
                seen.append(_holders(args[0]))
            return op(*args, **(kwargs or {}))

    with real_tensors(), torch.enable_grad():
        leaf = torch.ones(1, requires_grad=True)
        value = leaf * 2
        both = value * 3, value * 5
        with Look():  # type: ignore[no-untyped-call]
            torch.autograd.grad(both, leaf, (torch.ones(1), torch.ones(1)))
    return seen[0]


buffer_slots: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
