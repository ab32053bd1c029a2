"""The small shards of a group in one block of memory, in the order in which a reduction writes their gradients. Layer:
extras.

This is only an optimisation: gathers copy them, and optimizers step them (`optim/flats.py`), in one call. A shard that
is replaced or moved leaves the block.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from fsdp2._torch import base_of, local_tensor, set_local_tensor
from fsdp2.layout import Lane
from fsdp2.placement.carving import carve, end_to_end, place_of
from fsdp2.runtime import hooks
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.parameter import ManagedParameter

# The largest shard that is moved. For a larger one a separate call costs little compared with the arithmetic, and the
# copy is noticeable: `fully_shard` of a billion parameters took half as long again.
MOST_BYTES = 1 << 20


def can_carve(tensor: torch.Tensor) -> bool:
    """Whether parts of `tensor` can be separate storages on its memory (through DLPack). Only on the CPU: code that
    records streams or shares handles with other processes expects whole allocations."""
    return type(tensor) is torch.Tensor and tensor.untyped_storage().device.type == "cpu"


def in_memory_order(params: list[ManagedParameter], channel: Channel) -> None:
    """Sort them in the order in which a reduction writes their gradients (packed before direct ones), and matrices
    before vectors, since weight decay often differs between them."""

    def place(param: ManagedParameter) -> tuple[bool, bool]:
        lane = channel.comm.scatter_lane(param.layout, param.reduce_dtype.itemsize)
        return lane is not Lane.PACKED, len(param.sharded.shape) < 2

    params.sort(key=place)


def lay_together(params: Sequence[ManagedParameter]) -> bool:
    """Move shards into one block of memory per dtype and device, one after the other with their padding, unless they
    lie there already. Returns whether any moved. Only for shards to which nothing but the parameters refers yet: other
    holders of a local tensor would keep a stale copy."""
    kinds = neighbours([param for param in params if can_carve(param.flat)], lambda param: param.flat.device)
    moving = [members for members in kinds if end_to_end([param.flat for param in members]) is None]
    with torch.inference_mode(False), torch.no_grad():
        for members in moving:
            for param, piece in zip(members, block_for(members, members[0].flat.device), strict=True):
                piece.copy_(param.flat)
                param.flat = piece
                set_local_tensor(param.sharded, param.geometry.local_view(piece), param.plan.specs.sharded(param.dtype))
    return bool(moving)


def neighbours(
    params: Iterable[ManagedParameter], device_of: Callable[[ManagedParameter], torch.device]
) -> list[list[ManagedParameter]]:
    """The parameters that should lie together, by dtype, device, and whether they are in a file: small plain tensors.
    (Excluded are shards that are used in place, where alignment matters; that are pinned, since copies from pinned
    memory are tracked per allocation; or that belong to another parameter. In files all shards of a group lie together,
    to keep the number of files small.)"""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[ManagedParameter]] = {}
    for param in params:
        if param.at_rest is None or is_wrapper(local_tensor(param.sharded)) or param.aliases or param.plan.pins:
            continue
        if param.flat.nbytes > 0 and (param.plan.offload.in_files or param.flat.nbytes <= MOST_BYTES):
            kinds.setdefault((param.dtype, device_of(param), param.plan.offload.in_files), []).append(param)
    return list(kinds.values())


def block_for(members: Sequence[ManagedParameter], device: torch.device) -> list[torch.Tensor]:
    """Zeroed memory for each shard, end to end if possible."""
    sizes, dtype = [param.flat.numel() for param in members], members[0].dtype
    with torch.inference_mode(False), torch.no_grad():
        zeros = members[0].plan.zeros
        if can_carve(torch.empty(0, device=device)):
            return carve(zeros(sum(sizes), dtype, device), sizes)
        return [zeros(size, dtype, device) for size in sizes]


def merged(into: list[torch.Tensor], of: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copies of the second tensors into the first ones, with one copy for neighbours in both."""
    destinations: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    last: tuple[torch.Tensor, torch.Tensor, int, int] | None = None  # the bases of the last pair, and where it ends
    for destination, source in zip(into, of, strict=True):
        place, base = place_of(source), base_of(destination)
        if place is None or base is None:
            last = None
        else:
            (whole, first), start, numel = place, int(destination.storage_offset()), source.numel()
            end = first + numel
            if last is not None and last[0] is whole and last[1] is base and last[2:] == (first, start):
                numel += sources.pop().numel()
                destination = destinations.pop().as_strided((numel,), (1,))
                source = whole[end - numel : end]
            last = whole, base, end, start + end - first
        destinations.append(destination)
        sources.append(source)
    return destinations, sources


hooks.shards_made.append(lay_together)
hooks.copies.append(merged)
hooks.has_padding.append(lambda base: place_of(base) is not None)
hooks.orders.append(in_memory_order)
