"""Detects memory from `to_empty` that was never written to, at the first forward. Layer: checks.

A mark of a few bytes is written at both ends of each tensor. Filling the tensor overwrites the mark, even if it leaves
no other trace (`.data`, NumPy, a file read into memory). Tensors of less than `SMALLEST` bytes, which could hold the
mark by chance, and subclasses, whose memory only their operators may access, are not marked.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, outside_transforms
from fsdp2._torch.checks import makes_empty, non_persistent_buffers
from fsdp2.errors import OrderError
from fsdp2.layout import dense_strides
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit, unit_of

MARK = (0x1F, 0xD3, 0xE5, 0x7F, 0xB6, 0x4C, 0xF9, 0x7F)  # NaN in every floating dtype of 2, 4 or 8 bytes
SMALLEST = 4

_num_emptied = 0  # calls of `to_empty` of sharded modules


def can_mark(tensor: torch.Tensor) -> bool:
    """Whether `mark` can mark a parameter or buffer."""
    local = _local(tensor)
    return not (is_wrapper(local) or local.is_meta or local.nbytes < SMALLEST) and (
        local.is_contiguous() or dense_strides(local.shape, local.stride()) == local.stride()
    )


def mark(tensor: torch.Tensor) -> None:
    """Mark a tensor's memory as not filled yet."""
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


def before_apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> Callable[[], None]:
    """Called before ``module._apply(fn)``. The returned function marks tensors without values afterwards: after
    `to_empty` all parameters and buffers of the module, after `to` those that have no values now. Sharded modules below
    handle their own."""
    global _num_emptied
    empties = makes_empty(fn)
    _num_emptied += empties
    if not _num_emptied:
        return lambda: None
    places = {place for place, tensor in _tensors(module, recurse) if empties or is_marked(tensor)}

    def mark_left() -> None:
        for place, tensor in _tensors(module, recurse):
            if place in places:
                mark(tensor)

    return mark_left


def _tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor]]:
    waiting = [module]
    while waiting:
        each = waiting.pop()
        for named in (each.named_parameters, each.named_buffers):
            for name, tensor in named(recurse=False):
                yield (each, name), tensor
        if recurse:
            waiting += [child for child in each.children() if unit_of(child) is None]


# --- the first forward -----------------------------------------------------------------------------------------------


def watch_root(step: Step) -> None:
    """Check the root's first forward, and the first one after each `to_empty` of any model."""
    num_seen = 0
    root: ref[Unit] = ref(step.units[0])

    def check(*_: Any) -> None:
        nonlocal num_seen
        unit = root()
        if num_seen != _num_emptied and unit is not None:
            with outside_transforms():
                check_filled(unit)
            num_seen = _num_emptied

    step.hooks.before_forward.append(check)


def check_filled(unit: Unit) -> None:
    """Check that all tensors in and below the unit's modules have values.

    Raises:
        OrderError: parameters or persistent buffers have no values. (Other buffers only cause a warning, because some
            modules recompute them in forward.)
    """
    garbage: dict[str, None] = {}
    scratch: dict[str, None] = {}
    below = {each: fqn for module in unit.modules for fqn, each in module.named_modules()}
    units = [one for each in below if (one := unit_of(each)) is not None]
    sharded: dict[torch.Tensor | None, torch.Tensor] = {
        param.unsharded: param.sharded for one in units for param in one.params
    }  # for units that the user has unsharded
    for each, prefix in below.items():
        for (_, name), tensor in _tensors(each, recurse=False):
            if is_marked(sharded.get(tensor, tensor)):
                found = scratch if name in non_persistent_buffers(each) else garbage
                found[f"{prefix}.{name}" if prefix else name] = None
    if garbage:
        raise OrderError(
            f"to_empty allocated {_some(garbage)}, and nothing has filled it since: training would start from garbage. "
            "fsdp2.init.materialize(model), instead of to_empty, does both. After to_empty, initialise all of the "
            "model (init_weights, reset_parameters) or load all of it before the first forward."
        )
    if scratch:
        warnings.warn(
            f"to_empty allocated {_some(scratch)}, and nothing has filled it since. No checkpoint has these "
            "buffers (persistent=False): unless forward writes them first, their module must compute them again after "
            "to_empty. fsdp2.init.materialize calls its reset_buffers().",
            stacklevel=2,
        )


def _some(names: dict[str, None]) -> str:
    return ", ".join(list(names)[:10]) + (f", ... ({len(names)} in all)" if len(names) > 10 else "")
