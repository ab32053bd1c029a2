"""Allocate memory for a model, or a part of it, on the meta device. Layer: init."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_parameter, parameter_slots, version
from fsdp2.checks.emptied import SMALLEST, can_mark, is_marked
from fsdp2.runtime.memory import block_for, neighbours
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.root import units_below

__all__ = ["Fresh", "allocate", "become", "tensors_of"]


@dataclass(frozen=True)
class Fresh:
    """A tensor that was given memory.

    Attributes:
        was: the tensor on the meta device that it replaces.
        writes: its number of writes at that time: as counted by torch, and for the local tensor of a DTensor.
        writes_on_meta: the number of writes to `was` while the model was built.
    """

    name: str
    tensor: torch.Tensor
    was: torch.Tensor
    writes: tuple[int, int]
    writes_on_meta: int

    def is_unwritten(self) -> bool:
        """Whether it has not been written to since it was allocated, neither visibly to torch nor through `.data`.
        False on ranks that cannot tell, because their shard is too small for a mark."""
        if isinstance(self.tensor, DTensor) and local_tensor(self.tensor).nbytes < SMALLEST:
            return False
        return _writes(self.tensor) == self.writes and (is_marked(self.tensor) or not can_mark(self.tensor))

    def is_written_less(self) -> bool:
        """Whether it has been written to less often since then than while the model was built."""
        return _writes(self.tensor)[0] - self.writes[0] < self.writes_on_meta


def allocate(
    model: nn.Module, device: torch.device | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> list[Fresh]:
    """Allocate memory, without values, for parameters and buffers on the meta device. Tied ones stay tied. Parameters
    keep their identity (see `become`), so an optimizer may already hold them.

    Args:
        device: of buffers and of parameters that no unit manages; None: of their mesh, of the units, or the CPU.
        wanted: is called with each FQN; False leaves the tensor on the meta device.

    Returns:
        the tensors that were given memory, by their first names.
    """
    units = units_below(model)
    home = device or (units[0].device if units else torch.device("cpu"))
    chosen = {tensor for name, tensor in tensors_of(model, every_name=True) if tensor.is_meta and wanted(name)}
    of_unit = {param.sharded: param for unit in units for param in unit.params}
    places = _Places([p for p in group.params if p.sharded in chosen] for unit in units for group in unit.groups)
    made: dict[torch.Tensor, torch.Tensor] = {}
    writes_on_meta: dict[torch.Tensor, int] = {}
    for module in model.modules():
        slots = parameter_slots(module)
        for name, param in slots.items():
            if param in chosen:
                assert param is not None
                if param not in made:
                    managed = of_unit.get(param)
                    placed = None if managed is None else places.parameter_for(managed)
                    place = _device_of(param, home) if managed is None else managed.plan.home
                    writes = version(param) if managed is None else managed.writes_on_meta
                    made[param] = become(param, _parameter_like(param, place) if placed is None else placed)
                    writes_on_meta[made[param]] = writes
                new = made[param]
                assert isinstance(new, nn.Parameter)
                slots[name] = new
        for name, buffer in module.named_buffers(recurse=False):
            if buffer in chosen:
                made.setdefault(buffer, torch.empty_like(buffer, device=_device_of(buffer, home)))
                setattr(module, name, made[buffer])
    for unit in units:
        unit.refresh_groups()
    was = {new: old for old, new in made.items()}
    return [
        Fresh(name, tensor, was[tensor], _writes(tensor), writes_on_meta.get(tensor, 0))
        for name, tensor in tensors_of(model)
        if tensor in was
    ]


def tensors_of(model: nn.Module, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by FQN; tied ones once, or with `every_name` under each of their names."""
    yield from model.named_parameters(remove_duplicate=not every_name)
    yield from model.named_buffers(remove_duplicate=not every_name)


def become(param: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Give `param` the memory of `new`, on any device, but keep the object, for an optimizer that holds it (as
    `to_empty` does for sharded parameters). Returns what the modules must hold: `param`, or `new` if torch cannot swap
    the two, because `param` has weak references or is part of a graph."""
    grad_dtype = None if param.grad_dtype == param.dtype else (param.grad_dtype,)
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError:
        held = new
    else:
        held = param
    if grad_dtype is not None:
        held.grad_dtype = grad_dtype[0]
    return held


def _device_of(tensor: torch.Tensor, home: torch.device) -> torch.device:
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else home


def _parameter_like(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    new = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    return new


def _writes(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of writes: to the tensor, and to the local tensor of a DTensor (autograd counts these separately)."""
    return version(tensor), version(local_tensor(tensor)) if isinstance(tensor, DTensor) else 0


class _Places:
    """Memory for shards that are on the meta device: one block per dtype and device of a group, allocated at the first
    request for one of its parameters, so that nothing has to move afterwards. `groups`: of each the parameters that
    will be requested."""

    def __init__(self, groups: Iterable[Sequence[ManagedParameter]]):
        kinds = [members for params in groups for members in neighbours(params, lambda param: param.plan.home)]
        self._kinds = {param: members for members in kinds for param in members}
        self._pieces: dict[ManagedParameter, torch.Tensor] = {}

    def parameter_for(self, param: ManagedParameter) -> nn.Parameter | None:
        """A zero sharded parameter, with zero padding, to replace that of `param`; None if `param` is in no block."""
        if param not in self._kinds:
            return None
        if param not in self._pieces:
            members = self._kinds[param]
            self._pieces.update(zip(members, block_for(members, param.plan.home), strict=True))
        local = param.geometry.local_view(self._pieces.pop(param))
        new = make_parameter(local, param.plan.specs.sharded(param.dtype), param.sharded.requires_grad)
        new.__dict__.update(param.sharded.__dict__)
        return new
