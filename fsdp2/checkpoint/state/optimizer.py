"""The state of optimizers by FQN, as it is saved. Layer: checkpoint.

State is never keyed by a parameter's index: with another world size, pipeline split or order of param groups it would
go to the wrong parameter. A state tensor is stored as ``<path>.<fqn>`` (``exp_avg.layers.0.weight``). The rest is JSON,
in which a single optimizer has the name ""::

    {"kinds": {"": "AdamW"},
     "states": {fqn: {"step": {"$tensor": "step", "as": "plain"}, "exp_avg": {"$tensor": "exp_avg", "as": "param"}}},
     "groups": [{"optimizer": "", "params": [fqn, ...], "options": {"lr": 0.001, ...}}]}

All state of an optimizer must be in `state` and `param_groups`. One with its own `state_dict` or `load_state_dict`, or
with hooks on these, is rejected.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from fsdp2._torch import local_tensor
from fsdp2._torch.checkpoint import state_hooks
from fsdp2._torch.shared import shard_dim, split_factor
from fsdp2.checkpoint.ranks.world import Entry, World
from fsdp2.checkpoint.schema.dtypes import name_of
from fsdp2.checkpoint.schema.tree import encode
from fsdp2.checkpoint.state.model import (
    State,
    check_name,
    checked,
    clean_name,
    entry_of,
    outside_autograd,
    ranks_of,
)
from fsdp2.errors import ArgumentError
from fsdp2.placement.hooks import COUNTERS, registered

__all__ = [
    "ALONE",
    "NO_OPTIONS",
    "Optimizers",
    "check_plain",
    "kinds_of",
    "named_optimizers",
    "named_params",
    "optimizers_state",
    "state_entry",
]

# An optimizer, several of them, by name or not; or a plain dict of tensors.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, Any]

ALONE = ""  # the name of a single optimizer
NO_OPTIONS = frozenset({"params", "param_names"})
BASE = torch.optim.Optimizer


def named_optimizers(given: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name. In a list the name is the index. Empty for a plain dict of tensors.

    Raises:
        ArgumentError: `given` is neither.
    """
    if isinstance(given, torch.optim.Optimizer):
        return {ALONE: given}
    if isinstance(given, Mapping):
        if not any(isinstance(value, torch.optim.Optimizer) for value in given.values()):
            return {}
        named = dict(given)
    elif isinstance(given, (list, tuple)):
        named = {str(index): each for index, each in enumerate(given)}
    else:
        named = {} if given is None else {"": given}
    for name, each in named.items():
        if not isinstance(name, str) or not isinstance(each, torch.optim.Optimizer) or not name:
            raise ArgumentError(
                f"optimizer= expects an optimizer, a list or a dict of such, or a dict of tensors; got {each!r:.80} "
                f"under the name {name!r}"
            )
    return named


def kinds_of(optimizer: BASE) -> list[str]:
    """The name of the optimizer's class, then those of its base classes up to the first one of torch."""
    if (kind := registered.optimizers.kind_of(optimizer)) is not None:
        return [kind]
    classes = [*registered.optimizers.classes_of(optimizer)]
    of_torch = [cls.__module__.startswith("torch.optim.") for cls in classes]
    return [cls.__name__ for cls in classes[: [*of_torch, True].index(True) + 1]]


def check_plain(optimizer: BASE) -> None:
    """`ArgumentError` if the optimizer's `state_dict` or `load_state_dict` do more than torch's: what they add belongs
    to no parameter. (Those of fsdp2 only keep dtypes and devices, as a checkpoint does.)"""
    kind = type(optimizer)
    pairs = [(kind.state_dict, BASE.state_dict), (kind.load_state_dict, BASE.load_state_dict)]
    own = [each for each, base in pairs if each is not base and not each.__module__.startswith("fsdp2.")]
    if own or state_hooks(optimizer):
        raise ArgumentError(
            f"optimizer: {kind.__qualname__} has a state_dict or load_state_dict of its own, or hooks on them; "
            "expected an optimizer whose whole state is in `state` and `param_groups`. Pass the optimizer that it "
            "wraps, and the rest in extra="
        )


def named_params(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The FQN of each parameter that the optimizer holds, in its order.

    Raises:
        ArgumentError: no module is given to name them, or a parameter does not belong to it.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"optimizer: its state is stored by parameter names, for which the module is needed too; got "
            f"model={type(model).__name__}. Pass the module, or a plain dict instead of the optimizer."
        )
    names: dict[torch.Tensor, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, clean_name(name))
    result = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if param not in names:
                raise ArgumentError(
                    f"optimizer: parameter {index} of group {number}, of shape {tuple(param.shape)}, is not a "
                    "parameter of the model. Create the optimizer after fully_shard, or call "
                    "fsdp2.adopt_optimizer(optimizer)."
                )
            result[param] = names[param]
    return result


