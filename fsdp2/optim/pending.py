"""`PendingTensor`: a placeholder for a tensor that is being changed in the background. Layer: optim.

It is the local tensor of a sharded parameter while its step is running. Every operation on the parameter reaches it,
waits, and then uses the real tensor. The results of torch's functional collectives wait in the same way.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from fsdp2._torch.optim import no_torch_function, wrapper_like
from fsdp2.runtime.tree import map_tensors


class PendingTensor(torch.Tensor):
    """Becomes `real` after `settle` was called.

    Args:
        real: the real tensor, which is still being changed.
        settle: waits, and replaces this tensor by `real` where it is used; called before each operation on it.
    """

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, real: torch.Tensor, settle: Callable[[], None]) -> Self:
        tensor: Self = wrapper_like(cls, real)
        return tensor

    def __init__(self, real: torch.Tensor, settle: Callable[[], None]):
        self.stands_for = real
        self.settle = settle

    def settled(self) -> torch.Tensor:
        """The real tensor, with its final values."""
        self.settle()
        return self.stands_for

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settled().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_tensors(settled, (args, kwargs or {}))
        return func(*args, **kwargs)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The real tensor, with its final values, if `tensor` is a pending one."""
    return tensor.settled() if isinstance(tensor, PendingTensor) else tensor
