"""Memory for the sharded parameters of units on the meta device. Layer: init.

Importing this module registers it, so that `fsdp2.placement.allocation` finds it.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_parameter, version
from fsdp2.checks.emptied import SMALLEST, can_mark, is_marked
from fsdp2.checks.left_out import warn_in_save
from fsdp2.extras.one_block import block_for, neighbours
from fsdp2.placement.allocation import Fresh, writes_of
from fsdp2.placement.hooks import Memory, Models, registered
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.root import units_below

__all__ = ["is_unwritten", "is_written_less"]


class _UnitMemory(Memory):
    """One block for the shards of each dtype and device of a group, allocated when the first of them is requested, so
    that nothing has to move later."""

    def __init__(self, model: nn.Module, chosen: Iterable[torch.Tensor]):
        self._units = units_below(model)
        if self._units:
            self.home = self._units[0].device
        wanted = set(chosen)
        managed = [param for unit in self._units for param in unit.params]
        self._managed: dict[torch.Tensor, ManagedParameter] = {param.sharded: param for param in managed}
        groups = [
            [param for param in group.params if param.sharded in wanted]
            for unit in self._units
            for group in unit.groups
        ]
        kinds = [members for params in groups for members in neighbours(params, lambda param: param.plan.home)]
        self._kinds = {param: members for members in kinds for param in members}
        self._pieces: dict[ManagedParameter, torch.Tensor] = {}

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        managed = self._managed.get(tensor)
        return super().device_of(tensor) if managed is None else managed.plan.home

    def parameter_for(self, param: nn.Parameter) -> nn.Parameter | None:
        """A sharded parameter of zeros, padding included; None if `param` is in no block."""
        managed = self._managed.get(param)
        if managed is None or managed not in self._kinds:
            return None
        if managed not in self._pieces:
            members = self._kinds[managed]
            self._pieces.update(zip(members, block_for(members, managed.plan.home), strict=True))
        local = managed.geometry.local_view(self._pieces.pop(managed))
        new = make_parameter(local, managed.plan.specs.sharded(managed.dtype), managed.sharded.requires_grad)
        new.__dict__.update(managed.sharded.__dict__)
        return new

    def writes_to(self, param: nn.Parameter) -> int:
        managed = self._managed.get(param)
        return version(param) if managed is None else managed.writes_on_meta

    def finish(self) -> None:
        for unit in self._units:
            unit.refresh_groups()


class _ModelsOfUnits(Models):
    def memory_for(self, model: nn.Module, chosen: Iterable[torch.Tensor]) -> Memory:
        return _UnitMemory(model, chosen)

    def warn_in_save(self, model: nn.Module) -> None:
        if units_below(model):
            warn_in_save(model)


def is_unwritten(fresh: Fresh) -> bool:
    """Whether a tensor has not been written to since it was allocated, neither visibly to torch nor through `.data`.
    False on ranks whose shard is too small for a mark."""
    tensor = fresh.tensor
    if isinstance(tensor, DTensor) and local_tensor(tensor).nbytes < SMALLEST:
        return False
    return writes_of(tensor) == fresh.writes and (is_marked(tensor) or not can_mark(tensor))


def is_written_less(fresh: Fresh) -> bool:
    """Whether a tensor has been written to less often since its allocation than while the model was built."""
    return writes_of(fresh.tensor)[0] - fresh.writes[0] < fresh.writes_on_meta


registered.models = _ModelsOfUnits()
