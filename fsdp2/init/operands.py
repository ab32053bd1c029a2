"""Plain tensors in operations with DTensors: within `seeded` they are assumed to be whole and equal on all ranks.
Layer: init.

Every rank of a seeded context draws the same plain tensors, so a plain operand is this rank's copy of the whole tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2._torch.shared import full_tensor
from fsdp2.placement.tiling import own_box

__all__ = ["as_dtensors", "copy_own", "number_of", "operand_of", "whole_of", "write_on_whole"]


def whole_of(tensor: DTensor) -> torch.Tensor:
    """The values of all ranks. Collective. Detached, because torch 2.11 cannot gather a tensor that requires grad below
    autograd: it detaches the result in place, for which its DTensor has no strategy."""
    on_mesh = tensor.detach().to(tensor.device_mesh.device_type)  # for collectives, if it is offloaded
    assert isinstance(on_mesh, DTensor)
    return full_tensor(on_mesh).to(tensor.device)


def copy_own(whole: torch.Tensor, out: DTensor) -> None:
    """Copy this rank's part of `whole` into `out`."""
    local = local_tensor(out)
    if local.numel():
        local.copy_(whole[own_box(out).slices()])


def operand_of(operand: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor argument of an operation on `like`, expanded to the shape of `like`. Collective
    if it is a DTensor with other placements than `like`."""
    if not isinstance(like, DTensor):
        return (whole_of(operand) if isinstance(operand, DTensor) else operand).expand(like.shape)
    if isinstance(operand, DTensor):
        expanded = operand.detach().expand(like.shape)
        assert isinstance(expanded, DTensor)
        return local_tensor(expanded.redistribute(like.device_mesh, like.placements))
    return _part_of(operand.expand(like.shape), like)


def as_dtensors(args: Sequence[Any], like: DTensor) -> list[Any]:
    """The arguments of an operation, with plain tensors turned into DTensors on the mesh of `like`: with the same
    placements if they have its shape, otherwise replicated. 0-dim tensors stay plain, which DTensor accepts."""
    return [
        as_dtensors(arg, like)
        if isinstance(arg, list | tuple)
        else _as_dtensor(arg, like)
        if isinstance(arg, torch.Tensor) and not isinstance(arg, DTensor) and arg.ndim
        else arg
        for arg in args
    ]


def write_on_whole(func: Any, args: Sequence[Any], out: DTensor) -> None:
    """Run an in-place operation that DTensor does not support on the whole of `out`, and keep this rank's part.
    Collective: gathers `out` and the tensors in `args`.

    Args:
        args: the arguments without the first one, which is written.
    """
    whole = whole_of(out)
    func(whole, *[_whole(arg) for arg in args])
    copy_own(whole, out)


def number_of(tensor: DTensor) -> Any:
    """``tensor.item()`` of the whole tensor. In torch 2.13 each rank gets the number of its own part, so that ranks
    would leave the loop in `nn.init.trunc_normal_` at different times. Collective."""
    if any(placement.is_partial() for placement in tensor.placements) and tensor.dtype == torch.bool:
        terms = DTensor.from_local(
            local_tensor(tensor).to(torch.int32), tensor.device_mesh, tensor.placements, run_check=False
        )
        return bool(whole_of(terms).item())
    return whole_of(tensor).item()


def _whole(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return [_whole(one) for one in arg]
    return whole_of(arg) if isinstance(arg, DTensor) else arg


def _as_dtensor(plain: torch.Tensor, like: DTensor) -> DTensor:
    mesh, placements, part = like.device_mesh, like.placements, plain
    if plain.shape != like.shape or any(placement.is_partial() for placement in placements):
        placements = (Replicate(),) * mesh.ndim
    else:
        part = _part_of(plain, like)
    # `DTensor.from_local` would move it to the mesh's device; an offloaded parameter is not there.
    spec = make_spec(mesh, placements, plain.shape, plain.stride(), plain.dtype)
    return make_dtensor(part.detach().to(local_tensor(like).device), spec)


def _part_of(plain: torch.Tensor, like: DTensor) -> torch.Tensor:
    box = own_box(like)
    return plain if box.shape == plain.shape else plain[box.slices()].contiguous()
