"""Private names of torch for `fsdp2.optim`. Ground layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh


def mesh_of_one(device_type: str, rank: int) -> DeviceMesh:
    """The mesh of one rank, also for use on other ranks. It is never communicated on, and only the private argument
    keeps its constructor from creating a process group together with all other ranks."""
    with torch.device("cpu"):
        return DeviceMesh(device_type, [rank], _init_backend=False)


# Operations on a tensor subclass go directly to its `__torch_dispatch__`, and results are not wrapped.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def wrapper_like(kind: Any, tensor: torch.Tensor, device: torch.device | None = None) -> Any:
    """`Tensor._make_wrapper_subclass`: a tensor of class `kind` with the properties of `tensor` (on `device`, if
    given), but without memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        tensor.size(),
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        layout=tensor.layout,
        device=device or tensor.device,
    )


def written_arguments(op: Any) -> tuple[frozenset[int], frozenset[str]]:
    """The arguments, by position and by name, that an `OpOverload` writes to; only `_schema` knows."""
    written = [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(position for position, _ in written), frozenset(name for _, name in written)


def is_view(op: Any) -> bool:
    """Whether an `OpOverload` returns views of its arguments' memory, and writes nothing."""
    aliases = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def accept_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Let ``GradScaler.step(optimizer)`` call `step` even without gradients; otherwise it fails with an assertion about
    inf checks. Returns whether this changed anything."""
    changes = not vars(optimizer).get("_step_supports_amp_scaling", False)
    optimizer.__dict__["_step_supports_amp_scaling"] = True
    return changes


def forget_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Undo `accept_scaler`."""
    optimizer.__dict__.pop("_step_supports_amp_scaling", None)


def take_from_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an enabled `GradScaler` is calling `step`: for this call it sets attributes of the optimizer, which are
    removed here."""
    optimizer.__dict__.pop("grad_scale", None)
    return optimizer.__dict__.pop("found_inf", None) is not None


def foreach_multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """`torch._foreach_mul_` with a 0-dim tensor: the value stays on the device."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def foreach_norm(tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """`torch._foreach_norm`, computed in `dtype` (None: in their own)."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype)) if tensors else []
