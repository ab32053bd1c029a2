"""What holds back offloaded steps, and what shows that they are under way."""

from __future__ import annotations

import threading

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_of
from fsdp2.optim.background import submit
from fsdp2.optim.pending import PendingTensor

__all__ = ["Gate", "pending"]


class Gate:
    """Holds back the background, so that what is not waited for is seen to be missing."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        submit(self._hold, None)

    def _hold(self) -> None:
        assert self.opens.wait(30)


def pending(model: nn.Module) -> list[str]:
    """The names of the parameters whose step is under way."""
    sharded = [(name, param) for name, param in model.named_parameters() if isinstance(param, DTensor)]
    return [name for name, param in sharded if isinstance(local_of(param), PendingTensor)]