def optimizers_state(model: nn.Module | None, optimizers: Mapping[str, torch.optim.Optimizer], world: World) -> State:
    """The whole state of all optimizers.

    Raises:
        ArgumentError: see `named_params`; two optimizers hold the same parameter; or state cannot be stored, such as a
            plain tensor that differs between ranks and whose place in the whole is unknown.
    """
    state = State()
    owners: dict[str, str] = {}
    table: dict[str, Any] = {"kinds": {}, "states": {}, "groups": []}
    for owner, optimizer in optimizers.items():
        names = named_params(model, optimizer)
        assert model is not None
        ranks = ranks_of(model.parameters(), world)
        check_plain(optimizer)
        _check_states(optimizer.state, names)
        for param, fqn in names.items():
            if owners.setdefault(fqn, owner) != owner:
                raise ArgumentError(f"optimizer: '{fqn}' is a parameter of '{owners[fqn]}' and of '{owner}'")
            if param in optimizer.state:
                leaf = _noting(param, fqn, state, world, ranks)
                table["states"][fqn] = encode(dict(optimizer.state[param]), leaf, f"optimizer state of '{fqn}'")
        table["kinds"][owner] = kinds_of(optimizer)[0]
        for group in optimizer.param_groups:
            own = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            encoded = encode(own, _scalar, "optimizer options")
            params = [names[param] for param in group["params"]]
            table["groups"].append({"optimizer": owner, "params": params, "options": encoded})
    state.values = table
    return state


def _check_states(states: Mapping[Any, Any], names: Mapping[torch.Tensor, str]) -> None:
    """`ArgumentError` for state that belongs to no parameter."""
    rest = [key for key, value in states.items() if key not in names and (not isinstance(value, dict) or value)]
    if rest:
        shown = ", ".join(f"{tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key) for key in rest[:5])
        raise ArgumentError(
            f"optimizer: it has state for {shown}, which is not a parameter of its groups, so there is no name to "
            "store it under. Keep it in the options of a group, or save it as extra=."
        )


def _noting(
    param: torch.Tensor, fqn: str, state: State, world: World, ranks: tuple[int, ...]
) -> Callable[[str, torch.Tensor], dict[str, Any]]:
    """A function that adds a tensor of a parameter's state to the entries, and returns the note to recreate it from."""
    like = entry_of(fqn, param, world, ranks)

    def leaf(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        name = f"{path}.{fqn}"
        check_name(name, state.entries)
        entry, form = state_entry(name, tensor, like, world, ranks)
        state.entries[name] = checked(entry)
        return {"as": form}

    return leaf


def state_entry(
    name: str, tensor: torch.Tensor, like: Entry, world: World, ranks: tuple[int, ...]
) -> tuple[Entry, Any]:
    """(entry, form) of a tensor in the state of the parameter whose entry is `like`.

    The form is "param" for a tensor distributed like the parameter, "local" for this rank's part of such a tensor, kept
    as a plain tensor, "plain" for a plain tensor that all ranks have, otherwise the placements of a DTensor on the
    parameter's mesh."""
    param = like.outside
    if isinstance(tensor, DTensor):
        entry = entry_of(name, tensor, world, ranks)
        if tensor.shape == param.shape and entry.tiling == like.tiling:
            return entry, "param"
        return entry, [_placement_name(placement) for placement in tensor.placements]
    if not isinstance(param, DTensor):
        of_param = tensor.shape == param.shape and (tensor.ndim > 0 or name.partition(".")[0] not in COUNTERS)
        return entry_of(name, tensor, world, ranks), "param" if of_param else "plain"
    if tensor.ndim and tensor.shape == local_tensor(param).shape:
        # The optimizer works on local tensors, and keeps them in its state.
        return Entry(name, outside_autograd(tensor), like.tiling, like.box, tensor), "local"
    if not tensor.ndim or len(like.tiling.grid.ranks) == 1:
        return entry_of(name, tensor, world, like.tiling.grid.sorted_ranks), "plain"
    raise ArgumentError(
        f"optimizer state '{name}': a plain tensor of shape {tuple(tensor.shape)} for a sharded parameter of shape "
        f"{tuple(param.shape)}: its place in the whole tensor cannot be determined. Keep it as a DTensor, or as a "
        f"Python number."
    )


def _placement_name(placement: Placement) -> str:
    return "R" if split_factor(placement) is None else f"S{shard_dim(placement)}"


def _scalar(path: str, tensor: torch.Tensor) -> dict[str, Any]:
    """The note of an option that is a tensor."""
    if tensor.ndim:
        raise ArgumentError(
            f"optimizer: option '{path}' is a tensor of shape {tuple(tensor.shape)}; expected a scalar. Keep what "
            "belongs to a parameter in its state, `optimizer.state[param]`."
        )
    return {"value": encode(tensor.item(), _scalar, path), "dtype": name_of(tensor.dtype)}
