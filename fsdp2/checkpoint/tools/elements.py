"""How two ranges of elements differ. Pure: bytes in, numbers out."""

from dataclasses import dataclass

import torch

from fsdp2.checkpoint.schema.dtypes import DTYPES

__all__ = ["Distance", "distance_of", "joined"]

STEP = 1 << 16  # elements compared at a time, in double precision
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Distance:
    """How elements differ.

    Attributes:
        num: the number of elements that differ.
        max_abs: the largest absolute difference; infinite where only one of two elements is NaN.
        at: index of the first one; -1 if none differs.
    """

    num: int = 0
    max_abs: float = 0.0
    at: int = -1


def distance_of(first: bytearray, dtype: str, second: bytearray, other: str) -> Distance:
    """Compare elements: bitwise, or with two dtypes by value."""
    if dtype == other and first == second:
        return Distance()
    raw = torch.frombuffer(first, dtype=torch.uint8), torch.frombuffer(second, dtype=torch.uint8)
    both = raw[0].view(DTYPES[dtype]), raw[1].view(DTYPES[other])
    result = Distance()
    for at in range(0, both[0].numel(), STEP):
        found = _step(both[0][at : at + STEP], both[1][at : at + STEP])
        if found.num:
            result = joined(result, Distance(found.num, found.max_abs, found.at + at))
    return result


def _step(first: torch.Tensor, second: torch.Tensor) -> Distance:
    one, two = _comparable(first), _comparable(second)
    equal = (one == two) | (one.isnan() & two.isnan())
    distance = torch.where(equal, 0.0, (one - two).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
    if first.dtype == second.dtype:
        bits = INTEGERS[first.dtype.itemsize]
        equal = first.view(bits) == second.view(bits)
    indices = (~equal).nonzero()
    return Distance(len(indices), float(distance.max()), int(indices[0])) if len(indices) else Distance()


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """Values in a dtype that supports arithmetic."""
    if values.is_complex():
        return values.to(torch.complex128)
    return (values.float() if values.dtype.itemsize == 1 else values).to(torch.float64)


def joined(first: Distance, second: Distance) -> Distance:
    """The distance of two ranges together, of which the first comes before the second."""
    at = first.at if first.num else second.at
    return Distance(first.num + second.num, max(first.max_abs, second.max_abs), at)
