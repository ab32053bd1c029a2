"""Memory from `to_empty` that was never written to: detected at the first forward, before training on it. Layer:
checks, below the hooks.

A mark of a few bytes is written at both ends of each tensor. Any way of filling the tensor overwrites the mark,
including those that leave no other trace (`.data`, NumPy, a file read into memory). Tensors of less than `SMALLEST`
bytes, which could hold the mark by chance, and subclasses, whose memory only their operators may access, are not
marked.
"""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2._torch.checks import makes_empty, non_persistent_buffers
from fsdp2.errors import OrderError
from fsdp2.layout import dense_strides
from fsdp2.runtime.extension import is_wrapper
from fsdp2.runtime.unit import Unit, unit_of

MARK = (0x1F, 0xD3, 0xE5, 0x7F, 0xB6, 0x4C, 0xF9, 0x7F)  # NaN in every floating dtype of 2, 4 or 8 bytes
SMALLEST = 4

Place = tuple[nn.Module, str]


def can_mark(tensor: torch.Tensor) -> bool:
    """Whether `mark` can mark a parameter or buffer."""
    local = _local(tensor)
    return not (is_wrapper(local) or local.is_meta or local.nbytes < SMALLEST) and (
        local.is_contiguous() or dense_strides(local.shape, local.stride()) == local.stride()
    )


def mark(tensor: torch.Tensor) -> None:
    """Mark a tensor's memory as having no values yet."""
    if can_mark(tensor):
        with torch.inference_mode():
            for end in _ends(tensor):
                end.copy_(torch.tensor(MARK[: end.numel()], dtype=torch.uint8))


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has not been written to since it was marked."""
    if not can_mark(tensor):
        return False
    with torch.inference_mode():
        return all(tuple(end.tolist()) == MARK[: end.numel()] for end in _ends(tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _ends(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last bytes of a tensor without gaps."""
    local = _local(tensor).detach()
    memory = local.as_strided((local.numel(),), (1,)).view(torch.uint8)
    return memory[: len(MARK)], memory[max(len(MARK), memory.numel() - len(MARK)) :]


# --- after `to_empty` ------------------------------------------------------------------------------------------------


def places_left(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> set[Place]:
    """Parameters and buffers of a sharded module that will have no values after ``module._apply(fn)``: after `to_empty`
    all of them, after `to` those that have none now. Sharded modules below handle their own."""
    unit, empties = unit_of(module), makes_empty(fn)
    if unit is None or not (empties or unit.was_emptied):
        return set()
    return {place for place, tensor in _tensors(module, recurse) if empties or is_marked(tensor)}


def mark_left(module: nn.Module, places: set[Place], recurse: bool) -> None:
    """After `_apply`, mark the tensors that `places_left` returned."""
    unit = unit_of(module)
    if unit is not None and places:
        unit.was_emptied = True
        for place, tensor in _tensors(module, recurse):
            if place in places:
                mark(tensor)


def _tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[Place, torch.Tensor]]:
    waiting = [module]
    while waiting:
        each = waiting.pop()
        for named in (each.named_parameters, each.named_buffers):
            for name, tensor in named(recurse=False):
                yield (each, name), tensor
        if recurse:
            waiting += [child for child in each.children() if unit_of(child) is None]


# --- the first forward -----------------------------------------------------------------------------------------------


def check_filled(unit: Unit) -> None:
    """Before the first forward after `to_empty`: check that everything in and below the unit's modules has values.

    Raises:
        OrderError: parameters or persistent buffers have none. (Other buffers, which some modules recompute in forward,
            only cause a warning.)
    """
    garbage: dict[str, None] = {}
    scratch: dict[str, None] = {}
    below = {each: fqn for module in unit.modules for fqn, each in module.named_modules()}
    units = [one for each in below if (one := unit_of(each)) is not None]
    sharded: dict[torch.Tensor | None, torch.Tensor] = {
        param.unsharded: param.sharded for one in units for param in one.params
    }  # for units that were unsharded by hand
    for each, prefix in below.items():
        for (_, name), tensor in _tensors(each, recurse=False):
            if is_marked(sharded.get(tensor, tensor)):
                found = scratch if name in non_persistent_buffers(each) else garbage
                found[f"{prefix}.{name}" if prefix else name] = None
    if garbage:
        raise OrderError(
            f"to_empty allocated {_some(garbage)}, and nothing has filled it since: training would start from garbage. "
            "fsdp2.init.materialize(model), in place of to_empty, does both. After to_empty, initialise all of the "
            "model (init_weights, reset_parameters) or load all of it before the first forward."
        )
    for one in units:
        one.was_emptied = False
    if scratch:
        warnings.warn(
            f"to_empty allocated {_some(scratch)}, and nothing has filled it since. No checkpoint has these "
            "buffers (persistent=False): unless forward writes them first, their module must compute them again after "
            "to_empty. fsdp2.init.materialize calls its reset_buffers().",
            stacklevel=2,
        )


def _some(names: dict[str, None]) -> str:
    return ", ".join(list(names)[:10]) + (f", ... ({len(names)} in all)" if len(names) > 10 else "")
