"""`tile`: a layer that is too large to be gathered whole is gathered, used and freed tile by tile. Layer: extras.

A tile consists of some rows of each rank's shard, and is a unit of its own. The shards of the tiles lie one after the
other in the layer's shard, and the layer keeps one parameter. For 2 ranks and 3 tiles, with the numbers of rows::

    rank 0   0  1  2  3  4  5        tile 0   0  1    6  7
    rank 1   6  7  8  9 10 11        tile 1   2  3    8  9
                                     tile 2   4  5   10 11

The outputs of the tiles are put together in the order of the rows. Shards are not copied, and optimizers, state dicts
and checkpoints see the ordinary layer.

Source: the idea is that of DeepSpeed's TiledLinear, ZeRO-Infinity, https://arxiv.org/abs/2104.07857.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear

from fsdp2._torch import (
    backward_hooks_of,
    backward_is_running,
    foreach_add,
    local_tensor,
    outside_transforms,
    parameter_slots,
)
from fsdp2.api import Draft
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.events import profiler_range
from fsdp2.extras.copying import follow_settings
from fsdp2.layout import ShardLayout, strides
from fsdp2.module import swapped_class
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.forward import attach
from fsdp2.runtime.geometry import Geometry
from fsdp2.runtime.gradients import Gradients
from fsdp2.runtime.parameter import ManagedParameter, Plan
from fsdp2.runtime.reduction import Reduction, ReductionPlan
from fsdp2.runtime.sink import Sink, distributed
from fsdp2.runtime.slot import Slot
from fsdp2.runtime.state_dict import guard_state_dict, owner_of, owners_of
from fsdp2.runtime.unit import Unit, unit_for, unit_of
from fsdp2.specs import ParamSpecs

Layer = TypeVar("Layer", nn.Linear, nn.Embedding)

_KINDS: dict[Any, str] = {nn.Linear.forward: "Linear", nn.Embedding.forward: "Embedding"}
_CHANGED = ("max_norm", "scale_grad_by_freq", "sparse")  # options of an Embedding that look at all rows at once


def tile(layer: Layer, tiles: int) -> Layer:
    """Let `fully_shard` split `layer` into tiles, each of which is a unit. They are gathered, used and freed one after
    the other, in forward and backward, with at most two tiles in memory: the one that computes and the next one. For a
    vocabulary, or another layer, that is too large for a device. Call it before `fully_shard` on the layer or on a
    module around it; it only records the number.

    The layer stays one module with the same parameters, names and shapes. Optimizers, state dicts, checkpoints and
    initialisation work as without tiles, and checkpoints load with any number of tiles. Outputs and gradients of
    weights are bitwise those of the layer without tiles, if a matrix product computes a row in the same way among fewer
    rows. Gradients of a Linear's inputs and of its bias may differ in the last bits: the former are summed over the
    tiles, the last tile first, and the order in which torch sums the latter depends on the number of rows.

    Args:
        layer: an nn.Linear ``[out, in]`` or nn.Embedding ``[num, dim]``, or a class with the same forward. Its rows
            (``out``, ``num``) are split.
        tiles: how many. Each is the same part of each rank's rows, so there are at most as many as a rank has rows.

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
    """A layer in tiles. Without units, or in `full_params`, it computes as the original layer.

    Attributes:
        num_tiles: the requested number of tiles.
        tiles: the modules of the tiles, once it is sharded.
    """

    num_tiles: int
    tiles: "_Tiles"

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
        """Join the outputs of `_LinearTile.forward`. They have three dims, since `torch.cat` takes some tensors of four
        dims for channels-last ones."""
        whole, rest = zip(*outputs, strict=True)
        features = torch.cat(whole, 2).flatten(1)
        if sum(each.shape[1] for each in rest):
            features = torch.cat([features, *rest], 1)
        return features.view(*inputs.shape[:-1], features.shape[1])


