"""The small shards of a group in one block of memory, in the order in which a reduction writes their gradients. Layer:
runtime, below the param group.

A group says with `FlatShard` which of its shards are such a block, so that an all-gather copies them as one tensor.
Nothing depends on it: a shard that somebody has replaced or moved is none of them any more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from fsdp2._torch import local_tensor, make_parameter, set_local_tensor
from fsdp2.adjacent import can_carve, carve, place_of
from fsdp2.layout import Lane
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.extension import is_wrapper
from fsdp2.runtime.parameter import ManagedParameter

# The largest shard that is moved. For a larger one a separate call is negligible next to the arithmetic, and the copy
# is noticeable: `fully_shard` of a billion parameters took half as long again.
MOST_BYTES = 1 << 20


def in_memory_order(params: Sequence[ManagedParameter], channel: Channel) -> list[ManagedParameter]:
    """The parameters of a group, in the same order on all ranks: packed before direct ones, as in the reduction's
    output, and matrices before vectors, since weight decay often differs between them."""

    def place(param: ManagedParameter) -> tuple[bool, bool]:
        lane = channel.comm.scatter_lane(param.layout, param.reduce_dtype.itemsize)
        return lane is not Lane.PACKED, len(param.sharded.shape) < 2

    return sorted(params, key=place)


def lay_together(params: Sequence[ManagedParameter]) -> bool:
    """Move shards into one block of memory per dtype and device, one after the other with their padding, unless they
    are placed so. Returns whether any moved. Only for shards that nothing but the parameters refers to yet: other
    holders of a local tensor would keep a stale copy."""
    kinds = _kinds([param for param in params if can_carve(param.flat)], lambda param: param.flat.device)
    moving = [members for members in kinds if not _are_together(members)]
    with torch.inference_mode(False), torch.no_grad():
        for members in moving:
            for param, piece in zip(members, _pieces(members, members[0].flat.device), strict=True):
                piece.copy_(param.flat)
                param.flat = piece
                set_local_tensor(param.sharded, param.geometry.local_view(piece), param.plan.specs.sharded(param.dtype))
    return bool(moving)


class Places:
    """Memory for shards that are on the meta device: one block per dtype and device of a group, allocated at the first
    request for one of its parameters, so that nothing has to move afterwards. `groups`: of each the parameters that
    will be requested."""

    def __init__(self, groups: Iterable[Sequence[ManagedParameter]]):
        self._kinds = {
            param: members
            for params in groups
            for members in _kinds(params, lambda each: each.plan.home)
            for param in members
        }
        self._pieces: dict[ManagedParameter, torch.Tensor] = {}

    def parameter_for(self, param: ManagedParameter) -> nn.Parameter | None:
        """A zero sharded parameter, with zero padding, to replace that of `param`; None if `param` is in no block."""
        if param not in self._kinds:
            return None
        if param not in self._pieces:
            members = self._kinds[param]
            self._pieces.update(zip(members, _pieces(members, param.plan.home), strict=True))
        local = param.geometry.local_view(self._pieces.pop(param))
        new = make_parameter(local, param.plan.specs.sharded(param.dtype), param.sharded.requires_grad)
        new.__dict__.update(param.sharded.__dict__)
        return new


def _kinds(
    params: Iterable[ManagedParameter], device_of: Callable[[ManagedParameter], torch.device]
) -> list[list[ManagedParameter]]:
    """The parameters that should be neighbours, grouped by dtype, device, and whether they rest in a file."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[ManagedParameter]] = {}
    for param in params:
        if _should_have_neighbours(param):
            kinds.setdefault((param.dtype, device_of(param), param.plan.in_files), []).append(param)
    return list(kinds.values())


def _should_have_neighbours(param: ManagedParameter) -> bool:
    """Whether the shard is small and a plain tensor. False if it is used in place, where alignment matters, or pinned,
    because copies from pinned memory are tracked per allocation; or another parameter's. In files all shards of a group
    are neighbours, so that there are few files."""
    if param.at_rest is None or is_wrapper(local_tensor(param.sharded)) or param.aliases or param.plan.pins:
        return False
    return param.flat.nbytes > 0 and (param.plan.in_files or param.flat.nbytes <= MOST_BYTES)


def _pieces(members: Sequence[ManagedParameter], device: torch.device) -> list[torch.Tensor]:
    """Zeroed memory for each shard, contiguous if possible."""
    sizes, dtype = [param.flat.numel() for param in members], members[0].dtype
    with torch.inference_mode(False), torch.no_grad():
        zeros = members[0].plan.zeros
        if can_carve(torch.empty(0, device=device)):
            return carve(zeros(sum(sizes), dtype, device), sizes)
        return [zeros(size, dtype, device) for size in sizes]


def _are_together(members: Sequence[ManagedParameter]) -> bool:
    places = [(place_of(param.flat), param.flat.numel()) for param in members]
    return all(
        one is not None and other is not None and one[0] is other[0] and one[1] + numel == other[1]
        for (one, numel), (other, _) in pairwise(places)
    )


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Shards of a group that stand end to end, as one tensor.

    Attributes:
        tensor: 1-D, over all of them with their padding.
        starts: by the index of a parameter in the group, in memory order: the first element of its shard.
    """

    tensor: torch.Tensor
    starts: dict[int, int]
    _pieces: list[torch.Tensor]
    _addresses: list[int]

    def is_current(self) -> bool:
        """Whether no shard was given other memory (through `.data` or `share_memory_`)."""
        return list(map(torch.Tensor.data_ptr, self._pieces)) == self._addresses


def flat_shards(params: Sequence[ManagedParameter]) -> list[FlatShard]:
    """The blocks in which at least two shards of `params` stand now."""
    blocks: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []  # each with first elements and indices
    for index, param in enumerate(params):
        if (place := place_of(param.flat)) is not None:
            whole, start = place
            members = next((members for known, members in blocks if known is whole), None)
            if members is None:
                blocks.append((whole, members := []))
            members.append((start, index))
    found = []
    for whole, members in blocks:
        members.sort()
        ends = [start + params[index].flat.numel() for start, index in members]
        breaks = [at for at in range(1, len(members)) if ends[at - 1] != members[at][0]]
        for first, after in pairwise([0, *breaks, len(members)]):
            if after - first > 1:
                begin, run = members[first][0], members[first:after]
                pieces = [params[index].flat for _, index in run]
                starts = {index: start - begin for start, index in run}
                found.append(
                    FlatShard(whole[begin : ends[after - 1]], starts, pieces, [each.data_ptr() for each in pieces])
                )
    return found
