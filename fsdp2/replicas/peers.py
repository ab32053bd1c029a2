"""`Peers`: sums over the same rank of several replicas. Layer: replicas.

::

    rank 0 of A    [a0 | a1]    sends a1, receives b0    a0 + b0    sends it, receives a1 + b1
    rank 0 of B    [b0 | b1]    sends b0, receives a1    a1 + b1    sends it, receives a0 + b0

Sums are in the order of the peers. gloo's own all-reduce kills the process if its peers have other sizes. Here messages
are also matched by size, so a rank waits for a peer that does something else until the timeout.
"""

from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist


class Peers:
    """A process group that is not registered with torch, so that no watchdog watches it.

    Args:
        store: a store (or prefix) for these peers only.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float):
        self._limit = timedelta(seconds=timeout_s)
        kind: Any = dist.ProcessGroupGloo
        self._group = kind(store, rank, size, self._limit)
        self._rank, self._size, self._num_sums = rank, size, 0

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the sum over all peers. Raises RuntimeError if a peer is gone or late."""
        self._num_sums += 1
        flat = tensor.cpu().view(-1)
        pieces = list(flat.tensor_split(self._size))
        own = pieces[self._rank]
        found = [torch.empty_like(own) for _ in range(self._size)]
        self._exchange(flat.numel(), pieces, found)
        found[self._rank] = own
        total = reduce(torch.add, found)
        self._exchange(flat.numel(), [total] * self._size, pieces)
        own.copy_(total)
        if tensor.device.type != "cpu":
            tensor.copy_(flat.view(tensor.shape))

    def _exchange(self, numel: int, sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        """Exchange tensors with each other peer."""
        tag = hash((self._num_sums, numel)) % (1 << 30)
        others = [peer for peer in range(self._size) if peer != self._rank]
        works = [self._group.recv([received[peer]], peer, tag) for peer in others if received[peer].numel()]
        works += [self._group.send([sent[peer]], peer, tag) for peer in others if sent[peer].numel()]
        for work in works:
            work.wait(self._limit)
