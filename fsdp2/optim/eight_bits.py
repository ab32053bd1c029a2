"""Floating-point numbers of 8 bits, relative to the largest of each block of a row. Layer: optim, pure.

::

    x  [rows, n]   ->   codes uint8 [rows, n],  scales fp32 [rows, ceil(n / 256)]           scale = the largest |x|

The blocks begin anew in each row, so whoever holds whole rows holds whole blocks: a tensor that is cut along dim 0 has
the same codes and scales in any number of parts.

A code is the upper end of the bits of the fp32 number |x| / scale: a binary exponent (16 of them) and the first bits of
the fraction, rounded to nearest. So the *relative* error is the same over the whole range, as Adam needs, which divides
the moments of each element by each other::

    signed      sign, 7 bits    3 bits of the fraction    relative error <= 6.3 %    from 1.25 * 2 ** -16;  0
    unsigned    8 bits          4 bits of the fraction    relative error <= 3.2 %    from 1.0625 * 2 ** -16

In the unsigned code numbers that are smaller, and 0, become the smallest one, because they will be divided by; only a
block of zeros stays zero. All operations round once (there is no multiply-add), so that an element's value does not
depend on where in memory it is.

Blockwise quantisation of optimizer states is from Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861), which has other codes.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

__all__ = ["BLOCK", "SIGNED", "UNSIGNED", "Code", "num_blocks"]

BLOCK = 256

_SIGN = -(2**31)  # the sign bit of an int32
_ONE = 0x3F800000  # the bits of 1.0


def num_blocks(row_numel: int) -> int:
    """How many blocks a row has."""
    return -(-row_numel // BLOCK)


@dataclass(frozen=True)
class Code:
    """One of the two codes.

    Attributes:
        is_signed: the highest bit is the sign; else all numbers are 0 or above.
    """

    is_signed: bool

    @property
    def _largest(self) -> int:
        """The code of 1.0."""
        return 127 if self.is_signed else 255

    @property
    def _dropped(self) -> int:
        """How many bits of an fp32 fraction the code does not have."""
        return 20 if self.is_signed else 19

    @property
    def _base(self) -> int:
        """What is subtracted from the bits that are kept."""
        return (_ONE >> self._dropped) - self._largest

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of `values`.

        Args:
            values: fp32 ``[rows, n]``. A block with an infinity or a NaN decodes to NaN.

        Returns:
            uint8 ``[rows, n]`` and fp32 ``[rows, ceil(n / 256)]``.
        """
        rows, numel = values.shape
        blocks = num_blocks(numel)
        padded = pad(values, (0, blocks * BLOCK - numel)) if numel % BLOCK else values.contiguous()
        padded = padded.view(rows, blocks, BLOCK)
        sizes = padded.abs()
        scales = sizes.amax(-1) if blocks else sizes.new_empty(rows, 0)
        # Blocks of zeros divide by the smallest normal number instead.
        sizes.div_(scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
        codes = sizes.view(torch.int32)
        codes.add_(1 << (self._dropped - 1)).bitwise_right_shift_(self._dropped).sub_(self._base)
        codes.clamp_(0, self._largest)
        if self.is_signed:
            codes.bitwise_or_((padded.view(torch.int32) >> 24).bitwise_and_(128))
        return codes.to(torch.uint8).view(rows, blocks * BLOCK)[:, :numel], scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The numbers, fp32 ``[rows, n]``, in memory of their own.

        Args:
            codes: uint8 ``[rows, n]``.
            scales: fp32 ``[rows, ceil(n / 256)]``.
        """
        numel = codes.shape[1]
        wide = codes.to(torch.int32)
        if self.is_signed:
            sizes = wide & self._largest
            bits = (sizes + self._base).mul_(sizes.clamp_(max=1)).bitwise_left_shift_(self._dropped)  # 0 is 0
            bits.bitwise_or_(wide.bitwise_left_shift_(24).bitwise_and_(_SIGN))
        else:
            bits = wide.add_(self._base).bitwise_left_shift_(self._dropped)
        values = bits.view(torch.float32)
        blocks, whole = num_blocks(numel), numel // BLOCK
        if whole:
            values[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).mul_(scales[:, :whole].unsqueeze(-1))
        if blocks > whole:
            values[:, whole * BLOCK :].mul_(scales[:, whole:])
        return values


SIGNED = Code(is_signed=True)
UNSIGNED = Code(is_signed=False)
