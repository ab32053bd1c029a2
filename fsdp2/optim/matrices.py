"""The matrices of a parameter, which rank steps which, and which are sent together. Pure. Layer: optim.

An optimizer such as Muon works on a whole matrix. Most parameters are one matrix; the expert weights of a
mixture-of-experts layer are a stack of them, and a fused projection is several stacked in rows, to be stepped
separately::

    shape (m, n)                 one matrix
    shape (m, n), split (a, b)   its first a rows, and the other b
    shape (e, m, n)              e matrices; with `split`, each of them is split
    any other                    one tensor, as it is; the optimizer decides whether it accepts it

Owners are chosen for all matrices together: the most expensive first, each for the rank with the least work so far. So
the ranks differ by less than the last matrix that each received; choosing layer by layer cannot achieve that. Every
rank computes the same result, from shapes only.
"""

from collections.abc import Sequence
from math import prod

from fsdp2.errors import ArgumentError
from fsdp2.placement.box import Box, whole

__all__ = ["Split", "boxes_of_matrices", "buckets_of", "choose_owners", "cost_of", "shape_of_matrix"]

# How the rows of a matrix are split: into this number of equal parts, or into parts of these sizes; None: not split.
Split = int | Sequence[int] | None


def boxes_of_matrices(name: str, shape: Sequence[int], split: Split) -> list[Box]:
    """The matrices of a parameter of `shape`, in row-major order.

    Raises:
        ArgumentError: `split` does not add up to the number of rows, or the parameter has no rows to split.

    >>> [box.shape for box in boxes_of_matrices("wqkv", (8, 4), (4, 2, 2))]
    [(4, 4), (2, 4), (2, 4)]
    """
    if split is not None and len(shape) not in (2, 3):
        raise ArgumentError(
            f"'{name}': split={split} divides the rows of matrices, but it has the shape {tuple(shape)}. Leave split "
            "out of its param group."
        )
    if len(shape) not in (2, 3):
        return [whole(shape)]
    rows, columns = shape[-2:]
    sizes = _sizes(name, rows, split)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [((start, 0), (size, columns)) for start, size in zip(starts, sizes, strict=True)]
    if len(shape) == 2:
        return [Box(start, size) for start, size in parts]
    return [Box((index, *start), (1, *size)) for index in range(shape[0]) for start, size in parts]


def _sizes(name: str, rows: int, split: Split) -> list[int]:
    if split is None:
        return [rows]
    sizes = [rows // split] * split if isinstance(split, int) and split > 0 else []
    if not isinstance(split, int):
        sizes = [*split]
    if sum(sizes) != rows or not all(size > 0 for size in sizes):
        raise ArgumentError(
            f"'{name}': split={split} does not divide its {rows} rows: expected a number of equal parts, or positive "
            f"sizes that add up to {rows}"
        )
    return sizes


def shape_of_matrix(box: Box) -> tuple[int, ...]:
    """The shape that the optimizer sees: without the stacking dim."""
    return box.shape[1:] if len(box.shape) == 3 else box.shape


def cost_of(box: Box) -> int:
    """An estimate of the work of a step, up to a factor: the product of a matrix with its smaller Gram matrix
    (Newton-Schulz, Shampoo)."""
    shape = shape_of_matrix(box)
    return prod(shape) * (min(shape) if len(shape) == 2 else 1)


def choose_owners(costs: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The rank that owns each matrix.

    >>> choose_owners([1, 3, 2, 3], ranks=[0, 1])
    [1, 0, 0, 1]
    """
    loads = [0] * len(ranks)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):  # the most expensive first
        position = min(range(len(ranks)), key=loads.__getitem__)
        owners[index] = ranks[position]
        loads[position] += costs[index]
    return owners


def buckets_of(sizes_bytes: Sequence[int], num_ranks: int, limit_bytes: int) -> list[range]:
    """Consecutive matrices that are sent together: at least one for each rank, then up to `limit_bytes` per rank.

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
