"""A second process group of the same ranks, so that two kinds of collectives do not wait for each other. Layer:
comm."""

from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["separate_group"]

# Keyed by the default group: groups do not outlive it, and a later one may have other ranks.
_separate: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str], dist.ProcessGroup]]
_separate = WeakKeyDictionary()


def separate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of `group`'s ranks and backends, for reduce-scatters beside all-gathers (docs/behaviour.md, 140).

    On NCCL a group is one communicator, which runs one collective at a time on any stream; two groups can run two.
    There is one such group for each set of ranks and backends, created at the first call.

    Every rank of `group` must call it, in the same order among the calls that create process groups; other ranks need
    not. (torch names locally synchronised groups by a per-rank counter, so all ranks of a group must have created
    equally many.)

    Example:
        >>> separate_group(mesh.get_group("shard"))  # doctest: +SKIP
    """
    world = dist.group.WORLD
    assert world is not None
    known = _separate.setdefault(world, {})
    ranks = dist.get_process_group_ranks(group)
    key = (tuple(ranks), dist.get_backend_config(group))
    if key not in known:
        # With HSDP each rank knows only its own shard group, so ranks of other groups cannot join the call.
        known[key] = dist.new_group(ranks, backend=key[1], use_local_synchronization=True, group_desc="reduce_scatter")
    return known[key]
