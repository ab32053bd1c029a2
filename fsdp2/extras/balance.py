"""`balance`: which sequences of a global batch each rank runs, in which microbatch. Layer: extras.

Ranks wait for each other in each unit, so a turn (one microbatch per rank) takes as long as its largest microbatch::

    turn      0                    1
    rank 0    [longest]            [....] [..] [..]      the sequences of a microbatch are packed: their tokens
    rank 1    [.....] [....]       [....] [...] [.]      in one row, at most `max_tokens`
    rank 2    [.....] [...] [.]    [...] [...] [..]

The largest sequences are placed first, each in the cheapest microbatch so far ("LPT": R. L. Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969). A sequence that costs more than a microbatch's share opens a turn, which is
filled up with others.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from fsdp2.errors import ArgumentError

_Bin = tuple[float, int, int, list[int]]  # a microbatch: its cost, its number, its tokens, its sequences


def balance(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Callable[[int], float] = float
) -> list[list[list[int]]]:
    """Split a global batch into microbatches of about equal cost. No communication: ranks that pass the same arguments
    get the same result.

    Args:
        lengths: tokens of each sequence of the global batch; 1 or more.
        num_ranks: ranks with different data, that is, of the data-parallel mesh.
        max_tokens: the most tokens in a microbatch; activations must fit into memory for this many.
        cost: the cost of a sequence of a given length; `fsdp2.plan.sequence_cost` computes it for a model. By default
            each token costs the same, so attention is ignored.

    Returns:
        For each rank its microbatches, each a list of indices into `lengths`. None is empty. Ranks may get different
        numbers of them: use `join`.

    Raises:
        ArgumentError: a sequence is longer than `max_tokens`, or has no tokens.

    Example::

        mine = fsdp2.balance(lengths, mesh.size(), 16384, cost)[mesh.get_local_rank()]
        with fsdp2.join(model) as work:
            for indices in work.each(mine):
                work.backward(loss_of(model, indices), weight=sum(lengths[index] for index in indices))
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= max_tokens:
            raise ArgumentError(f"balance: sequence {index} has {length} tokens, expected 1 to max_tokens={max_tokens}")
    costs = [cost(length) for length in lengths]
    waiting = sorted(range(len(lengths)), key=lambda index: (-costs[index], index))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    while waiting:
        num_turns = -(-sum(lengths[index] for index in waiting) // (num_ranks * max_tokens))
        share = sum(costs[index] for index in waiting) / (num_ranks * num_turns)
        if (largest := costs[waiting[0]]) > share:
            microbatches, waiting = _fill(waiting, costs, lengths, num_ranks, max_tokens, largest)
        else:
            while (found := _fill(waiting, costs, lengths, num_ranks * num_turns, max_tokens))[1]:
                num_turns += 1
            microbatches, waiting = found
        microbatches.sort(key=lambda each: -each[0])
        for start in range(0, len(microbatches), num_ranks):
            by_total = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
            for rank, (total, indices) in zip(by_total, microbatches[start:], strict=False):
                ranks[rank].append(indices)
                totals[rank] += total
    return ranks


def _fill(
    waiting: Sequence[int],
    costs: Sequence[float],
    lengths: Sequence[int],
    count: int,
    max_tokens: int,
    level: float = inf,
) -> tuple[list[tuple[float, list[int]]], list[int]]:
    """Put sequences into `count` microbatches that cost at most `level` each. Returns the non-empty ones with their
    costs, and the sequences that do not fit."""
    shortest = min(lengths[index] for index in waiting)
    heap: list[_Bin] = [(0.0, number, 0, []) for number in range(count)]
    full: list[_Bin] = []
    left: list[int] = []
    for index in waiting:
        passed: list[_Bin] = []
        while heap and heap[0][0] + costs[index] <= level:
            total, number, tokens, indices = heappop(heap)
            if tokens + lengths[index] <= max_tokens:
                indices.append(index)
                heappush(heap, (total + costs[index], number, tokens + lengths[index], indices))
                break
            (full if tokens + shortest > max_tokens else passed).append((total, number, tokens, indices))
        else:
            left.append(index)
        heap += passed
        heapify(heap)
    return [(total, indices) for total, _, _, indices in (*heap, *full) if indices], left
