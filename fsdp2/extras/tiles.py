"""`tile`: a layer that is too large to be gathered whole is gathered, used and freed tile by tile. Layer: surface,
below `api`.

A tile is some rows of each rank's shard, as a unit of its own. So the layer's shard is those of its tiles, one after
the other in memory, and the layer keeps one parameter: for 2 ranks and 3 tiles, with the numbers of rows::

    rank 0   0  1  2  3  4  5        tile 0   0  1    6  7
    rank 1   6  7  8  9 10 11        tile 1   2  3    8  9
                                     tile 2   4  5   10 11

What the tiles compute is put together in the order of the rows. Nothing is copied at rest, and optimizers, state dicts
and checkpoints see the layer that they know.

Source: the idea is that of DeepSpeed's TiledLinear, ZeRO-Infinity, https://arxiv.org/abs/2104.07857.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear

from fsdp2._torch import parameter_slots
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.layout import ShardLayout, chunk_bounds
from fsdp2.module import swapped_class
from fsdp2.runtime.attach import attach, guard_state_dict, owners_of
from fsdp2.runtime.parameter import Part, Plan, part_of
from fsdp2.runtime.slot import Slot
from fsdp2.runtime.unit import Unit, unit_of

Layer = TypeVar("Layer", nn.Linear, nn.Embedding)

_KINDS: dict[Any, str] = {nn.Linear.forward: "Linear", nn.Embedding.forward: "Embedding"}
_CHANGED = ("max_norm", "scale_grad_by_freq", "sparse")  # options of an Embedding that look at all rows at once


def tile(layer: Layer, tiles: int) -> Layer:
    """Let `fully_shard` cut `layer` into tiles, each of which is a unit: gathered, used and freed one after the other,
    in forward and backward. At most two tiles are in memory, the one that computes and the next one. For a vocabulary,
    or another layer, that is too large for a device. Call it before `fully_shard` on the layer or on a module around
    it; it does nothing but note the number.

    The layer stays one module with its parameters, under their names and in their shapes: for optimizers, state dicts,
    checkpoints and initialisation nothing changes, and checkpoints load with any other number of tiles. Outputs and
    gradients of weights have the bits of the layer without tiles, as far as a matrix product computes a row of its
    result in the same way among fewer rows. Gradients of a Linear's inputs are added up over the tiles, the last tile
    first, and torch adds up those of a bias in an order that depends on the number of rows: both to the last bits.

    Args:
        layer: an nn.Linear ``[out, in]`` or nn.Embedding ``[num, dim]``, or of a class that has its forward. Its rows
            (``out``, ``num``) are cut.
        tiles: how many; each is the same part of each rank's rows, so there are not more than a rank has.

    Returns:
        `layer`, the same object.

    Raises:
        ArgumentError: another kind of layer, or a number of tiles below 1 or above the number of rows.
        MisuseError: the layer is tiled or sharded already.
        UnsupportedError: an Embedding with `max_norm`, `scale_grad_by_freq` or `sparse`. Later, by `fully_shard`: its
            weight is tied to another, is a DTensor or a tensor subclass, or is not sharded on dim 0.

    Example::

        fsdp2.tile(model.lm_head, 8)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    """
    if unit_of(layer) is not None or owners_of(layer) or is_tiled(layer):
        state = "tiled" if is_tiled(layer) else "sharded"
        raise MisuseError(f"tile: this {type(layer).__name__} is {state} already; call tile once, before fully_shard")
    kind = _KINDS.get(getattr(type(layer), "forward", None))
    if kind is None or parameter_slots(layer).get("weight") is None:
        name = type(layer).__name__
        raise ArgumentError(f"tile: expected an nn.Linear or nn.Embedding with a weight of its own, got {name}")
    rows = layer.weight.shape[0]
    if type(tiles) is not int or not 1 <= tiles <= rows:
        raise ArgumentError(f"tile: expected a number of tiles from 1 to the {rows} rows of the weight, got {tiles!r}")
    changed = [name for name in _CHANGED if getattr(layer, name, None)]
    if changed:
        raise UnsupportedError(f"tile: an Embedding with {', '.join(changed)} looks at all of its rows at once")
    cls: Any = type(layer)
    layer.__class__ = _tiled_class(cls, kind)
    layer.__dict__["num_tiles"] = tiles
    return layer


def is_tiled(module: nn.Module) -> bool:
    """Whether `tile` was called on this module."""
    return isinstance(module, _Tiled)


class _Tiled(nn.Module):
    """A layer in tiles. Without units, or while its parameters are whole, it computes as it did before.

    Attributes:
        num_tiles: how many the user wants.
        tiles: the modules of the tiles, once it is sharded.
    """

    num_tiles: int
    tiles: nn.ModuleList

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            whole: torch.Tensor = super().forward(inputs)
            return whole
        return self.join(inputs, (each(inputs) for each in self.tiles))

    @staticmethod
    def join(inputs: torch.Tensor, outputs: Iterable[Any]) -> torch.Tensor:
        raise NotImplementedError


class _TiledLinear(_Tiled):
    @staticmethod
    def join(inputs: torch.Tensor, outputs: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """From each tile the features of the ranks with whole shards ``[tokens, ranks, rows]``, and of the next rank
        ``[tokens, rows]``. Of three dims, since `torch.cat` takes some tensors of four for channels-last ones."""
        whole, rest = zip(*outputs, strict=True)
        features = torch.cat(whole, 2).flatten(1)
        if sum(each.shape[1] for each in rest):
            features = torch.cat([features, *rest], 1)
        return features.view(*inputs.shape[:-1], features.shape[1])


class _TiledEmbedding(_Tiled):
    @staticmethod
    def join(inputs: torch.Tensor, outputs: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """From each tile which of the indices it has, and what it has found for them."""
        (_, joined), *others = outputs
        for has, found in others:
            joined = torch.where(has, found, joined)
        return joined


@cache
def _tiled_class(original: Any, kind: str) -> Any:
    base = _TiledLinear if kind == "Linear" else _TiledEmbedding
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(f"Tiled{original.__name__}", (base, original), names)


class _Tile(nn.Module):
    """The rows from `start` on, `num_rows` of them, of the shard of each rank that has them. It holds its parameters
    only while they are gathered.

    Args:
        layout: of the layer's weight.
    """

    def __init__(self, layer: nn.Module, layout: ShardLayout, start: int, num_rows: int):
        super().__init__()
        self.start, self.num_rows = start, num_rows
        self.chunk = layout.chunk
        self.num_whole = layout.shape[0] // layout.chunk  # ranks with a whole shard
        self.shape = layout.shape
        for name in parameter_slots(layer):
            self.register_parameter(name, None)
        self.padding_idx: int | None = getattr(layer, "padding_idx", None)


class _LinearTile(_Tile):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[tokens, ranks, rows]`` of the ranks with whole shards, and ``[tokens, rows]`` of the next, maybe none."""
        features = linear(inputs, self.weight, self.bias)
        features = features.reshape(-1, features.shape[-1])
        size = self.num_whole * self.num_rows
        whole, rest = features.split([size, features.shape[1] - size], 1)
        return whole.unflatten(1, (self.num_whole, self.num_rows)), rest


