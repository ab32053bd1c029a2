"""What checkpoints must know about these optimizers. Layer: optim. Importing this module registers it."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp2.optim.local import LocalOptimizer
from fsdp2.optim.matrix import MatrixOptimizer
from fsdp2.optim.offloaded import OffloadedOptimizer
from fsdp2.optim.on_disk import DiskTensor
from fsdp2.optim.owned import OwnedTensor
from fsdp2.optim.pending import settled
from fsdp2.placement.hooks import Optimizers, registered


class _OwnOptimizers(Optimizers):
    def settled(self, tensor: torch.Tensor) -> torch.Tensor:
        return settled(tensor)

    def is_in_file(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DiskTensor)

    def is_elsewhere(self, tensor: DTensor) -> bool:
        return isinstance(tensor, OwnedTensor)

    def kind_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """For a `MatrixOptimizer`, the kinds of its param groups' optimizers, as if these were saved separately."""
        if not isinstance(optimizer, MatrixOptimizer):
            return None
        return ", ".join(dict.fromkeys(group["kind"] for group in optimizer.param_groups))

    def classes_of(self, optimizer: torch.optim.Optimizer) -> Sequence[type]:
        return [cls for cls in type(optimizer).__mro__ if not issubclass(cls, LocalOptimizer)]

    def works_on_matrices(self, optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, MatrixOptimizer)

    def new_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, path: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        return optimizer.owned_state(param, path, shape, dtype) if isinstance(optimizer, MatrixOptimizer) else None

    def in_host_memory(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        return optimizer.with_state_in_host_memory() if isinstance(optimizer, OffloadedOptimizer) else set()


registered.optimizers = _OwnOptimizers()
