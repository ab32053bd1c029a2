"""`Route`: the ranks that exchange parts, and how they send bytes. Layer: transfer."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2.comm import comm_for
from fsdp2.comm.base import Collective, Operand, OpInfo, wrapped
from fsdp2.transfer.items import Item, first_of, ranks_for
from fsdp2.transfer.patience import patience

ALIGN = 16


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next tensor may begin."""
    return -(-nbytes // ALIGN) * ALIGN


class Flight:
    """Bytes of each rank on their way to all, or to the first.

    Attributes:
        own: what this rank sends; fill it before `start`.
        rows: what each rank has sent, after `wait`; empty on ranks that receive nothing.
    """

    def __init__(self, route: "Route", sizes: Sequence[int], first_only: bool):
        group = route.group
        assert group is not None
        comm = comm_for(group, route.device)
        if not first_only and not comm.direct_allows_uneven:
            sizes = [max(sizes)] * len(sizes)
        bounds, is_here = [0, *accumulate(sizes)], not first_only or route.me == 0
        info = OpInfo("weights", None, bounds[-1], bounds[-1], torch.uint8, group, route.device)
        received = torch.empty(bounds[-1] if is_here else 0, dtype=torch.uint8, device=route.device)
        self.rows = [received[start:end] for start, end in pairwise(bounds)] if is_here else []
        self._patience_s = route.patience_s
        self.own = self.rows[route.me] if is_here else received.new_empty(sizes[route.me])
        if first_only:
            collective = Collective(info, partial(_to_first, group, self.own, self.rows))
        else:
            collective = comm.plan_all_gather([Operand(received, bounds)], info)
        self._collective = wrapped(collective)
        self._started: Any = None

    def start(self) -> "Flight":
        """Send. Collective over the ranks of the route."""
        self._started = self._collective.start()
        return self

    def wait(self, what: str) -> None:
        """Wait until the rows have arrived. `what` is for the message if another rank is too slow."""
        with patience(self._patience_s, what):
            self._collective.wait(self._started)


class _Messages:
    """Messages in flight. (A gather would need a copy of everything that arrives.)"""

    def __init__(self, works: list[dist.Work]):
        self._works = works

    def wait(self) -> None:
        """Wait until all have arrived."""
        for work in self._works:
            work.wait()


def _to_first(group: dist.ProcessGroup, own: torch.Tensor, rows: list[torch.Tensor]) -> _Messages:
    sent = [dist.P2POp(dist.irecv, row, group=group, group_peer=peer) for peer, row in enumerate(rows) if peer]
    return _Messages(dist.batch_isend_irecv(sent or [dist.P2POp(dist.isend, own, group=group, group_peer=0)]))


class Route:
    """The ranks that hold parts of the same tensors.

    Attributes:
        ranks: their global ranks, ascending.
        me: the index of this rank.
        has_first: whether the first of all ranks that have the tensors is among them; otherwise they are a replica.
        group: their process group; None for a single rank.
        device: the device of what is sent.
        patience_s: how long to wait for a slow rank.
    """

    def __init__(self, items: Sequence[Item], device: torch.device, rank: int, patience_s: float):
        self.ranks = ranks_for(items, rank)
        self.has_first = first_of(items, rank) in self.ranks
        self.me = self.ranks.index(rank)
        self.group = _group_of(self.ranks)
        self.device = _device_of(self.group, device)
        self.patience_s = patience_s

    def flight(self, sizes: Sequence[int], first_only: bool = False) -> Flight:
        """`sizes`: the bytes that each rank sends; equal on all ranks."""
        return Flight(self, sizes, first_only)


# By the default process group, which they do not outlive.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of these ranks; None for a single rank. The first call for a proper subset of all ranks creates
    a group, and is collective over them."""
    if len(ranks) == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == world.size():
        return world
    known = _groups.setdefault(world, {})
    if ranks not in known:
        made = dist.new_group([*ranks], use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        known[ranks] = made
    return known[ranks]


def _device_of(group: dist.ProcessGroup | None, own: torch.device) -> torch.device:
    """The local tensors' device; for offloaded ones the accelerator, if the group has no backend for the CPU."""
    if group is not None and torch.accelerator.is_available():
        config = dist.get_backend_config(group)
        if not any(part.partition(":")[0] in ("cpu", "gloo") for part in config.split(",")):
            return torch.accelerator.current_accelerator() or torch.device("cpu")
    return own
