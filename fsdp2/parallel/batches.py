"""The arithmetic of batch sizes. Layer: parallel; pure.

    global batch = micro batch x accumulation x data ranks

A *micro batch* is the input of one forward and backward on a rank (within a pipeline: the input of the first stage for
one step of the schedule). *Accumulation* is the number of micro batches per rank and optimizer step. *Data ranks* is
the number of different batches: the ranks of tensor, context and pipeline parallelism share one.
"""

from dataclasses import dataclass
from typing import Any

from fsdp2.errors import ArgumentError

__all__ = ["BatchSizes", "batch_sizes"]


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes that fit together: ``global_batch == micro_batch * accumulation * data_ranks``.

    Attributes:
        global_batch: samples in an optimizer step, over all ranks; the effective batch size.
        micro_batch: samples in one forward and backward of one rank.
        accumulation: micro batches of one rank in an optimizer step.
        data_ranks: number of ranks with different batches.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    data_ranks: int


def batch_sizes(
    data_ranks: int,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
) -> BatchSizes:
    """Compute all batch sizes from some of them.

    Given two of the three sizes, it computes the third. With `global_batch` or `micro_batch` alone, `accumulation` is
    1. If all three are given, they are checked.

    Args:
        data_ranks: of the resolved config or the meshes.
        global_batch: in samples.
        micro_batch: in samples.
        accumulation: micro batches a step.

    Raises:
        ArgumentError: the sizes are inconsistent; the message shows the arithmetic.

    Example::

        sizes = batch_sizes(meshes.data_ranks, global_batch=256, micro_batch=4)
        for _ in range(sizes.accumulation): ...
    """
    given: dict[str, Any] = {"global_batch": global_batch, "micro_batch": micro_batch, "accumulation": accumulation}
    for name, value in {"data_ranks": data_ranks, **given}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"batch_sizes: expected {name} to be a whole number, 1 or more; got {value!r}")
    if global_batch is None:
        if micro_batch is None:
            raise ArgumentError("batch_sizes: expected global_batch, micro_batch or both; got neither")
        accumulation = accumulation or 1
        return BatchSizes(micro_batch * accumulation * data_ranks, micro_batch, accumulation, data_ranks)
    if micro_batch is None:
        accumulation = accumulation or 1
        micro_batch = global_batch // (accumulation * data_ranks)
        _check(global_batch, {"accumulation": accumulation, "data ranks": data_ranks})
    elif accumulation is None:
        accumulation = global_batch // (micro_batch * data_ranks)
        _check(global_batch, {"micro batch": micro_batch, "data ranks": data_ranks})
    product = micro_batch * accumulation * data_ranks
    if global_batch != product:
        raise ArgumentError(
            f"global batch {global_batch}, but {micro_batch} (micro batch) x {accumulation} (accumulation) x "
            f"{data_ranks} (data ranks) = {product}: leave one of the three out, and it follows from the others"
        )
    return BatchSizes(global_batch, micro_batch, accumulation, data_ranks)


def _check(global_batch: int, parts: dict[str, int]) -> None:
    """Check that the global batch is a multiple of the product of the parts."""
    unit = 1
    for size in parts.values():
        unit *= size
    if global_batch % unit:
        shown = " x ".join(f"{size} ({name})" for name, size in parts.items())
        below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        raise ArgumentError(f"global batch {global_batch} is not a multiple of {shown} = {unit}: choose {near}")
