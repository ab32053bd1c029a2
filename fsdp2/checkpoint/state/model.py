"""The tensors of a model or a plain dict, by name, as they are saved or filled. Layer: checkpoint.

Saving and loading use the same view of a model. An `Entry` is this rank's part of a tensor and its place in the whole.
"""

import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2._torch.shared import storage_key
from fsdp2.checkpoint.io.memory import is_wrapper
from fsdp2.checkpoint.ranks.world import Entry, Place, World
from fsdp2.checkpoint.schema.tree import encode
from fsdp2.errors import ArgumentError
from fsdp2.placement.allocation import tensors_of
from fsdp2.placement.box import Box
from fsdp2.placement.hooks import registered
from fsdp2.placement.tiling import SPREAD_BYTES, grid_of, replicated

__all__ = [
    "State",
    "check_name",
    "checked",
    "clean_name",
    "entry_of",
    "model_state",
    "outside_autograd",
    "ranks_of",
    "unwrapped",
]

RESERVED = "__metadata__"  # the key of the metadata in a safetensors header
# Name segments that wrappers add: `torch.compile`, checkpoint_wrapper, FSDP1.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass
class State:
    """Tensors by name, and the values that are not tensors.

    Attributes:
        keys: name -> key in the state dict, which may contain wrappers' segments.
        aliases: names of tensors that share the memory of another -> the name under which that one is stored.
        values: JSON by name.
        computed: names of tensors that are neither parameters nor buffers: the module creates them for its state dict,
            and only the module can load them (`get_extra_state`, hooks).
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)


def unwrapped(model: Any) -> Any:
    """The module inside DDP or DataParallel, whose ``module.`` prefix is not part of the names."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def clean_name(name: str) -> str:
    """The name without the segments that wrappers add.

    >>> clean_name("module.layers.0._checkpoint_wrapped_module.weight")
    'module.layers.0.weight'
    """
    if "._" not in name and name[:1] != "_":
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def model_state(model: nn.Module | Mapping[str, Any], world: World) -> State:
    """The state of a model, or of a plain dict of tensors, DTensors and values.

    Raises:
        ArgumentError: a checkpoint cannot hold a value, or two names differ only in wrappers' segments.
    """
    mapping = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    tensors: dict[str, torch.Tensor] = {}
    state, held = State(), _memory_of(model)
    for key, value in mapping.items():
        name = clean_name(key)
        if name in state.keys:
            raise ArgumentError(
                f"'{key}': another entry is called '{name}' too, once the names of wrappers are removed"
            )
        state.keys[name] = key
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            if not held(value):
                state.computed.add(name)
        else:
            state.values[name] = encode(value, _no_tensor, f"'{name}'")
    ranks = ranks_of(tensors.values(), world)
    stored: dict[Any, str] = {}
    for name, tensor in tensors.items():
        for entry in _plain_entries(entry_of(name, tensor, world, ranks)):
            check_name(entry.name, state.entries, state.aliases)
            where = entry.tiling if isinstance(tensor, DTensor) else entry.tiling.grid.sorted_ranks
            first = stored.setdefault((storage_key(entry.local), where), entry.name)
            if first == entry.name:
                state.entries[entry.name] = entry
            else:
                state.aliases[entry.name] = first
            state.keys.setdefault(entry.name, state.keys[name])
    return state


def _memory_of(model: nn.Module | Mapping[str, Any]) -> Callable[[torch.Tensor], bool]:
    """A function that returns whether a tensor of a state dict shares memory with the model, so that filling it fills
    the model."""
    if not isinstance(model, nn.Module):
        return lambda tensor: True
    tensors = {tensor for _, tensor in tensors_of(model)}
    storages = {_storage(tensor) for tensor in tensors}
    return lambda tensor: tensor in tensors or _storage(tensor) in storages


def _storage(tensor: torch.Tensor) -> Any:
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local if is_wrapper(local) or local.layout is not torch.strided else storage_key(local)[0]


def entry_of(name: str, tensor: torch.Tensor, world: World, ranks: tuple[int, ...]) -> Entry:
    """The entry of a tensor of a model on `ranks` (counted within the world). A plain tensor is on all of them. A
    DTensor may be on some of them, and its siblings on the rest (see `with_siblings`)."""
    if isinstance(tensor, DTensor):
        place, local = world.place(tensor, name, ranks), registered.optimizers.settled(local_tensor(tensor))
    else:
        if tensor.is_nested and tensor.layout is torch.strided:
            raise ArgumentError(f"'{name}': a checkpoint holds dense tensors, got a nested one; save its parts")
        tiling, local = replicated(tensor.shape, _owner_first(name, tensor, ranks)), tensor
        place = Place(tiling, tiling.box_of(world.rank))
    if (
        place.box is None and isinstance(tensor, DTensor) and registered.optimizers.is_elsewhere(tensor)
    ):  # another rank has it (a 0-dim tensor has no empty part)
        nothing = Box((0,) * tensor.ndim, (0,) * tensor.ndim)
        return Entry(name, local.new_empty(nothing.shape), place.tiling, nothing, tensor)
    if place.box is None:
        raise ArgumentError(f"'{name}': this rank is not in the tensor's mesh, so it has no part of it to save or load")
    return Entry(name, outside_autograd(local), place.tiling, place.box, tensor, place.copy)


