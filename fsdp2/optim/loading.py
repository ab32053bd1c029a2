"""`load_state_dict` for optimizers whose state has dtypes of its own. Layer: optim.

torch casts what it loads to the dtype of the parameter, which would change codes of 8 bits, and fp32 preconditioners of
bf16 parameters.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["load_with_dtypes"]

StateDict = dict[str, Any]


def load_with_dtypes(
    optimizer: torch.optim.Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    keeps: Callable[[int], bool] = lambda index: True,
) -> None:
    """Load `state_dict`, and copy its tensors as they are into the state of the groups that want it so.

    Args:
        load: torch's `load_state_dict` of this optimizer.
        keeps: whether the param group with this index wants it.
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


def _copied(value: Any, loaded: Any) -> Any:
    """`value`, with its tensors copied to where those of `loaded` are."""
    if isinstance(value, torch.Tensor):
        return value.to(loaded.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(each, loaded[key]) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value, loaded))
    return loaded
