"""The state of optimizers by FQN, as it is loaded; see `optimizer.py`. Layer: checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2._torch.shared import shard_dim, split_factor
from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.ranks.world import Entry, World
from fsdp2.checkpoint.schema.dtypes import DTYPES
from fsdp2.checkpoint.schema.tree import at_path, decode
from fsdp2.checkpoint.state.model import checked, entry_of
from fsdp2.checkpoint.state.optimizer import ALONE, NO_OPTIONS, check_plain, kinds_of, state_entry
from fsdp2.errors import CorruptError, MismatchError
from fsdp2.layout import strides
from fsdp2.placement.hooks import COUNTERS, registered
from fsdp2.placement.tiling import tiling_from

__all__ = ["OptimizerTarget", "tables_of"]

# The stored tensors, by name.
Stored = Mapping[str, StoredTensorInfo]


def tables_of(name: str, tables: Sequence[Mapping[str, Any]], params: set[str]) -> list[Mapping[str, Any]]:
    """The parts of the stored tables that belong to one optimizer.

    Args:
        name: the optimizer's name; "" for a single one, to which everything belongs.
        params: FQNs of its parameters; they select its part of a table that a single optimizer saved.
    """
    found: list[Mapping[str, Any]] = []
    for table in tables:
        groups, kinds = table["groups"], table["kinds"]
        if name != ALONE and ALONE in kinds:  # several optimizers may have parts of one saved group
            groups = [{**group, "params": [fqn for fqn in group["params"] if fqn in params]} for group in groups]
            groups = [group for group in groups if group["params"]]
        elif name != ALONE:
            groups = [group for group in groups if group["optimizer"] == name]
            kinds = {name: kinds[name]} if name in kinds else {}
        own = {fqn for group in groups for fqn in group["params"]}
        states = {fqn: form for fqn, form in table["states"].items() if fqn in own or name == ALONE}
        found.append({"kinds": kinds, "states": states, "groups": groups})
    return found


@dataclass
class OptimizerTarget:
    """An optimizer to be filled. `prepare` determines which tensors are needed, the caller fills them, and `finish`
    puts them into the optimizer, which is unchanged until then.

    Attributes:
        ranks: the ranks that have the model.
        cast: new state has the dtype of its parameter, as after torch's `load_state_dict`.
        missing: descriptions of state that is needed here but not stored.
        unfit: why the state does not fit this class of optimizer; "" if it does, or if the saved class is unknown.
    """

    optimizer: torch.optim.Optimizer
    names: dict[torch.Tensor, str]
    world: World
    ranks: tuple[int, ...]
    cast: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unfit: str = ""
    _states: dict[torch.Tensor, Any] = field(default_factory=dict)
    _options: list[dict[str, Any]] = field(default_factory=list)
    _fresh: list[torch.Tensor] = field(default_factory=list)

    def prepare(self, tables: Sequence[Mapping[str, Any]], stored: Stored) -> None:
        """Determine everything that will be filled.

        Args:
            tables: the values from `optimizers_state`, for each kind of rank (pipeline stages differ).

        Raises:
            MismatchError: parameters of one group had different options.
            ArgumentError: see `check_plain`.
        """
        check_plain(self.optimizer)
        forms = {fqn: form for table in tables for fqn, form in table["states"].items()}
        options = {fqn: group["options"] for table in tables for group in table["groups"] for fqn in group["params"]}
        known = set(self.names.values())
        self.missing = [f"optimizer state of '{fqn}'" for fqn in sorted(known - options.keys())]
        self._fresh = [param for param, fqn in self.names.items() if fqn in options and fqn not in forms]
        groups = {param: group for group in self.optimizer.param_groups for param in group["params"]}
        for param, fqn in self.names.items():
            if fqn in forms:
                what = f"optimizer state of '{fqn}'"
                making = self._making(param, fqn, stored, {**groups[param], **options.get(fqn, {})})
                self._states[param] = decode(forms[fqn], making, what)
                if not isinstance(self._states[param], dict):
                    raise CorruptError(f"{what} is not a dict")
        kinds = {kind for table in tables for kind in table["kinds"].values()}
        own = kinds_of(self.optimizer)
        if not kinds <= {*own}:
            what = f"optimizer state of {', '.join(sorted(kinds))}, and this is {own[0]}"
            self.unfit = f"{what}. Leave optimizer= out to begin with a fresh state."
        now = self.optimizer.param_groups
        matching = [table["groups"] for table in tables if len(table["groups"]) == len(now)]
        self._options = [
            # A group without parameters (not unfrozen yet) can only be found by its index.
            self._options_of(group, options) if group["params"] or not matching else dict(matching[0][index]["options"])
            for index, group in enumerate(now)
        ]

    def _options_of(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        found = [
            (self.names[param], options[self.names[param]]) for param in group["params"] if self.names[param] in options
        ]
        for fqn, other in found[1:]:
            if other is found[0][1]:  # same group when saved
                continue
            # Compared as text, because 1 == 1.0 == True and -0.0 == 0.0.
            if repr(sorted(other.items())) != repr(sorted(found[0][1].items())):
                raise MismatchError(
                    f"optimizer: '{found[0][0]}' and '{fqn}' are in one param group here and were saved with different "
                    f"options ({found[0][1]} and {other}). Use the param groups that were saved."
                )
        return dict(found[0][1]) if found else {}

    def _making(
        self, param: torch.Tensor, fqn: str, stored: Stored, options: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], Any]:
        """A function that returns the tensor for a note: the existing one, or a new one.

        Args:
            options: the options that the optimizer will have for the parameter. With `capturable` or `fused`, torch's
                optimizers keep step counters on the parameter's device.
        """
        like = entry_of(fqn, param, self.world, self.ranks)
        on_device = options.get("capturable") or options.get("fused")

        def make(note: dict[str, Any]) -> Any:
            path = str(note["$tensor"])
            name = f"{path}.{fqn}"
            info = stored.get(name)
            if info is None:
                raise CorruptError(f"the manifest names '{name}' but does not describe it")
            tensor = at_path(self.optimizer.state.get(param, {}), path)
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                tensor = self._new(path, fqn, param, note.get("as"), info)
            if name.startswith("step.") and not tensor.ndim and on_device:
                tensor = tensor.to(param.device)
            entry, _ = state_entry(name, tensor, like, self.world, self.ranks)
            self.entries[name] = checked(entry)
            return tensor

        return make

    def _new(self, path: str, fqn: str, param: torch.Tensor, form: Any, info: StoredTensorInfo) -> torch.Tensor:
        """A new tensor to be filled: in the form in which it was saved, or in that of a matrix optimizer's owner."""
        dtype, shape, name = DTYPES[info.dtype], info.shape, f"{path}.{fqn}"
        if self.cast and self._is_cast(path, param, shape) and dtype.is_floating_point and param.is_floating_point():
            dtype = param.dtype
        if (owned := registered.optimizers.new_state(self.optimizer, param, path, shape, dtype)) is not None:
            return owned
        home = torch.device("cpu") if param in self._in_host_memory else None
        if form == "local":
            local = local_tensor(param) if isinstance(param, DTensor) else param
            return torch.empty_like(local, dtype=dtype, device=home)
        if form == "param" and tuple(param.shape) != shape:
            raise MismatchError(
                f"optimizer state '{name}': stored with shape {list(shape)}, the parameter has {list(param.shape)}"
            )
        if not isinstance(param, DTensor) or not shape:
            if form == "param":
                return torch.empty_like(param, dtype=dtype)
            return torch.empty(shape, dtype=dtype, device="cpu" if name.startswith("step.") else param.device)
        if form == "param":
            local = torch.empty_like(local_tensor(param), dtype=dtype, device=home)
            spec = make_spec(param.device_mesh, param.placements, param.shape, param.stride(), dtype)
            return make_dtensor(local, spec)
        mesh = param.device_mesh
        names = form if isinstance(form, list) and len(form) == mesh.ndim else ["R"] * mesh.ndim
        pairs = zip(names, param.placements, strict=True)
        placements = [_placement_named(str(kind), len(shape), of_param) for kind, of_param in pairs]
        spec = make_spec(mesh, placements, shape, strides(shape), dtype)
        box = tiling_from(mesh, placements, shape, name).box_at(mesh.get_coordinate() or ())
        return make_dtensor(torch.empty(box.shape, dtype=dtype, device=param.device), spec)

    def _is_cast(self, path: str, param: torch.Tensor, shape: tuple[int, ...]) -> bool:
        """Whether a new tensor gets the parameter's dtype; not counters, and not the factors of a matrix."""
        if registered.optimizers.works_on_matrices(self.optimizer):
            return shape == param.shape
        return bool(shape) if param.ndim else path not in COUNTERS

    @cached_property
    def _in_host_memory(self) -> set[torch.Tensor]:
        """The parameters whose state belongs in host memory, because the device may have no room for it."""
        return registered.optimizers.in_host_memory(self.optimizer)

    def finish(self) -> None:
        """Put state and options into the optimizer. A parameter that was saved without state has none afterwards."""
        chosen = [decode(options, _scalar, "optimizer options") for options in self._options]
        for key in (key for options in chosen for key in options if key in NO_OPTIONS):
            raise CorruptError(f"optimizer options: '{key}' is not an option")
        for param in self._fresh:
            self.optimizer.state.pop(param, None)
        for param, state in self._states.items():
            self.optimizer.state[param] = state
        for group, options in zip(self.optimizer.param_groups, chosen, strict=True):
            for key, value in options.items():
                now = group.get(key)
                if isinstance(now, torch.Tensor):
                    now.fill_(value)
                else:
                    group[key] = value


def _placement_named(kind: str, ndim: int, of_param: Placement) -> Placement:
    """A placement by its name. For the parameter's own dim it is the parameter's placement, because other axes may
    split that dim too."""
    if not kind[1:].isdecimal() or int(kind[1:]) >= ndim:
        return Replicate()
    dim = int(kind[1:])
    return of_param if split_factor(of_param) is not None and shard_dim(of_param) == dim else Shard(dim)


def _scalar(note: dict[str, Any]) -> torch.Tensor:
    try:
        return torch.tensor(decode(note["value"], _scalar, "optimizer options"), dtype=DTYPES[note["dtype"]])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptError(f"optimizer options: not a scalar: {str(note)[:80]}") from error
