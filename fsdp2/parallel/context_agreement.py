"""Check that the ranks of a context group agree, once for each new combination, through the store. Layer: parallel.

A ring of messages does not notice that one rank has other shapes: it hangs, or delivers garbage. So the first time a
rank does something, it publishes what it is about to do and reads what the others published. Repetitions only cost a
look-up in a set. The store is host memory: no collective runs, and no device is waited for.

A rank that changes alone, later on, waits for the others' next answer and gives up after `TIMEOUT`, with an error that
names the missing ranks. (The others are then in a ring without it; they fail when its process ends.)
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2._torch import store_of
from fsdp2.errors import ArgumentError, CollectiveError

__all__ = ["TIMEOUT", "agree", "ranks_agree", "tell_refusal"]

# If each rank compiles or loads, ranks reach their first attention minutes apart; NCCL's own limit is the same.
TIMEOUT = timedelta(minutes=10)
REFUSAL_TIMEOUT = timedelta(seconds=20)  # a rank that raises anyway need not wait for long

Facts = Mapping[str, str]


class _Topic:
    """What the ranks of one group have agreed on, and the number of checks so far."""

    def __init__(self) -> None:
        self.known: set[tuple[tuple[str, str], ...]] = set()
        self.num_asked = 0


_topics: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Topic]] = WeakKeyDictionary()


def ranks_agree(group: dist.ProcessGroup, topic: str) -> bool:
    """Whether the group's ranks have agreed on anything in this topic yet. The same on every rank."""
    return group in _topics and topic in _topics[group] and bool(_topics[group][topic].known)


def agree(group: dist.ProcessGroup, topic: str, facts: Facts, advice: str, timeout: timedelta | None = None) -> None:
    """Continue only if every rank of `group` passes the same `facts`. Every rank must call it before the first message
    of `topic`. Nothing is exchanged if this rank has passed these facts before.

    Args:
        topic: what is about to happen; begins the message.
        facts: by name, as texts.
        advice: what to do about a difference; ends the message.
        timeout: how long to wait for the others; None for `TIMEOUT`.

    Raises:
        ArgumentError: the facts differ. Raised on all ranks, with the facts of each.
        CollectiveError: some ranks did not answer in time.
    """
    timeout = TIMEOUT if timeout is None else timeout
    asked = _topics.setdefault(group, {}).setdefault(topic, _Topic())
    answer = tuple(facts.items())
    if answer in asked.known:
        return
    store = store_of(group)
    if store is None:  # a fake process group: there are no other ranks
        return
    ranks = dist.get_process_group_ranks(group)
    # Failed checks count too, so that what was written for them is not read again.
    keys = [f"fsdp2.context/{topic}/{asked.num_asked}/{position}" for position in range(len(ranks))]
    asked.num_asked += 1
    text = "\n".join(f"{name}={value}" for name, value in facts.items())
    store.set(keys[group.rank()], text)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise CollectiveError(
            f"{topic}: rank {ranks[group.rank()]} has {_show(text)}, and waited {timeout} for ranks {missing} to say "
            f"what they have. They failed, are stuck, or have something else than this rank now. {advice}"
        ) from error
    found = {rank: store.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}
    if len(set(found.values())) > 1:
        shown = "; ".join(f"rank {rank}: {_show(each)}" for rank, each in _differences(found).items())
        raise ArgumentError(f"{topic}: the ranks of a context group must have the same, but got {shown}. {advice}")
    asked.known.add(answer)


def tell_refusal(group: dist.ProcessGroup, topic: str, reason: str) -> None:
    """Tell ranks that are about to check this topic that this one does not continue, so that they raise too. The caller
    raises next, whatever the others do."""
    with suppress(ArgumentError, CollectiveError):
        agree(group, topic, {"refused": " ".join(reason.split())}, "", REFUSAL_TIMEOUT)


def _differences(found: dict[int, str]) -> dict[int, str]:
    """Only the lines that differ between ranks."""
    lines = {rank: text.splitlines() for rank, text in found.items()}
    common = set.intersection(*(set(each) for each in lines.values()))
    return {rank: "\n".join(line for line in each if line not in common) for rank, each in lines.items()}


def _show(text: str) -> str:
    return ", ".join(text.splitlines()) or "nothing of the rest"
