"""The matrices of a parameter, and which rank has which part of each. Pure. Layer: optim.

An optimizer such as Muon looks at one matrix as a whole. Most parameters are one matrix; the weights of a mixture's
experts are a stack of them, and a fused projection is several, one above the other, which must not be mixed::

    shape (m, n)                 one matrix
    shape (m, n), split (a, b)   its first a rows, and the other b
    shape (e, m, n)              e matrices; with `split`, each of them is split
    any other                    one tensor, as it is: whether it can be stepped is for the optimizer to say
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from fsdp2.errors import ArgumentError
from fsdp2.placement.box import Box, whole
from fsdp2.placement.tiling import Tiling

__all__ = ["Share", "Split", "boxes_of_matrices", "cost_of", "shape_of_matrix"]

# How the rows of a matrix are divided: into that many equal parts, or into parts of these sizes; None: not at all.
Split = int | Sequence[int] | None


def boxes_of_matrices(name: str, shape: Sequence[int], split: Split) -> list[Box]:
    """The parts of a parameter of `shape` that are matrices of their own, in row-major order.

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
    """The shape that the optimizer sees: without the dim along which matrices are stacked."""
    return box.shape[1:] if len(box.shape) == 3 else box.shape


def cost_of(box: Box) -> int:
    """An estimate of the work of a step: that of products of a matrix with its smaller Gram matrix (Newton-Schulz,
    Shampoo), up to a factor."""
    shape = shape_of_matrix(box)
    return prod(shape) * (min(shape) if len(shape) == 2 else 1)


@dataclass(frozen=True, eq=False)
class Share:
    """One matrix of a sharded parameter, as every rank of its mesh sees it.

    Attributes:
        name: of the parameter, for messages.
        group, position: of the parameter, among the param groups.
        number, box: of the matrix, among those of the parameter.
        num_matrices: of the parameter.
        tiling: of the parameter.
        owner: the global rank that steps the matrix.
        dtype, grad_dtype: of the parameter and its gradient.
    """

    name: str
    group: int
    position: int
    number: int
    num_matrices: int
    box: Box
    tiling: Tiling
    owner: int
    dtype: torch.dtype
    grad_dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, as the optimizer sees it."""
        return shape_of_matrix(self.box)

    @property
    def wire_dtype(self) -> torch.dtype:
        """One that represents its values and its gradient exactly."""
        return torch.promote_types(self.dtype, self.grad_dtype)

    def piece_of(self, rank: int) -> Box | None:
        """What `rank` has of the matrix, in coordinates of the parameter; None for nothing."""
        box = self.tiling.box_of(rank)
        return None if box is None else box.intersect(self.box)

    def within_local(self, piece: Box, rank: int) -> tuple[slice, ...]:
        """The index of a piece in the local tensor of `rank`."""
        box = self.tiling.box_of(rank)
        assert box is not None
        return piece.within(box).slices()

    def within_whole(self, piece: Box) -> tuple[slice, ...]:
        """The index of a piece in a tensor of the matrix's box."""
        return piece.within(self.box).slices()

    def sends(self, rank: int) -> bool:
        """Whether the owner takes the piece of `rank`: of several replicas, those of its own."""
        grid = self.tiling.grid
        at, home = grid.coordinates(rank), grid.coordinates(self.owner)
        assert at is not None and home is not None
        return all(at[axis] == home[axis] for axis in self.tiling.free_axes)
