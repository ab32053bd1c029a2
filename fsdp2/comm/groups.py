"""Process groups that no mesh has: one of all its ranks, and a second one of the same ranks, so that two kinds of
collectives do not wait for each other. Layer: comm."""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._torch import new_group_of

# Keyed by the default group: groups do not outlive it, and a later one may have other ranks.
_separate: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str], dist.ProcessGroup]]
_separate = WeakKeyDictionary()


def separate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of `group`'s ranks and backends, for reduce-scatters beside all-gathers (docs/behaviour.md, 140).

    On NCCL a group is one communicator, which runs one collective at a time on any stream; two groups can run two.
    There is one such group for each set of ranks and backends, created at the first call.

    Every rank of `group` must call it, in the same order among the calls that create process groups; other ranks need
    not.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _separate.setdefault(world, {})
    ranks = dist.get_process_group_ranks(group)
    key = (tuple(ranks), dist.get_backend_config(group))
    if key not in known:
        # With HSDP each rank knows only its own shard group, so ranks of other groups cannot join the call.
        known[key] = new_group_of(ranks, key[1], "reduce_scatter")
    return known[key]


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of all ranks of a mesh: one that exists (the default group, or that of an axis), or a new one.

    Every rank of the mesh must call it, in the same order among the calls that create process groups.
    """
    world = dist.group.WORLD
    assert world is not None
    ranks = sorted(mesh.mesh.flatten().tolist())
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in (world, *groups):
        if sorted(dist.get_process_group_ranks(group)) == ranks:
            return group
    known = _separate.setdefault(world, {})
    key = (tuple(ranks), "all of a mesh")
    if key not in known:
        known[key] = new_group_of(ranks, dist.get_backend_config(groups[0]), "whole_mesh")
    return known[key]
