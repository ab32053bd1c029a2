"""The norm of many tensors of which each rank holds pieces, counting every element once. Layer: optim, below clip.

A tensor that is sharded over some mesh axes is complete only on the ranks of those axes together. Along other axes it
is replicated, and so is a plain tensor. Each kind of tensor (mesh, placements) has

* *cuts*: the groups of ranks, one per mesh axis that shards it, over which its parts must be summed;
* *holders*: the ranks that hold the same piece as this rank.

If one group of ranks suffices for all kinds, there is one all-reduce of one number over it, and each piece is counted
only by its first holder in the group. This is the case for FSDP, HSDP (the shard group), and tensor and expert
parallelism over all ranks. Otherwise there is one all-reduce per distinct group, with one number for each kind.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fsdp2._torch import local_of, spec_of
from fsdp2._torch.optim import foreach_norm
from fsdp2.optim.flats import Spans, identical, joined
from fsdp2.watch.exchange import Exchange, at_once

__all__ = ["by_device_and_dtype", "norm_of"]

Ranks = tuple[int, ...]

_dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")


@dataclass(frozen=True, eq=False)
class Kind:
    """Tensors with the same mesh and placements; plain tensors have no mesh.

    Attributes:
        indices: the indices of these tensors.
    """

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    indices: list[int]

    @cached_property
    def cut_axes(self) -> tuple[int, ...]:
        """The mesh axes along which ranks hold different elements. Empty on ranks outside of the mesh."""
        if self.mesh is None or self.mesh.get_coordinate() is None:
            return ()
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if self.mesh.size(axis) > 1 and not placement.is_replicate() and not placement.is_partial()
        )

    @cached_property
    def is_partial(self) -> bool:
        """Whether they are partial sums over some axes."""
        return any(placement.is_partial() for placement in self.placements)

    @cached_property
    def cuts(self) -> dict[Ranks, dist.ProcessGroup]:
        """See the module docstring. Keyed by ranks, because equal meshes may have different process groups."""
        if self.mesh is None:
            return {}
        groups = [self.mesh.get_group(axis) for axis in self.cut_axes]
        return {tuple(dist.get_process_group_ranks(group)): group for group in groups}

    def added_up_by(self, ranks: Ranks) -> bool:
        """Whether a sum over `ranks` that counts each piece once is the sum over the whole tensors."""
        if not self.cuts or self.cuts.keys() == {ranks}:
            return True
        assert self.mesh is not None
        return set(self.mesh.mesh.flatten().tolist()) == set(ranks)

    def counts_within(self, ranks: Ranks) -> bool:
        """Whether this rank is the first holder of its piece among `ranks`."""
        coordinate = None if self.mesh is None else self.mesh.get_coordinate()
        if self.mesh is None or coordinate is None or not self.cuts:  # all of `ranks` have it, also beyond its mesh
            return ranks[0] == dist.get_rank()
        at = tuple(mine if axis in self.cut_axes else slice(None) for axis, mine in enumerate(coordinate))
        holders = self.mesh.mesh[at].flatten().tolist()
        first: int = min(set(holders) & set(ranks))
        return first == dist.get_rank()


@dataclass(frozen=True)
class Bucket:
    """Tensors whose norm becomes one number, and the groups over which it is summed."""

    indices: list[int]
    cuts: dict[Ranks, dist.ProcessGroup]


def kinds_of(tensors: Iterable[torch.Tensor]) -> list[Kind]:
    """The kinds in the order of first appearance, which is the same on all ranks."""
    kinds: dict[tuple[int, tuple[Placement, ...]], Kind] = {}
    for index, tensor in enumerate(tensors):
        is_distributed = isinstance(tensor, DTensor)
        mesh, placements = (spec_of(tensor).mesh, spec_of(tensor).placements) if is_distributed else (None, ())
        kinds.setdefault((id(mesh), placements), Kind(mesh, placements, [])).indices.append(index)
    return list(kinds.values())


def buckets_of(kinds: Sequence[Kind]) -> list[Bucket]:
    """One bucket if one group suffices; otherwise one per kind."""
    cuts: dict[Ranks, dist.ProcessGroup] = {}
    for kind in kinds:
        for ranks, group in kind.cuts.items():
            cuts.setdefault(ranks, group)
    if not cuts:
        return [Bucket(sorted(index for kind in kinds for index in kind.indices), {})]
    world = dist.group.WORLD
    assert world is not None
    candidates = {**cuts, tuple(dist.get_process_group_ranks(world)): world}
    for ranks, group in candidates.items():
        if all(kind.added_up_by(ranks) for kind in kinds):
            counted = [kind for kind in kinds if kind.counts_within(ranks)]
            return [Bucket(sorted(index for kind in counted for index in kind.indices), {ranks: group})]
    return [Bucket(kind.indices, {ranks: cuts[ranks] for ranks in kind.cuts}) for kind in kinds]


def norm_of(
    like: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], norm_type: float, foreach: bool
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """The norm of all elements of `tensors`: 0-dim, the same on every rank. Also this rank's parts of them, with
    contiguous ones merged, if these had to be computed.

    Collective over the meshes of `like`, also for a rank on which all tensors are None.

    Args:
        like: determines mesh, placements and dtypes; the same on all ranks.
        tensors: as many as `like`; None does not count.
        norm_type: above 0, or minus infinity.
        foreach: compute all norms in one call.
    """
    known = _known.get(id(like[0])) if like else None
    parts = None if known is None else known.parts(tensors)
    if known is None or parts is None:
        task, lists, has_all = _planned(like, tensors)
    else:
        task, lists, has_all = known.task, [parts], True
    powers = torch.stack([_power(list_, norm_type, task.dtype, task.device, foreach) for list_ in lists])
    for ranks, group in {ranks: group for bucket in task.buckets for ranks, group in bucket.cuts.items()}.items():
        cut = [index for index, bucket in enumerate(task.buckets) if ranks in bucket.cuts]
        if len(cut) == len(powers):
            powers = _all_reduced(powers, norm_type, group)
        else:
            found = _all_reduced(torch.stack([powers[index] for index in cut]), norm_type, group)
            for index, power in zip(cut, found, strict=True):
                powers[index] = power
    return _root(powers, norm_type).to(task.home), lists[0] if has_all else None


@dataclass(frozen=True, eq=False)
class Task:
    """How to compute a norm.

    Attributes:
        dtype, device: dtype and device of the sums.
        home: the device of the result.
    """

    buckets: list[Bucket]
    dtype: torch.dtype
    device: torch.device
    home: torch.device


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known about a list of DTensors; valid for those of the next step if they have the same specs."""

    specs: list[Any]
    spans: Spans
    task: Task

    def parts(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """This rank's parts of `tensors`, joined; None if they differ from the last ones."""
        try:
            is_same = identical(map(spec_of, tensors), self.specs)
        except AttributeError:  # a gradient is missing, or not a DTensor
            return None
        return self.spans.over(list(map(local_of, tensors))) if is_same else None


_known: dict[int, _Known] = {}  # by the id of the first parameter
_MANY = 100


def _planned(
    like: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> tuple[Task, list[list[torch.Tensor]], bool]:
    """The task; for each bucket this rank's parts, joined; and whether these are all of its parts."""
    kinds = kinds_of([a if b is None else b for a, b in zip(like, tensors, strict=True)])
    buckets = buckets_of(kinds)
    wide = not set(map(_dtype_of, like)).isdisjoint((torch.float64, torch.complex128))
    device = _device_of(kinds, like)
    locals_ = _locals_of(kinds, tensors)
    home = next((tensor.device for tensor in locals_ if tensor is not None), device)
    task = Task(buckets, torch.float64 if wide else torch.float32, device, home)
    has_all = len(buckets) == 1 and len(buckets[0].indices) == len(tensors) and not any(k.is_partial for k in kinds)
    lists = []
    for bucket in buckets:
        spans, parts = joined([local for index in bucket.indices if (local := locals_[index]) is not None])
        lists.append(parts)
        if has_all and like and all(isinstance(tensor, DTensor) for tensor in tensors):
            if len(_known) >= _MANY:
                _known.clear()
            _known[id(like[0])] = _Known(list(map(spec_of, tensors)), spans, task)
    return task, lists, has_all


def by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The tensors in lists, each of which one foreach call can process."""
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return lists


def _device_of(kinds: Sequence[Kind], like: Sequence[torch.Tensor]) -> torch.device:
    """The device on which the groups reduce; with CPU offload the gradients are elsewhere."""
    kind = next((mesh.device_type for kind in kinds if (mesh := kind.mesh) is not None), None)
    if kind is None:
        return like[0].device if like else torch.device("cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _locals_of(kinds: Sequence[Kind], tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """This rank's parts. Partial sums are reduced first, because the norm of a sum is not determined by the norms of
    its terms."""
    whole = list(tensors)
    for kind in kinds:
        if kind.is_partial:
            summed = [Replicate() if placement.is_partial() else placement for placement in kind.placements]
            for index in kind.indices:
                tensor = whole[index]
                if isinstance(tensor, DTensor):
                    whole[index] = tensor.redistribute(placements=summed)
    return [local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in whole]


def _power(
    tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device, foreach: bool
) -> torch.Tensor:
    """The sum of ``|x| ** norm_type`` over all elements, or the largest or smallest ``|x|``."""
    norms: list[torch.Tensor] = []
    for (_, kind), list_ in by_device_and_dtype(each for each in tensors if each.numel()).items():
        wider = torch.float32 if kind in (torch.bfloat16, torch.float16) else None  # for the precision of the sums
        if foreach:
            each = foreach_norm(list_, norm_type, wider)
        else:
            each = [torch.linalg.vector_norm(tensor, norm_type, dtype=wider) for tensor in list_]
        norms.append(torch.stack(each).to(device, dtype))
    if not norms:
        return torch.full((), inf if norm_type == -inf else 0.0, dtype=dtype, device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0], norm_type)
    return norm if abs(norm_type) == inf else norm.pow(norm_type)


def _all_reduced(sent: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Each element summed (or the maximum, or the minimum) over `group`, in one all-reduce."""
    exchange = Exchange("all-reduce of norms", None, group, sent.numel(), sent.nbytes, sent.dtype, sent.device)
    if abs(norm_type) != inf:
        with at_once(exchange):
            dist.all_reduce(sent, group=group)
        return sent
    # Backends differ in how MAX treats NaN, so NaN is sent as infinity, and flags mark where.
    sign = 1.0 if norm_type == inf else -1.0
    sent = torch.stack([(sign * sent).nan_to_num(nan=inf, posinf=inf, neginf=-inf), sent.isnan().to(sent)])
    with at_once(exchange):
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    return torch.where(sent[1] > 0, torch.nan, sign * sent[0])


def _root(powers: torch.Tensor, norm_type: float) -> torch.Tensor:
    if norm_type == inf:
        return powers.max()
    if norm_type == -inf:
        return powers.min()
    return powers.sum().sqrt() if norm_type == 2 else powers.sum().pow(1 / norm_type)
