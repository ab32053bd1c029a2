"""Where the sum of gradients is divided: pure arithmetic (tests/behaviour.md, 124-131). Layer: comm.

In fp32 and bf16 each collective averages if the backend can, unless the user forces sums or sets a factor. (If the
factor is the size of the shard axis, only the reduce-scatter averages.) The rest is divided at the end. fp16 overflows
at 65504, so values are divided by about the square root of the divisor before the sum, and by the rest after it.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Scaling:
    """How one reduction is scaled.

    Attributes:
        pre: gradients are divided by it before the reduce-scatter.
        scatter_averages: the reduce-scatter divides by its group's size.
        all_reduce_averages: the all-reduce divides by its group's size.
        post: the result is divided by it after the last collective.
    """

    pre: float = 1.0
    scatter_averages: bool = False
    all_reduce_averages: bool = False
    post: float = 1.0

    def after_scatter(self, replicate_size: int) -> float:
        """The divisor of a sum over the replicas, once the reduce-scatter is done."""
        return self.post * (replicate_size if self.all_reduce_averages else 1)


def fp16_factors(factor: float) -> tuple[float, float]:
    """Split `factor` into a power of two before the sum and the rest after it, as equal as possible.

    >>> fp16_factors(8)
    (4.0, 2.0)
    """
    pre = 1
    while factor % pre == 0 and factor / pre > pre:
        pre *= 2
    return float(pre), factor / pre


@lru_cache(maxsize=256)  # the factor may differ in each step
def scaling_for(
    dtype: torch.dtype, shard_size: int, replicate_size: int, factor: float | None, averages: tuple[bool, bool]
) -> Scaling:
    """The scaling of a reduction in `dtype` over ``shard_size * replicate_size`` ranks. `factor`: the divisor of the
    sum over all ranks (None: their number). `averages`: whether the reduce-scatter and the all-reduce may divide."""
    ranks = shard_size * replicate_size
    divisor = float(ranks if factor is None else factor)
    if dtype == torch.float16 and ranks > 1:
        pre, post = fp16_factors(divisor)
        return Scaling(pre=pre, post=post)
    over_shards = averages[0] and shard_size > 1 and factor in (None, shard_size)
    over_replicas = averages[1] and replicate_size > 1 and factor is None
    divisor /= (shard_size if over_shards else 1) * (replicate_size if over_replicas else 1)
    return Scaling(1.0, over_shards, over_replicas, divisor)
