"""Check that the ranks of a group are about to do the same, once for each new combination. Layer: parallel.

A ring of messages does not notice that one rank has other shapes: it hangs, or delivers garbage. So the first time a
rank does something, it says in the store what that is and reads what the others said: no collective, no device.
Repetitions only cost a look-up. A rank that changes alone, later on, gives up after `TIMEOUT`, with an error that names
the ranks that said nothing.
"""

from collections.abc import Mapping
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2._torch import store_of
from fsdp2.errors import ArgumentError, CollectiveError

__all__ = ["TIMEOUT", "agree"]

# If each rank compiles or loads, ranks reach their first attention minutes apart; NCCL's own limit is the same.
TIMEOUT = timedelta(minutes=10)

# By group and topic, what was asked, in order; None for what failed: its keys in the store are not used again.
_asked: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[list[str] | None]]] = WeakKeyDictionary()


def agree(group: dist.ProcessGroup, topic: str, facts: Mapping[str, object], advice: str) -> None:
    """Continue only if every rank of `group` passes the same `facts`. Every rank must call it before the first message
    of `topic`. Nothing is exchanged if this rank has passed these facts before.

    Args:
        topic: what is about to happen; begins the message.
        facts: by name.
        advice: what to do about a difference; ends the message.

    Raises:
        ArgumentError: the facts differ. Raised on all ranks, with the facts of each that differ.
        CollectiveError: some ranks did not answer in time.
    """
    asked = _asked.setdefault(group, {}).setdefault(topic, [])
    mine = [f"{name}={value}" for name, value in facts.items()]
    store = store_of(group)
    if mine in asked or store is None:  # a fake process group has no store, and no other ranks
        return
    ranks = dist.get_process_group_ranks(group)
    keys = {rank: f"fsdp2.agreement/{topic}/{len(asked)}/{position}" for position, rank in enumerate(ranks)}
    asked.append(None)
    store.set(keys[dist.get_rank()], "\n".join(mine))
    try:
        store.wait([*keys.values()], TIMEOUT)
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        raise CollectiveError(
            f"{topic}: rank {dist.get_rank()} has {', '.join(mine)}, and waited {TIMEOUT} for ranks {missing} to say "
            f"what they have. They failed, are stuck, or have something else than this rank now. {advice}"
        ) from error
    found = {rank: store.get(key).decode().split("\n") for rank, key in keys.items()}
    common = set(mine).intersection(*found.values())
    if any(each != mine for each in found.values()):
        other = {rank: [fact for fact in each if fact not in common] for rank, each in found.items()}
        shown = "; ".join(f"rank {rank}: {', '.join(each) or 'nothing of the rest'}" for rank, each in other.items())
        raise ArgumentError(f"{topic}: the ranks must have the same, but got {shown}. {advice}")
    asked[-1] = mine
