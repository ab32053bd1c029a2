"""A second process group of the same ranks, so that two kinds of collectives do not queue behind one another. Layer:
comm."""

from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["separate_group"]

# By the default group that was there: groups do not outlive it, and a later one has other ranks.
_separate: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str], dist.ProcessGroup]]
_separate = WeakKeyDictionary()


def separate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of `group`'s ranks and backends, for reduce-scatters beside all-gathers (docs/behaviour.md, 140).

    On NCCL a group is one communicator, which runs one collective at a time, whatever streams they are on; two groups
    can run two. There is one such group for each set of ranks and backends, made at the first call.

    Every rank of `group` must call it, in the same order among the calls that make process groups; other ranks need
    not. (torch numbers such groups by how many a rank has, so the ranks of one group must belong to equally many.)

    Example:
        >>> separate_group(mesh.get_group("shard"))  # doctest: +SKIP
    """
    world = dist.group.WORLD
    assert world is not None
    known = _separate.setdefault(world, {})
    ranks = dist.get_process_group_ranks(group)
    key = (tuple(ranks), dist.get_backend_config(group))
    if key not in known:
        # With HSDP each rank knows the shard group it is in only, so the others cannot be made to join the call.
        known[key] = dist.new_group(ranks, backend=key[1], use_local_synchronization=True, group_desc="reduce_scatter")
    return known[key]
