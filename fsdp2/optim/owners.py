"""Which rank steps which matrix, and which matrices travel together. Pure. Layer: optim.

Owners are chosen once for all matrices: the most expensive first, each to the rank that has the least to do so far. So
the ranks differ by less than the last matrix that each received, which no choice layer by layer achieves. Every rank
computes the same, from shapes alone.
"""

from collections.abc import Sequence

__all__ = ["BUCKET_BYTES", "buckets_of", "choose_owners", "most_expensive_first"]

# About how much each rank owns of a bucket, in bytes of parameters.
BUCKET_BYTES = 16 << 20


def most_expensive_first(costs: Sequence[int]) -> list[int]:
    """The indices in the order of falling cost; equal ones stay in their order.

    >>> most_expensive_first([1, 3, 2, 3])
    [1, 3, 2, 0]
    """
    return sorted(range(len(costs)), key=lambda index: -costs[index])


def choose_owners(costs: Sequence[int], ranks: Sequence[int], loads: Sequence[int] | None = None) -> list[int]:
    """The rank that owns each matrix.

    Args:
        loads: the cost of what each rank owns already.

    >>> choose_owners([1, 3, 2, 3], ranks=[0, 1])
    [1, 0, 0, 1]
    """
    loads = [0] * len(ranks) if loads is None else list(loads)
    owners = [0] * len(costs)
    for index in most_expensive_first(costs):
        position = min(range(len(ranks)), key=loads.__getitem__)
        owners[index] = ranks[position]
        loads[position] += costs[index]
    return owners


def buckets_of(sizes_bytes: Sequence[int], num_ranks: int, limit_bytes: int) -> list[range]:
    """Consecutive matrices that travel together: at least one for each rank, and then up to `limit_bytes` a rank.

    >>> buckets_of([4, 4, 4, 4, 1, 1], num_ranks=2, limit_bytes=4)
    [range(0, 2), range(2, 4), range(4, 6)]
    """
    found: list[range] = []
    first = total = 0
    for index, size in enumerate(sizes_bytes):
        if index - first >= num_ranks and total + size > limit_bytes * num_ranks:
            found.append(range(first, index))
            first, total = index, 0
        total += size
    return [*found, range(first, len(sizes_bytes))] if len(sizes_bytes) else found