def outside_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached only if needed: `detach` takes as long as the rest of an entry."""
    return tensor.detach() if tensor.requires_grad else tensor


def _owner_first(name: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks, beginning with the one that stores the tensor. Plain tensors may differ between ranks, so one rank
    stores its value: the first rank for small tensors, a rank chosen by the name for large ones."""
    if tensor.numel() * tensor.element_size() < SPREAD_BYTES:
        return ranks
    first = zlib.crc32(name.encode(errors="backslashreplace")) % len(ranks)
    return ranks[first:] + ranks[:first]


def ranks_of(tensors: Iterable[torch.Tensor], world: World) -> tuple[int, ...]:
    """The ranks that have a model with these tensors: all ranks of its DTensors' meshes (a pipeline stage), or all
    ranks if it has no DTensors."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if not meshes:
        return tuple(range(world.size))
    return tuple(sorted({rank for mesh in meshes for rank in world.grid(grid_of(mesh), "model").ranks}))


def check_name(name: str, *taken: Container[str]) -> None:
    """Check that a tensor can be stored under a name that is not taken.

    Raises:
        ArgumentError: the name is taken, or files cannot hold it.
    """
    for names in taken:
        if name in names:
            raise ArgumentError(f"'{name}': two tensors would be stored under this name; rename one of them")
    if name == RESERVED or (not name.isascii() and any(0xD800 <= ord(char) < 0xE000 for char in name)):
        raise ArgumentError(f"{name!a}: safetensors cannot hold this name; rename the tensor")


def _no_tensor(path: str, tensor: torch.Tensor) -> dict[str, Any]:
    raise ArgumentError(
        f"model: a value has a tensor inside, at '{path}'; expected tensors by name. Flatten the dict, or save it in "
        "extra="
    )


def checked(entry: Entry) -> Entry:
    """The entry, if its local tensor is plain memory.

    Raises:
        ArgumentError: it is not. Only a model's own tensors may consist of other tensors (see `model_state`).
    """
    local = entry.local
    if is_wrapper(local) and not registered.optimizers.is_in_file(local):
        raise ArgumentError(
            f"'{entry.name}': a {type(local).__qualname__} within the state of an optimizer or another value, where a "
            "checkpoint holds plain tensors; keep it dequantized, or leave this state out"
        )
    if local.layout is not torch.strided or local.is_quantized:
        kind = "a quantized one" if local.is_quantized else f"one with layout {local.layout}"
        raise ArgumentError(f"'{entry.name}': a checkpoint holds dense tensors, got {kind}")
    return entry


def _plain_entries(entry: Entry) -> Iterator[Entry]:
    """The entry, if its local tensor is plain memory; otherwise the entries of the tensors that it consists of.

    Raises:
        ArgumentError: it is of a kind that cannot be stored (sparse, quantised, an unknown subclass).
    """
    local, tiling = entry.local, entry.tiling
    if not is_wrapper(local):
        yield checked(entry)
        return
    flatten: Any = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        raise ArgumentError(
            f"'{entry.name}': a {type(local).__qualname__} has no __tensor_flatten__, which names the plain tensors "
            "in it; add that, or save the result of to_dense(), dequantize() or similar"
        )
    for attribute in flatten()[0]:
        part, name = getattr(local, attribute), f"{entry.name}.{attribute}"
        by_rows = all(dim == 0 for _, dim in tiling.cuts) and part.shape[:1] == local.shape[:1]
        if tiling.cuts and not by_rows:
            raise ArgumentError(
                f"'{name}': of shape {tuple(part.shape)} within a {type(local).__qualname__} of {tuple(local.shape)} "
                f"that is cut along dims {sorted({dim for _, dim in tiling.cuts})}: the rows that it belongs to cannot "
                "be determined"
            )
        inner = replace(tiling, shape=(*tiling.shape[:1], *part.shape[1:]) if tiling.cuts else tuple(part.shape))
        box = Box((*entry.box.start[:1], *(0,) * (part.ndim - 1)), tuple(part.shape)) if part.ndim else Box((), ())
        yield from _plain_entries(Entry(name, part.detach(), inner, box, entry.outside, entry.copy))
