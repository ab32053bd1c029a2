"""Stochastic rounding to bfloat16 that does not depend on the number of ranks. Layer: optim.

A step of a bfloat16 parameter is often smaller than half of the distance to the next bfloat16 number, so rounding to
nearest loses it. Here a number is rounded up with a probability that is its distance from the lower neighbour, so the
mean is right. The random bits are those of `init.counter`: a function of a key and of the element's index in the whole
tensor, so each rank computes those of its own elements.
"""

from math import prod

import torch

from fsdp2.init.counter import indices, words
from fsdp2.init.owned import Owned

__all__ = ["key_of", "round_to_bfloat16"]


def key_of(seed: int, number: int, step: int) -> int:
    """64 bits for one step of the parameter with this number."""
    return int(words(torch.tensor([(number << 32) + step]), seed).item())


def round_to_bfloat16(values: torch.Tensor, owned: Owned, first: int, key: int) -> torch.Tensor:
    """`values`, fp32, rounded at random to one of their two neighbours; overwrites `values`.

    Args:
        values: a contiguous span of rows (dim 0) of this rank's elements.
        owned: which elements of the whole tensor this rank has.
        first: the row of this rank's tensor at which `values` begins.
        key: the same on all ranks.
    """
    dims = indices(owned, values.device)
    shape = values.shape
    numbers = torch.zeros(shape, dtype=torch.int64, device=values.device)
    for dim, each in enumerate(dims):
        own = each[first : first + shape[0]] if dim == 0 else each
        numbers += own.view([-1 if other == dim else 1 for other in range(len(shape))])
    noise = words(numbers.view(prod(shape)), key).bitwise_and_(0xFFFF).to(torch.int32).view(shape)
    # Only finite numbers: to the bits of a NaN or an infinity nothing may be added.
    bits = values.view(torch.int32).add_(noise.mul_(values.isfinite()))
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)
