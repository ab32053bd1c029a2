"""Random values in blocks of the whole tensor; a rank draws only the blocks that contain its elements. Layer: init.

A block is `BLOCK_NUMEL` consecutive elements in row-major order, whatever the strides. torch's own operation draws it
as a whole, from a generator that is seeded with the operation's key and the block's number. So values do not depend on
the sharding, and a rank that owns rows draws little more than these.

torch's CPU generator uses the low 32 bits of a seed. They are different for the blocks of one operation; two operations
with n blocks in total have a block in common with a probability of about n / 2**32.
"""

from math import prod

import torch

from fsdp2.init.sequential import Draw, Target, fill_span, own_views
from fsdp2.layout import strides

__all__ = ["BLOCK_NUMEL", "fill_blocks"]

BLOCK_NUMEL = 1 << 15


def fill_blocks(target: Target, draw: Draw, key: int) -> None:
    """Fill ``target.local``. No communication.

    Args:
        draw: the operation, for a 1-D tensor on the device of the target.
        key: 64 bits, the same on all ranks, and different for each call.
    """
    if not target.local.numel():
        return
    steps = strides(target.shape)
    first = sum(start * step for start, step in zip(target.box.start, steps, strict=True))
    last = sum((end - 1) * step for end, step in zip(target.box.end, steps, strict=True))
    numel = prod(target.shape)
    generator = torch.Generator(target.local.device)
    block = target.local.new_empty(min(BLOCK_NUMEL, numel))
    for number in range(first // BLOCK_NUMEL, last // BLOCK_NUMEL + 1):
        start = number * BLOCK_NUMEL
        piece = block[: numel - start]
        if next(own_views(target, piece, start), None) is not None:
            generator.manual_seed((key + number) % 2**63)
            fill_span(target, draw, generator, piece, start)
