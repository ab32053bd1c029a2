"""The state of an optimizer by FQN: how it is saved and restored. Layer: checkpoint.

State is never keyed by a parameter's index: with another world size, pipeline split or order of the param groups, it
would go to the wrong parameter. A tensor of the state is stored as ``<path>.<fqn>`` (``exp_avg.layers.0.weight``); the
rest is JSON::

    {"kind": "AdamW",
     "forms": [{"step": {"$tensor": "step", "as": "plain"}, "exp_avg": {"$tensor": "exp_avg", "as": "param"}}],
     "states": {fqn: number of its form},
     "groups": [{"params": [fqn, ...], "options": {"lr": 0.001, ...}}],
     "added": {"counter": 5}}                     what a `state_dict` of the optimizer's own has besides, if any
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2._torch import local_tensor, make_dtensor, make_spec, spec_of
from fsdp2._torch.shared import shard_dim, split_factor
from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.ranks.world import Entry, World
from fsdp2.checkpoint.schema.dtypes import DTYPES, name_of
from fsdp2.checkpoint.schema.tree import Leaf, at_path, canonical, decode, encode
from fsdp2.checkpoint.state.contents import Contents, contents_of, load_by_itself, loads_by_itself
from fsdp2.checkpoint.state.model import State, check_name, checked, clean_name, entry_of, outside_autograd, ranks_of
from fsdp2.checkpoint.state.optimizer_kinds import kinds_of, unsure, why_unfit
from fsdp2.errors import ArgumentError, CorruptError, MismatchError
from fsdp2.layout import strides
from fsdp2.placement.hooks import COUNTERS, registered
from fsdp2.placement.tiling import tiling_from

__all__ = ["OptimizerTarget", "check_table", "optimizer_state"]

NO_OPTIONS = frozenset({"params", "param_names"})
KEEP_IN_STATE = "Keep what belongs to a parameter in its state, `optimizer.state[param]`."

# The stored tensors, by name.
Stored = Mapping[str, StoredTensorInfo]


def named_params(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The FQN of each parameter that the optimizer holds, in its order.

    Raises:
        ArgumentError: there is no module to name them, or a parameter does not belong to it.
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
                    "parameter of the model. Make the optimizer after fully_shard, or call "
                    "fsdp2.adopt_optimizer(optimizer)."
                )
            result[param] = names[param]
    return result


def optimizer_state(model: nn.Module | None, optimizer: torch.optim.Optimizer, world: World) -> State:
    """The whole state of an optimizer.

    Raises:
        ArgumentError: see `named_params`; or the state cannot be stored, such as a plain tensor that differs between
            ranks and whose place in the whole is unknown.
    """
    names = named_params(model, optimizer)
    assert model is not None
    ranks = ranks_of(model.parameters(), world)
    state = State()
    forms: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    states: dict[str, int] = {}
    held = contents_of(optimizer)
    for param, fqn in names.items():
        if param not in held.states:
            continue
        form = encode(dict(held.states[param]), _noting(param, fqn, state, world, ranks), f"optimizer state of '{fqn}'")
        text = canonical(form)
        forms.setdefault(text, form)
        states[fqn] = numbers.setdefault(text, len(numbers))
    other: dict[Any, Any] = dict(held.states)
    empty: tuple[Any, ...] = (None, {}, [], ())
    rest = [
        key
        for key, value in other.items()
        if key not in names and (isinstance(value, torch.Tensor) or not any(value == nothing for nothing in empty))
    ]
    if rest:
        shown = ", ".join(f"{tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key) for key in rest[:5])
        raise ArgumentError(
            f"optimizer: it has state for {shown}, which is no parameter of its groups, so it has no name to be stored "
            "under. Keep it in the options of a group, or save it as extra=."
        )
    state.values = {
        "kind": kinds_of(optimizer)[0],
        "forms": list(forms.values()),
        "states": states,
        "groups": [
            _group({**options, "params": group["params"]}, names)
            for options, group in zip(held.groups, optimizer.param_groups, strict=True)
        ],
    }
    if held.added:
        state.values["added"] = _added(optimizer, held.added)
    return state


def check_table(table: Mapping[str, Any]) -> None:
    """Check the structure of a table from `optimizer_state`. Its content is checked when it is decoded.

    Raises:
        CorruptError: the structure is wrong.
    """
    forms, states, groups = table.get("forms"), table.get("states"), table.get("groups")
    in_order = (
        isinstance(forms, list)
        and isinstance(states, dict)
        and all(type(index) is int and 0 <= index < len(forms) for index in states.values())
        and isinstance(groups, list)
        and all(
            isinstance(group, dict)
            and isinstance(group.get("options"), dict)
            and isinstance(group.get("params"), list)
            and all(type(fqn) is str for fqn in group["params"])
            for group in groups
        )
    )
    added = [table.get("added", {}), table.get("added_by", {})]
    added += added[1].values() if isinstance(added[1], dict) else []
    if not in_order or not all(isinstance(each, dict) for each in added):
        raise CorruptError("the optimizer's part of the manifest is malformed: it lists no forms, states and groups")


def _noting(
    param: torch.Tensor, fqn: str, state: State, world: World, ranks: tuple[int, ...]
) -> Callable[[str, torch.Tensor], dict[str, Any]]:
    """A function that adds a tensor of a parameter's state to the entries, and returns how to create it again."""
    like = entry_of(fqn, param, world, ranks)

    def leaf(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        name = f"{path}.{fqn}"
        check_name(name, state.entries)
        entry, form = _entry(name, tensor, like, world, ranks)
        state.entries[name] = checked(entry)
        return {"as": form}

    return leaf


def _entry(name: str, tensor: torch.Tensor, like: Entry, world: World, ranks: tuple[int, ...]) -> tuple[Entry, Any]:
    """(entry, form) of a tensor in the state of the parameter whose entry is `like`.

    The form is "param" for a tensor distributed like the parameter, "local" for this rank's part of such a tensor, kept
    as a plain tensor, "plain" for a plain tensor that all ranks have, otherwise the placements of a DTensor on the
    parameter's mesh."""
    param = like.outside
    if isinstance(tensor, DTensor):
        if isinstance(param, DTensor) and _is_cut_alike(tensor, param, world):  # by far the most frequent case
            local = outside_autograd(local_tensor(tensor))
            return Entry(name, local, like.tiling, like.box, tensor, like.copy), "param"
        entry = entry_of(name, tensor, world, ranks)
        if tensor.shape == param.shape and entry.tiling == like.tiling:
            return entry, "param"
        return entry, [_placement_name(placement) for placement in tensor.placements]
    if not isinstance(param, DTensor):
        of_param = tensor.shape == param.shape and (tensor.ndim > 0 or name.partition(".")[0] not in COUNTERS)
        return entry_of(name, tensor, world, ranks), "param" if of_param else "plain"
    if tensor.ndim and tensor.shape == local_tensor(param).shape:
        # This optimizer works on local tensors and stores them in its state.
        return Entry(name, outside_autograd(tensor), like.tiling, like.box, tensor), "local"
    if not tensor.ndim or len(like.tiling.grid.ranks) == 1:
        return entry_of(name, tensor, world, like.tiling.grid.sorted_ranks), "plain"
    raise ArgumentError(
        f"optimizer state '{name}': a plain tensor of shape {tuple(tensor.shape)} beside a sharded parameter of shape "
        f"{tuple(param.shape)}: its place in the whole tensor cannot be determined. Keep it as a DTensor, or as a "
        f"Python number."
    )


def _is_cut_alike(tensor: DTensor, param: DTensor, world: World) -> bool:
    own, of_param = spec_of(tensor), spec_of(param)
    return (
        world.first_equal(own.mesh) is world.first_equal(of_param.mesh)
        and own.placements == of_param.placements
        and own.shape == of_param.shape
        and local_tensor(tensor).shape == local_tensor(param).shape
    )


def _placement_name(placement: Placement) -> str:
    return "R" if split_factor(placement) is None else f"S{shard_dim(placement)}"


def _placement_named(kind: str, ndim: int, of_param: Placement) -> Placement:
    """A placement by its name; on the parameter's dim, the parameter's: other axes may cut that too."""
    if not kind[1:].isdecimal() or int(kind[1:]) >= ndim:
        return Replicate()
    dim = int(kind[1:])
    return of_param if split_factor(of_param) is not None and shard_dim(of_param) == dim else Shard(dim)


def _group(group: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
    return {
        "params": [names[param] for param in group["params"]],
        "options": encode(options, _noting_scalars("option"), "optimizer options"),
    }


def _added(optimizer: torch.optim.Optimizer, added: Mapping[str, Any]) -> Any:
    """What an optimizer's own state dict adds, as JSON. What may belong to parameters has no place here."""
    where = f"state_dict() of {type(optimizer).__qualname__}"
    form = encode(dict(added), _noting_scalars(where), where)
    if "'$dict'" in canonical(form):
        raise ArgumentError(
            f"optimizer: {where} has, besides 'state' and 'param_groups', a dict whose keys are no texts, perhaps "
            f"numbers of parameters: {', '.join(map(repr, added))}. Such numbers change with the model. {KEEP_IN_STATE}"
        )
    return form


def _noting_scalars(what: str) -> Leaf:
    """A function for tensors that are numbers: options, and what an optimizer's own state dict adds."""

    def scalar(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.ndim:
            raise ArgumentError(
                f"optimizer: {what} '{path}' is a tensor of shape {tuple(tensor.shape)}; expected a scalar. "
                f"{KEEP_IN_STATE}"
            )
        return {"value": encode(tensor.item(), scalar, path), "dtype": name_of(tensor.dtype)}

    return scalar


@dataclass
class OptimizerTarget:
    """An optimizer to be filled. `prepare` determines which tensors are needed, the caller fills them, and `finish`
    gives them to the optimizer, which is unchanged until then.

    Attributes:
        ranks: the ranks that have the model.
        cast: new state has the dtype of its parameter, as after torch's `load_state_dict`.
        missing: descriptions of what is here but not stored.
        unexpected: descriptions of what is stored but not here.
        unfit: why the state does not fit this kind of optimizer; "" if it does.
    """

    optimizer: torch.optim.Optimizer
    names: dict[torch.Tensor, str]
    world: World
    ranks: tuple[int, ...]
    cast: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: str = ""
    _states: dict[torch.Tensor, Any] = field(default_factory=dict)
    _options: list[dict[str, Any]] = field(default_factory=list)
    _fresh: list[torch.Tensor] = field(default_factory=list)
    _added: dict[str, Any] = field(default_factory=dict)

    def prepare(self, tables: Sequence[Mapping[str, Any]], stored: Stored) -> None:
        """Determine everything that will be filled.

        Args:
            tables: the values from `optimizer_state`, of each kind of rank (pipeline stages differ).

        Raises:
            MismatchError: parameters of one group had different options.
            CorruptError: a table does not have the structure that `optimizer_state` creates.
        """
        for table in tables:
            check_table(table)
        forms = {fqn: table["forms"][index] for table in tables for fqn, index in table["states"].items()}
        saved = [[(group["params"], group["options"]) for group in table["groups"]] for table in tables]
        options = {fqn: chosen for groups in saved for params, chosen in groups for fqn in params}
        known = set(self.names.values())
        self.missing = [f"optimizer state of '{fqn}'" for fqn in sorted(known - options.keys())]
        self.unexpected = [f"optimizer state of '{fqn}'" for fqn in sorted(options.keys() - known)]
        self._fresh = [param for param, fqn in self.names.items() if fqn in options and fqn not in forms]
        for param, fqn in self.names.items():
            if fqn in forms:
                what = f"optimizer state of '{fqn}'"
                self._states[param] = decode(forms[fqn], self._making(param, fqn, stored, options.get(fqn)), what)
                if not isinstance(self._states[param], dict):
                    raise CorruptError(f"{what} is not a dict")
        kinds = {str(table.get("kind") or "") for table in tables} - {""}
        pairs = [(self._held.states.get(param) or (), state) for param, state in self._states.items()]
        self.unfit = why_unfit(self.optimizer, kinds, pairs, [chosen for groups in saved for _, chosen in groups])
        if not self.unfit and (doubt := unsure(self.optimizer, kinds, pairs)):
            warnings.warn(doubt, stacklevel=5)
        self._options = [self._options_of(group, options) for group in self.optimizer.param_groups]
        self._ask_empty_groups(saved, known)
        self._ask_added([table["added"] for table in tables if table.get("added")])

    def _options_of(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        found = [
            (self.names[param], options[self.names[param]]) for param in group["params"] if self.names[param] in options
        ]
        for fqn, other in found[1:]:
            if other is found[0][1]:  # same group when saved
                continue
            if canonical(dict(sorted(other.items()))) != canonical(dict(sorted(found[0][1].items()))):
                raise MismatchError(
                    f"optimizer: '{found[0][0]}' and '{fqn}' are in one param group here and were saved with different "
                    f"options ({found[0][1]} and {other}). Make the param groups as they were."
                )
        return dict(found[0][1]) if found else {}

    def _ask_empty_groups(self, saved: Sequence[Sequence[tuple[list[str], dict[str, Any]]]], known: set[str]) -> None:
        """Find the options of groups without parameters (all frozen, or all on other pipeline stages). They cannot be
        found by name: in order, they are the saved groups that have no parameter here.

        Args:
            saved: for each table, (parameters, options) of its groups.
            known: the parameters that are here.
        """
        empty = [index for index, group in enumerate(self.optimizer.param_groups) if not group["params"]]
        rest = [[options for params, options in groups if not known.intersection(params)] for groups in saved]
        fitting = {canonical(found): found for found in rest if len(found) == len(empty)}
        if len(fitting) == 1:
            for index, options in zip(empty, *fitting.values(), strict=True):
                self._options[index] = options
        elif empty and any(not params for groups in saved for params, _ in groups):
            self.missing += [
                f"options of param group {index}, which has no parameters and so cannot be matched to a saved one"
                for index in empty
            ]

    def _ask_added(self, stored: Sequence[Mapping[str, Any]]) -> None:
        """Decide about what a state dict of the optimizer's own has added, on each kind of rank."""
        name = type(self.optimizer).__qualname__
        for form in stored:
            if canonical(form) != canonical(stored[0]):
                raise MismatchError(f"optimizer: {form} and {stored[0]} were added to its state by different ranks")
        added = decode(stored[0], _scalar, "state_dict() of the optimizer") if stored else {}
        if loads_by_itself(self.optimizer):
            self._added = added
        else:
            self.unexpected += [f"optimizer '{key}', for which {name} has no place" for key in added]
        self.missing += [f"optimizer '{key}' of {name}" for key in self._held.added if key not in added]

    def _making(
        self, param: torch.Tensor, fqn: str, stored: Stored, options: Mapping[str, Any] | None
    ) -> Callable[[dict[str, Any]], Any]:
        """A function that returns the tensor for a note: the existing one, or a new one.

        Args:
            options: the stored options of the parameter, which the optimizer will get.
        """
        like = entry_of(fqn, param, self.world, self.ranks)

        def make(note: dict[str, Any]) -> Any:
            path = str(note["$tensor"])
            name = f"{path}.{fqn}"
            if "value" in note:  # another library stored a number where torch has a 0-dim tensor
                return _scalar(note)
            info = stored.get(name)
            if info is None:
                raise CorruptError(f"the manifest names '{name}' but does not describe it")
            tensor = at_path(self._held.states.get(param, {}), path)
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                tensor = self._new(path, fqn, param, note.get("as"), info)
            if name.startswith("step.") and not tensor.ndim and self._steps_on_device(param, options or {}):
                tensor = tensor.to(param.device)
            entry, _ = _entry(name, tensor, like, self.world, self.ranks)
            self.entries[name] = checked(entry)
            return tensor

        return make

    def _new(self, path: str, fqn: str, param: torch.Tensor, form: Any, info: StoredTensorInfo) -> torch.Tensor:
        """A new tensor to be filled, of the form that it had when it was saved, or of that of a matrix's owner."""
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
    def _held(self) -> Contents:
        """What the optimizer holds now."""
        return contents_of(self.optimizer)

    @cached_property
    def _in_host_memory(self) -> set[torch.Tensor]:
        """The parameters whose state the device may have no room for."""
        return registered.optimizers.in_host_memory(self.optimizer)

    def _steps_on_device(self, param: torch.Tensor, options: Mapping[str, Any]) -> bool:
        """Whether the optimizer will keep step counters on the parameter's device, as torch's do with `capturable` or
        `fused`. Stored options take precedence over the current ones."""
        group = self._groups.get(param, {})
        return any(bool(options.get(key, group.get(key))) for key in ("capturable", "fused"))

    @cached_property
    def _groups(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """The param group of each parameter."""
        return {param: group for group in self.optimizer.param_groups for param in group["params"]}

    def finish(self) -> None:
        """Give the optimizer its state and options. A parameter that had no state when saved has none afterwards."""
        chosen = [decode(options, _scalar, "optimizer options") for options in self._options]
        for key in (key for options in chosen for key in options if key in NO_OPTIONS):
            raise CorruptError(f"optimizer options: '{key}' is not an option")
        if loads_by_itself(self.optimizer):
            kept = {param: state for param, state in self._held.states.items() if param not in self._fresh}
            load_by_itself(self.optimizer, kept | self._states, chosen, self._added)
            return
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


def _scalar(note: dict[str, Any]) -> torch.Tensor:
    try:
        return torch.tensor(decode(note["value"], _scalar, "optimizer options"), dtype=DTYPES[note["dtype"]])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptError(f"optimizer options: not a scalar: {str(note)[:80]}") from error
