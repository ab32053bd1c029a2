"""Allocate memory for a model, or a part of it, on the meta device. Layer: placement."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, parameter_slots, version
from fsdp2.placement.hooks import registered

__all__ = ["Fresh", "allocate", "become", "tensors_of", "writes_of"]


@dataclass(frozen=True)
class Fresh:
    """A tensor that was given memory.

    Attributes:
        was: the tensor on the meta device that it replaces.
        writes: its number of writes at that time; see `writes_of`.
        writes_on_meta: the number of writes to `was` while the model was built.
    """

    name: str
    tensor: torch.Tensor
    was: torch.Tensor
    writes: tuple[int, int]
    writes_on_meta: int


def allocate(
    model: nn.Module, device: torch.device | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> list[Fresh]:
    """Allocate memory, without values, for parameters and buffers on the meta device. Tied ones stay tied. Parameters
    keep their identity (see `become`), so an optimizer may already hold them.

    Args:
        device: the device of buffers, and of parameters that no unit manages. None: that of their mesh or of the units,
            or the CPU.
        wanted: called with each FQN; False leaves the tensor on the meta device.

    Returns:
        The tensors that were given memory, by their first names.
    """
    chosen = {tensor for name, tensor in tensors_of(model, every_name=True) if tensor.is_meta and wanted(name)}
    memory = registered.models.memory_for(model, chosen)
    if device is not None:
        memory.home = device
    made: dict[torch.Tensor, torch.Tensor] = {}
    writes_on_meta: dict[torch.Tensor, int] = {}
    for module in model.modules():
        slots = parameter_slots(module)
        for name, param in slots.items():
            if param in chosen:
                assert param is not None
                if param not in made:
                    writes = memory.writes_to(param)
                    placed = memory.parameter_for(param)
                    made[param] = become(param, _like(param, memory.device_of(param)) if placed is None else placed)
                    writes_on_meta[made[param]] = writes
                new = made[param]
                assert isinstance(new, nn.Parameter)
                slots[name] = new
        for name, buffer in module.named_buffers(recurse=False):
            if buffer in chosen:
                made.setdefault(buffer, torch.empty_like(buffer, device=memory.device_of(buffer)))
                setattr(module, name, made[buffer])
    memory.finish()
    was = {new: old for old, new in made.items()}
    return [
        Fresh(name, tensor, was[tensor], writes_of(tensor), writes_on_meta.get(tensor, 0))
        for name, tensor in tensors_of(model)
        if tensor in was
    ]


def tensors_of(model: nn.Module, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by FQN; tied ones once, or with `every_name` under each of their names."""
    yield from model.named_parameters(remove_duplicate=not every_name)
    yield from model.named_buffers(remove_duplicate=not every_name)


def become(param: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Give `param` the memory of `new`, on any device, but keep the object for optimizers that hold it (as `to_empty`
    does for sharded parameters). Returns what the modules must hold: `param`, or `new` if torch cannot swap the two,
    because `param` has weak references or is part of a graph."""
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


def writes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of writes to the tensor, and to the local tensor of a DTensor (autograd counts these separately)."""
    return version(tensor), version(local_tensor(tensor)) if isinstance(tensor, DTensor) else 0


def _like(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    new = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    return new
