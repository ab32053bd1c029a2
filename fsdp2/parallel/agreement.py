"""Check that the ranks of a group are about to do the same, once for each new combination. Layer: parallel.

A ring of messages does not detect that one rank has other shapes: it hangs, or delivers garbage. So the first time a
rank does something, it publishes that in the store and reads what the others published, without a collective or a
device. Repetitions only cost a look-up. If later only one rank changes, it gives up after `TIMEOUT`, with an error that
names the ranks without an answer.
"""

from collections.abc import Mapping
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2._torch.shared import store_of
from fsdp2.errors import ArgumentError, CollectiveError

__all__ = ["TIMEOUT", "agree"]

# Ranks that compile or load reach their first attention minutes apart; NCCL's own limit is the same.
TIMEOUT = timedelta(minutes=10)

# By group and topic, the facts compared so far, in order; "" for a failed comparison, whose keys are not reused.
_asked: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[str]]] = WeakKeyDictionary()


def agree(group: dist.ProcessGroup, topic: str, facts: Mapping[str, object], advice: str) -> None:
    """Continue only if every rank of `group` passes the same `facts`. Every rank must call it before the first message
    of `topic`. Nothing is exchanged if this rank has passed these facts before. `advice` says what to do about a
    difference.

    Raises:
        ArgumentError: the facts differ. Raised on all ranks, with the facts of each rank that differs.
        CollectiveError: some ranks did not answer in time.
    """
    asked = _asked.setdefault(group, {}).setdefault(topic, [])
    mine, store = ", ".join(f"{name}={value}" for name, value in facts.items()), store_of(group)
    if mine in asked or store is None:  # a fake process group has neither a store nor other ranks
        return
    rank = dist.get_rank()
    keys = {each: f"fsdp2.agreement/{topic}/{len(asked)}/{each}" for each in dist.get_process_group_ranks(group)}
    asked.append("")
    store.set(keys[rank], mine)
    try:
        store.wait([*keys.values()], TIMEOUT)
    except RuntimeError as error:
        missing = [each for each, key in keys.items() if not store.check([key])]
        raise CollectiveError(
            f"{topic}: rank {rank} has {mine}, and waited {TIMEOUT} for ranks {missing} to publish theirs. They "
            f"failed, are stuck, or do something else. {advice}"
        ) from error
    found = {each: store.get(key).decode() for each, key in keys.items()}
    if others := {each: what for each, what in found.items() if what != mine}:
        shown = "; ".join(f"rank {each}: {what}" for each, what in {rank: mine, **others}.items())
        raise ArgumentError(f"{topic}: the ranks must agree, but got {shown}. {advice}")
    asked[-1] = mine