class _EmbeddingTile(_Tile):
    weight: torch.Tensor

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[..., 1]``: which of the indices are in this tile; ``[..., dim]``: their rows, and any row for the others.
        An index that the layer does not have is an error here as well."""
        owner = indices.div(self.chunk, rounding_mode="floor")
        row = indices - owner * self.chunk - self.start
        is_valid = (indices >= 0) & (indices < self.shape[0])
        has = is_valid & (row >= 0) & (row < self.num_rows)
        place = torch.where(has, owner * self.num_rows + row, 0).where(is_valid, self.shape[0])
        return has.unsqueeze(-1), embedding(place, self.weight, self._padding())

    def _padding(self) -> int | None:
        if self.padding_idx is None:
            return None
        owner, row = divmod(self.padding_idx, self.chunk)
        is_here = self.start <= row < self.start + self.num_rows
        return owner * self.num_rows + row - self.start if is_here else None


# --- what fully_shard does with it ------------------------------------------------------------------------------------


def check_can_tile(layer: nn.Module, plans: dict[str, Plan], is_tied: Callable[[str], bool]) -> None:
    """Before a tiled layer is sharded by these plans of its parameters.

    Raises:
        UnsupportedError: its parameters cannot be cut into tiles.
    """
    for name, param in parameter_slots(layer).items():
        if param is None:
            continue
        plan, why = plans.get(name), ""
        if is_tied(name):
            why = "is tied to another module's, which would gather it whole: give them a weight each, or do not tile"
        elif plan is None:
            why = "is in ignored_params: ignore all parameters of the layer, or none"
        elif isinstance(param, DTensor) or type(param.data) is not torch.Tensor:
            why = f"is a {type(param.data).__name__}: only plain tensors can be cut"
        elif plan.dim != 0 or plan.roles.sharded_replicas:
            why = "is not sharded in rows of dim 0: leave out shard_placement_fn, and shard_replicas"
        elif not param.is_contiguous():
            why = f"is not contiguous, stride {param.stride()}: call .contiguous() on it"
        elif plan.roles != next(iter(plans.values())).roles:
            why = "is on another mesh than the other parameters of the layer"
        if why:
            raise UnsupportedError(f"fully_shard: '{name}' of this tiled {type(layer).__name__} {why}.")


def make_tiles(layer: Any, unit: Unit) -> None:
    """Give `layer`, which `unit` manages, its tiles, and each tile a unit of its own with the settings of `unit`."""
    groups = unit.groups
    layout = next(param for group in groups for param in group.params if param.slots[0].name == "weight").layout
    bounds = chunk_bounds(layout.chunk, layer.num_tiles)
    spans = [(start, stop - start) for start, stop in pairwise(bounds) if start < stop]
    kind = _LinearTile if isinstance(layer, _TiledLinear) else _EmbeddingTile
    policy = replace(unit.policy, output_dtype=None)  # the outputs of the layer are cast
    modules, units = nn.ModuleList(), []
    for index, (start, num_rows) in enumerate(spans):
        module = kind(layer, layout, start, num_rows)
        modules.append(module)
        lists = []
        for group in groups:
            parts = [(Part(param, index, len(spans), start), param.slots[0].name) for param in group.params]
            lists.append(
                [part_of(part, num_rows, f"tiles.{index}.{name}", [Slot(module, name)]) for part, name in parts]
            )
        units.append(Unit([module], lists, unit.device, policy, unit.settings))
        for group, whole in zip(units[-1].groups, groups, strict=True):
            group.smaller, group.keep = whole.smaller, whole.keep
        module.__class__ = swapped_class(kind)
        attach(module, units[-1])
        guard_state_dict(module, units[-1])
    for group_index, group in enumerate(groups):
        group.take_parts([each.groups[group_index] for each in units])
    for each, following in pairwise(units):
        each.forward_prefetch = [ref(following)]
    layer.tiles = modules
