"""Process groups that belong to no mesh, and the setter `set_separate_reduce_scatter_group`. Layer: extras."""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._torch.extras import new_group_of
from fsdp2.runtime import hooks
from fsdp2.runtime.root import units_below
from fsdp2.runtime.unit import unit_for

# Keyed by the default group: groups do not outlive it, and a later one may have other ranks.
_separate: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str, str], dist.ProcessGroup]]
_separate = WeakKeyDictionary()


def separate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of `group`'s ranks and backends, so that reduce-scatters run in parallel with all-gathers
    (tests/behaviour.md, 140).

    On NCCL a group is one communicator, which runs one collective at a time on any stream; two groups can run two. The
    first call for these ranks and backends creates the group. All ranks of `group` must call it, in the same order
    among calls that create groups; other ranks need not, since with HSDP a rank knows only its own shard group.
    """
    return _group(dist.get_process_group_ranks(group), dist.get_backend_config(group), "reduce_scatter")


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of all ranks of a mesh: an existing one (the default group, or that of an axis), or a new one. Every rank
    of the mesh must call it, in the same order among calls that create process groups."""
    world = dist.group.WORLD
    assert world is not None
    ranks = sorted(mesh.mesh.flatten().tolist())
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in (world, *groups):
        if sorted(dist.get_process_group_ranks(group)) == ranks:
            return group
    return _group(ranks, dist.get_backend_config(groups[0]), "whole_mesh")


def _group(ranks: list[int], backend: str, name: str) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    known, key = _separate.setdefault(world, {}), (tuple(ranks), backend, name)
    if key not in known:
        known[key] = new_group_of(ranks, backend, name)
    return known[key]


def _separate_reduce_scatters(module: nn.Module, enable: bool, recurse: bool) -> None:
    unit = unit_for(module)
    for each in units_below(module) if recurse else [unit, *unit.followers]:
        for group in each.groups:
            shared = group.roles.shard_group
            group.channel.scatter_group = separate_group(shared) if enable and shared is not None else shared
            group.channel_changed()


hooks.setters["set_separate_reduce_scatter_group"] = _separate_reduce_scatters