class _TiledEmbedding(_Tiled):
    @staticmethod
    def join(inputs: torch.Tensor, outputs: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Join the outputs of `_EmbeddingTile.forward`."""
        (_, joined), *others = outputs
        for has, found in others:
            joined = torch.where(has, found, joined)
        return joined


class _Tiles(nn.ModuleList):
    """The modules of the tiles."""

    def __deepcopy__(self, _: object) -> "_Tiles":
        """An empty list: the copy of the layer gets its own tiles (`make_tiles`)."""
        return _Tiles()


@cache
def _tiled_class(original: Any, kind: str) -> Any:
    base = _TiledLinear if kind == "Linear" else _TiledEmbedding
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(f"Tiled{original.__name__}", (base, original), names)


class _Tile(nn.Module):
    """`num_rows` rows, from `start` on, of the shard of each rank that has them. It holds its parameters only while
    they are gathered.

    Attributes:
        following: the next tile, if any.

    Args:
        layout: the layout of the layer's weight.
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
        self.following: ref[nn.Module] | None = None


class _LinearTile(_Tile):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features ``[tokens, ranks, rows]`` of the ranks with whole shards, and ``[tokens, rows]`` (rows may be 0) of
        the next rank."""
        features = linear(inputs, self.weight, self.bias)
        features = features.reshape(-1, features.shape[-1])
        size = self.num_whole * self.num_rows
        whole, rest = features.split([size, features.shape[1] - size], 1)
        return whole.unflatten(1, (self.num_whole, self.num_rows)), rest


class _EmbeddingTile(_Tile):
    weight: torch.Tensor

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[..., 1]``: which of the indices are in this tile; ``[..., dim]``: their rows, and any row for the others.
        Raises for an index that the layer does not have."""
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


# --- parameters and groups --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Whole:
    """A parameter of a layer in tiles.

    Attributes:
        num_tiles: how many tiles it has.
        arrived: the indices of the tiles that have added their gradient to its gradient in this backward.
    """

    param: ManagedParameter
    num_tiles: int
    arrived: set[int] = field(default_factory=set)


class _TileParameter(ManagedParameter):
    """The rows of a tile. Its sharded parameter is the layer's, and its slot is empty while it is sharded.

    Attributes:
        index: the tile's index.
        start: the first of its rows in the layer's shard.
    """

    def __init__(self, whole: _Whole, index: int, start: int, num_rows: int, slot: Slot):
        param = whole.param
        self.__dict__.update(param.__dict__)  # everything not set below is the layer's
        self.slots, self.fqn = [slot], f"tiles.{index}.{slot.name}"
        shape = part_of(param.layout, start, num_rows).shape
        specs = ParamSpecs(param.plan.specs.mesh, param.plan.specs.placements, shape, strides(shape))
        self.plan = replace(param.plan, specs=specs)
        self.geometry = Geometry(torch.empty(shape, device="meta"), 0, param.roles)
        self.of, self.index, self.start = whole, index, start
        self.refresh()

    @property
    def at_rest(self) -> None:
        """None: the slot is empty."""

    def refresh(self) -> bool:
        """Find the tile's shard in the layer's. Returns whether it has changed."""
        whole, start = self.of.param, self.start * self.layout.row_numel
        before, self.flat = self.flat, whole.flat[start : start + self.layout.padded_numel]
        is_same = before.untyped_storage() is self.flat.untyped_storage() and whole.sharded is self.sharded
        self.sharded = whole.sharded
        return not is_same


class _TileSink(Sink):
    """Adds the gradients of tiles to rows of the layer's gradient."""

    def deliver(self, grads: Iterable[torch.Tensor]) -> list[ManagedParameter]:
        """Returns the layer's parameters that are complete: those whose last tile has arrived."""
        complete, rows, news = [], [], list(grads)
        for tile, grad in zip(cast(Sequence[_TileParameter], self.params), news, strict=True):
            rows.append(_rows_for(tile, grad))
            whole = tile.of
            whole.arrived.add(tile.index)
            if len(whole.arrived) == whole.num_tiles:
                whole.arrived.clear()
                complete.append(whole.param)
        foreach_add(rows, news)
        return complete


class _TilePlan(ReductionPlan):
    sink_type = _TileSink


def _rows_for(tile: _TileParameter, local: torch.Tensor) -> torch.Tensor:
    """The tile's rows in the layer's gradient, which is created as zeros if needed."""
    whole = tile.of.param
    if backward_hooks_of(whole.sharded):
        raise UnsupportedError(
            f"'{tile.fqn}' is of a tiled layer, so its gradient arrives in parts, and register_hook never sees "
            "a whole one. Use register_post_accumulate_grad_hook."
        )
    if (grad := whole.sharded.grad) is None:
        zeros = whole.geometry.local_view(local.new_zeros(whole.geometry.local_numel))
        grad = whole.sharded.grad = distributed(zeros, whole.plan.specs.sharded(local.dtype), whole.sharded.device)
    return local_tensor(grad).narrow(0, tile.start, local.shape[0]) if local.numel() else local


class _LayerGroup(Bucket):
    """Replaces `group`, for the parameters of a tiled layer, which are never gathered whole.

    Attributes:
        tiles: the groups of the tiles' units.
    """

    def __init__(self, group: Bucket):
        super().__init__(group.params, _nothing, _nothing)
        self.smaller, self.keep, self.channel = group.smaller, group.keep, group.channel
        self.gradients: _NoGradients = _NoGradients(self.params, self.channel, _nothing, _nothing)
        self.tiles: list[Bucket] = []

    def unshard(self, *_: object) -> None:
        """Does nothing: the tiles' units gather."""

    def refresh(self) -> bool:
        """Adopt parameters that were moved, converted or replaced, in the tiles as well."""
        changed = super().refresh()
        for tile in self.tiles:
            if tile.phase is Phase.SHARDED:
                tile.refresh()
        return changed


class _NoGradients(Gradients):
    wholes: Sequence[_Whole] = ()

    def drop(self) -> None:
        """Forget which tiles have added their gradients."""
        super().drop()
        for whole in self.wholes:
            whole.arrived.clear()

    def take(self, *_: object) -> list[Reduction]:
        """Takes none: the tiles' units reduce them."""
        return []


def _nothing() -> None:
    """No gradient of a tiled layer arrives whole."""


def part_of(layout: ShardLayout, start: int, num_rows: int) -> ShardLayout:
    """The layout of `num_rows` rows, from `start` on, of each chunk of dim 0, joined in the order of the chunks. They
    are split in the same way as the whole, since at most ``parts - 1`` rows are missing in all.

    >>> layout = ShardLayout((7,), 0, 2)
    >>> [layout.local_size(rank) for rank in range(2)]
    [4, 3]
    >>> part = part_of(layout, 2, 2)  # of the rows 0 1 2 3 | 4 5 6: 2 3 | 6
    >>> part.shape, [part.local_size(rank) for rank in range(2)]
    ((3,), [2, 1])
    """
    assert layout.dim == 0 and start + num_rows <= layout.chunk
    whole, rest = divmod(layout.shape[0], layout.chunk)
    size = whole * num_rows + min(max(rest - start, 0), num_rows)
    return ShardLayout((size, *layout.shape[1:]), 0, layout.parts)


# --- called by fully_shard --------------------------------------------------------------------------------------------


def check_tiled(drafts: Sequence[Draft]) -> None:
    """Before `fully_shard` makes these units.

    Raises:
        UnsupportedError: a layer cannot be split into tiles, or a weight is tied to that of a tiled layer.
    """
    for draft in drafts:
        for fqn, _, param in draft.tied:
            if isinstance(owner_of(param)[1], _LayerGroup):
                raise UnsupportedError(
                    f"fully_shard: '{fqn}' is tied to '{param.fqn}' of a tiled layer, and would be gathered "
                    "whole. Give them a weight each, or do not tile."
                )
        if is_tiled(draft.modules[0]) and draft.places:
            others = {id(param) for other in drafts if other is not draft for param in other.places}
            tied = {fqn for fqn, _, _ in draft.tied}
            tied |= {fqn for param, (fqn, _) in draft.places.items() if id(param) in others}
            _check_layer(draft.modules[0], {draft.places[param][0]: plan for param, plan in draft.planned}, tied)


def _check_layer(layer: nn.Module, plans: dict[str, Plan], tied: set[str]) -> None:
    for name, param in parameter_slots(layer).items():
        if param is None:
            continue
        plan, why = plans.get(name), ""
        if name in tied:
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


def make_tiles(unit: Unit) -> None:
    """If `unit` was made for a tiled layer, make its tiles, and for each tile a unit with the settings of `unit`."""
    layer = next(iter(unit.modules), None)
    if not isinstance(layer, _Tiled) or not unit.groups:
        return
    groups = [_LayerGroup(group) for group in unit.groups]
    unit.groups = [*groups]
    layout = next(param for group in groups for param in group.params if param.slots[0].name == "weight").layout
    bounds = ShardLayout((layout.chunk,), 0, layer.num_tiles).bounds
    spans = [(start, stop - start) for start, stop in pairwise(bounds) if start < stop]
    wholes = [[_Whole(param, len(spans)) for param in group.params] for group in groups]
    for group, of_group in zip(groups, wholes, strict=True):
        group.gradients.wholes = of_group
    kind = _LinearTile if isinstance(layer, _TiledLinear) else _EmbeddingTile
    policy = replace(unit.policy, output_dtype=None)  # only the layer's outputs are cast
    features = {name: value for name, value in unit.settings.features.items() if name != "manual_finalization"}
    settings = replace(unit.settings, features=features)  # without that of the root, which no tile is
    modules = [kind(layer, layout, start, num_rows) for start, num_rows in spans]
    for index, (module, (start, num_rows)) in enumerate(zip(modules, spans, strict=True)):
        lists = [
            [_TileParameter(each, index, start, num_rows, Slot(module, each.param.slots[0].name)) for each in whole]
            for whole in wholes
        ]
        tile_unit = Unit([module], lists, unit.device, policy, settings)
        for group, of_tile in zip(groups, tile_unit.groups, strict=True):
            follow_settings(of_tile, group)
            of_tile.changing = group.changing
            of_tile.gradients.make_plan = _TilePlan
            group.tiles.append(of_tile)
        unit.followers.append(tile_unit)
        module.__class__ = swapped_class(kind)
        attach(module, tile_unit)
        guard_state_dict(module, tile_unit)
        module.register_forward_pre_hook(_prefetch_next)
    for one, following in pairwise(modules):
        one.following = ref(following)
    layer.tiles = _Tiles(modules)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prefetch_next(module: Any, _: object) -> None:
    """Gather the next tile while this one computes. Not in a recomputation: the previous tile is still gathered."""
    if module.following is not None and not backward_is_running():
        unit = unit_for(module.following())
        with profiler_range("FSDP::forward_prefetch for", unit.fqn), outside_transforms():
            unit.unshard(prefetching=True)


hooks.needs_own_unit.append(is_tiled)
hooks.units_drafted.append(check_tiled)
hooks.unit_made.append(make_tiles)
