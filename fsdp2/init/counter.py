"""Random values computed from an element's position in its tensor, so each rank generates only its own. Layer: init.

The value of an element is a function of the operation's key (64 bits, the same on all ranks) and of the element's index
in the whole tensor (row by row, whatever its strides). This is a counter-based generator, with the output function of
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014; its mixer is Stafford's 13th).
The conversion of 64 random bits to a value uses only `arithmetic`, so that the bits are also the same on every device.
One value takes one word; none is rejected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fsdp2.errors import UnsupportedError
from fsdp2.init.arithmetic import exp, log, normal_quantile, sin_cos_half_pi
from fsdp2.init.sequential import spans
from fsdp2.layout import strides
from fsdp2.placement.box import Box, boxes_of_flat_range

__all__ = ["DISTRIBUTIONS", "fill_by_counter", "words"]

SPAN_NUMEL = 1 << 16  # values generated at a time: the few float64 tensors for these stay in the cache

# Constants of SplitMix64 as signed numbers, whose products wrap around in the same way.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def words(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """64 random bits for each of the int64 `numbers`, which are overwritten."""
    z = numbers.mul_(GOLDEN).add_(key)
    z.bitwise_xor_(_shifted(z, 30)).mul_(MIX_1)
    z.bitwise_xor_(_shifted(z, 27)).mul_(MIX_2)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros. torch's shift of a signed number fills with its sign."""
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _fraction(z: torch.Tensor, digits: int = 53) -> torch.Tensor:
    """A multiple of ``2 ** -digits``, from 0 (included) to 1 (excluded)."""
    return _shifted(z, 64 - digits).to(torch.float64).mul_(2.0**-digits)


def _inner_fraction(z: torch.Tensor) -> torch.Tensor:
    """Strictly between 0 and 1, and symmetric."""
    return _shifted(z, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _divided(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place by a tensor on the same device. With a Python number, CUDA multiplies by the reciprocal, whose
    last bit may differ."""
    return values.div_(values.new_tensor(divisor))


@dataclass(frozen=True)
class _Request:
    """What a distribution may need: the dtype to fill, and the elements of a tensor argument."""

    dtype: torch.dtype
    operand: torch.Tensor | None


def _normal(z: torch.Tensor, request: _Request, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return normal_quantile(_inner_fraction(z)).mul_(std).add_(mean)


def _log_normal(z: torch.Tensor, request: _Request, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return exp(_normal(z, request, mean, std))


def _uniform(z: torch.Tensor, request: _Request, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    values = _fraction(z, DIGITS[request.dtype]).mul_(high - low).add_(low)
    # Rounding to a narrow dtype must not reach `high`, which is excluded.
    limits = torch.tensor([low, high], dtype=request.dtype, device="cpu")
    below = max(torch.nextafter(limits[1], limits[0]).item(), limits[0].item())
    return values.clamp_(max=below) if low < high else values


def _exponential(z: torch.Tensor, request: _Request, rate: float = 1.0) -> torch.Tensor:
    return _divided(log(_inner_fraction(z)).neg_(), rate)


def _cauchy(z: torch.Tensor, request: _Request, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    sine, cosine = sin_cos_half_pi(_inner_fraction(z).mul_(2.0).sub_(1.0))
    return (sine / cosine).mul_(sigma).add_(median)


def _geometric(z: torch.Tensor, request: _Request, p: float) -> torch.Tensor:
    of_failure = log(torch.tensor([1.0 - p], dtype=torch.float64, device="cpu")).item()
    return _divided(log(_inner_fraction(z)), of_failure).ceil_().clamp_(min=1.0)


def _bernoulli(z: torch.Tensor, request: _Request, p: float = 0.5) -> torch.Tensor:
    if request.operand is not None:
        return _fraction(z) < request.operand.to(torch.float64)
    return _fraction(z) < p


def _random(z: torch.Tensor, request: _Request, *bounds: int | None) -> torch.Tensor:
    """``random_()``, ``random_(to)`` or ``random_(from, to)``; `to` may be None, for all values of the dtype."""
    low = bounds[0] or 0 if len(bounds) == 2 else 0
    high = bounds[-1] if bounds else None
    if high is None:
        high = _last_integer(request.dtype) + 1
    width = high - low
    if width >= 2**64:
        return z
    if width > 2**63:
        raise UnsupportedError(
            f"random_ from {low} to {high} in mode 'counter': expected at most 2 ** 63 different values, or all of "
            "int64; use mode 'sequential'"
        )
    return (_shifted(z, 1) if width == 2**63 else _shifted(z, 1).remainder_(width)).add_(low)


def _last_integer(dtype: torch.dtype) -> int:
    """The largest n such that a dtype has all integers up to n, as `Tensor.random_` counts them."""
    if dtype == torch.bool:
        return 1
    return int(2 ** DIGITS[dtype]) if dtype.is_floating_point else int(torch.iinfo(dtype).max)


# By the name of the in-place operation. Each turns words and the call's scalars into values (float64, int64 or bool).
DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "normal_": _normal,
    "uniform_": _uniform,
    "bernoulli_": _bernoulli,
    "random_": _random,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "log_normal_": _log_normal,
    "geometric_": _geometric,
}


def fill_by_counter(
    local: torch.Tensor,
    own: Box,
    whole: tuple[int, ...],
    name: str,
    scalars: Sequence[Any],
    key: int,
    operand: torch.Tensor | None = None,
) -> None:
    """Fill `local`, this rank's elements `own` of a tensor of shape `whole`. No communication.

    Args:
        name: of an operation in `DISTRIBUTIONS`.
        scalars: its arguments, by position; missing ones have torch's defaults.
        key: any integer, of which 64 bits are used; the same on all ranks, and different for each call.
        operand: this rank's elements of a tensor argument, in the shape of `local`.
    """
    if local.is_complex():  # a real and an imaginary part, each with half of the variance
        if name == "normal_":
            mean = scalars[0] if scalars else 0.0
            std = scalars[1] if len(scalars) > 1 else 1.0
            scalars = (mean, std * 0.5**0.5)
        own, whole = Box((*own.start, 0), (*own.shape, 2)), (*whole, 2)
        local = torch.view_as_real(local)
    key = (key + 2**63) % 2**64 - 2**63
    numbers = [
        torch.arange(low, high, device=local.device) * step
        for low, high, step in zip(own.start, own.end, strides(whole), strict=True)
    ]
    for start, stop in spans(local.numel(), SPAN_NUMEL, 1):
        for box in boxes_of_flat_range(tuple(local.shape), start, stop):
            at, shape = box.slices(), box.shape
            flat = torch.zeros(shape, dtype=torch.int64, device=local.device)
            for dim, entries in enumerate(at):
                flat += numbers[dim][entries].view([-1 if other == dim else 1 for other in range(len(shape))])
            request = _Request(local.dtype, None if operand is None else operand[at].flatten())
            values = DISTRIBUTIONS[name](words(flat.view(prod(shape)), key), request, *scalars)
            local[at].copy_(_rounded(values, local.dtype).view(shape))


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to `dtype`; to 16-bit dtypes through float32, on every device."""
    if values.is_floating_point() and dtype in (torch.float16, torch.bfloat16):
        return values.to(torch.float32).to(dtype)
    return values.to(dtype)
