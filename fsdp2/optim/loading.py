"""Corrects what torch's `load_state_dict` does to dtypes and whole tensors. Layer: optim.

torch casts loaded tensors to the dtype of the parameter, which would round fp32 preconditioners of bf16 parameters. It
also accepts whole tensors, such as the state of one process, for sharded parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2.placement.tiling import own_box

__all__ = ["load_with_dtypes", "own_part"]

StateDict = dict[str, Any]


def load_with_dtypes(
    optimizer: torch.optim.Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    keeps: Callable[[int], bool],
) -> None:
    """Load `state_dict`, keeping the dtypes of tensors for some param groups.

    Args:
        load: torch's `load_state_dict` of this optimizer.
        keeps: whether the param group with this index keeps dtypes.
    """
    given = [state_dict]
    # The user's own hooks, which run before this one, may replace the state dict.
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, replaced: given.append(replaced))
    try:
        load(state_dict)
    finally:
        handle.remove()
    saved = given[-1]
    for index, (before, group) in enumerate(zip(saved["param_groups"], optimizer.param_groups, strict=True)):
        for key, param in zip(before["params"], group["params"], strict=True) if keeps(index) else ():
            if key in saved["state"]:
                optimizer.state[param] = _copied(saved["state"][key], optimizer.state[param])


def own_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of `whole`, a plain tensor with the global shape of `like`, distributed like `like`."""
    local = local_tensor(like)
    part = torch.empty_like(local, dtype=whole.dtype)
    return part.copy_(whole[own_box(like).slices()]) if part.numel() else part


def _copied(value: Any, loaded: Any) -> Any:
    """`value`, with its tensors copied to the devices of those of `loaded`."""
    if isinstance(value, torch.Tensor):
        return value.to(loaded.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(each, loaded[key]) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value, loaded))
    return loaded
