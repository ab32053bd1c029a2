"""What is to be saved or filled, by name: a model's tensors and a plain dict's. Layer: checkpoint.

Saving and loading look at a model the same way: an `Entry` is the part of a tensor that this rank has, and where in the
whole it belongs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, storage_key
from fsdp2.checkpoint.box import Box
from fsdp2.checkpoint.dtypes import name_of
from fsdp2.checkpoint.tiling import Grid, Tiling, replicated, tiling_of
from fsdp2.checkpoint.tree import encode
from fsdp2.errors import ArgumentError

__all__ = ["Entry", "State", "World", "clean_name", "entry_of", "model_state"]

# Segments of names that wrappers add: `torch.compile`, checkpoint_wrapper, FSDP1, DDP (the last only at the front).
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class World:
    """The ranks that save or load together.

    Attributes:
        rank: this one, counted within the group.
        ranks: their global ranks.
    """

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def grid(self, grid: Grid, name: str) -> Grid:
        """A mesh in ranks of this group."""
        if self.ranks == tuple(range(self.size)) and max(grid.ranks) < self.size:
            return grid
        positions = {rank: index for index, rank in enumerate(self.ranks)}
        try:
            return Grid(grid.shape, tuple(positions[rank] for rank in grid.ranks))
        except KeyError as error:
            raise ArgumentError(
                f"'{name}': its mesh has rank {error.args[0]}, which is not among the ranks {self.ranks} that save or "
                "load: pass a process_group with all ranks of the meshes"
            ) from error


@dataclass(frozen=True)
class Entry:
    """This rank's part of a tensor.

    Attributes:
        local: a plain tensor.
        tiling: how the whole is cut, in ranks of the `World`.
        box: which part `local` is.
        outside: the tensor as the user has it.
    """

    name: str
    local: torch.Tensor
    tiling: Tiling
    box: Box
    outside: torch.Tensor

    @property
    def dtype(self) -> str:
        """Its name in safetensors."""
        name = name_of(self.local.dtype)
        if name is None:
            raise ArgumentError(f"'{self.name}': safetensors has no dtype for {self.local.dtype}; convert the tensor")
        return name


@dataclass
class State:
    """Tensors by name, and what is no tensor.

    Attributes:
        keys: name -> key in the state dict, where wrappers may have added to it.
        aliases: names of tensors that have the memory of another -> the name under which it is stored.
        values: JSON by name.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def clean_name(name: str) -> str:
    """The name without the segments that wrappers add.

    >>> clean_name("module.layers.0._checkpoint_wrapped_module.weight")
    'module.layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def model_state(model: nn.Module | Mapping[str, Any], world: World) -> State:
    """The state of a model, or of a plain dict of tensors, DTensors and values.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold, or two names that differ only by wrappers' segments.
    """
    mapping = model.state_dict() if isinstance(model, nn.Module) else model
    tensors: dict[str, torch.Tensor] = {}
    state = State()
    for key, value in mapping.items():
        name = clean_name(key)
        if name in state.keys:
            raise ArgumentError(
                f"'{key}': another entry is called '{name}' too, once the names of wrappers are removed"
            )
        state.keys[name] = key
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            state.values[name] = encode(value, _no_tensors(name), f"'{name}'")
    ranks = _ranks_of(tensors, world)
    stored: dict[Any, str] = {}
    for name, tensor in tensors.items():
        entry = entry_of(name, tensor, world, ranks)
        first = stored.setdefault((storage_key(entry.local), entry.tiling), name)
        if first == name:
            state.entries[name] = entry
        else:
            state.aliases[name] = first
    return state


def entry_of(name: str, tensor: torch.Tensor, world: World, ranks: tuple[int, ...]) -> Entry:
    """The entry of a DTensor; or of a plain tensor, which `ranks` (in the world's numbers) all have."""
    if isinstance(tensor, DTensor):
        tiling = tiling_of(tensor, name)
        tiling = replace(tiling, grid=world.grid(tiling.grid, name))
        local = local_tensor(tensor)
    else:
        tiling, local = replicated(tensor.shape, ranks), tensor
    box = tiling.box_of(world.rank)
    if box is None:
        raise ArgumentError(f"'{name}': this rank is not in the tensor's mesh, so it has no part of it to save or load")
    return Entry(name, local.detach(), tiling, box, tensor)


def _ranks_of(tensors: Mapping[str, torch.Tensor], world: World) -> tuple[int, ...]:
    """The ranks that have this model: those of its DTensors' meshes (a pipeline stage's), or all without any."""
    meshes = {tensor.device_mesh: name for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if not meshes:
        return tuple(range(world.size))
    ranks: set[int] = set()
    for mesh, name in meshes.items():
        ranks.update(world.grid(Grid((mesh.size(),), tuple(mesh.mesh.flatten().tolist())), name).ranks)
    return tuple(sorted(ranks))


def _no_tensors(name: str) -> Any:
    def refuse(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        raise ArgumentError(
            f"'{name}': tensors inside of a value that is no tensor ('{path}') have no name; flatten it"
        )

    return refuse
