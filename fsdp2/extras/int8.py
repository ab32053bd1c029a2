"""int8 with one scale per block: an all-gather with a quarter of the bytes of fp32, half those of bf16. Layer: extras.

`Int8Gather` gives a parameter the hooks of `runtime.extension`; ``MixedPrecisionPolicy(all_gather_dtype=torch.int8)``
asks for it. The rest are pure functions.

Symmetric, by the largest magnitude of the block, like the quantised weights of ZeRO++ (qwZ, arXiv:2306.10209, 3.1):
with one scale for a whole tensor an outlier would leave no precision for all others. Every dim but the
last is a batch dim, so that the data of several ranks is dequantised in one call::

    x  [..., n]   ->   q int8 [..., n],  scales fp32 [..., ceil(n / block)]         x is near q * scale

Scales are fp32: 1.6 % of the bytes at 256 elements a block. bf16 scales would save half of that, but the
largest values would be off by up to a quarter of a step, and also be clipped.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch.nn.functional import pad

from fsdp2._torch import foreach_copy
from fsdp2.errors import ArgumentError
from fsdp2.runtime import hooks
from fsdp2.runtime.packing import interleave
from fsdp2.runtime.parameter import ManagedParameter

DEFAULT_BLOCK = 256
_MAX = 127  # -128 is not used: symmetric


def quantise(values: torch.Tensor, block: int = DEFAULT_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest int8 multiples of each block's scale, and the scales.

    Args:
        values: ``[..., n]``, floating point; read in fp32.
        block: elements of the last dim that share a scale; the last block may be shorter.

    Returns:
        int8 ``[..., n]`` and fp32 ``[..., ceil(n / block)]``. A finite value differs from its dequantised value by at
        most half a scale (and fp32 rounding). A block with an infinity or a NaN has scale NaN and comes back as NaN.

    Raises:
        ArgumentError: `values` are not floating point, have no dim, or `block` is less than 1.

    Example:
        >>> quantise(torch.tensor([-2.54, 0.0, 0.021]), block=2)
        (tensor([-127,    0,  127], dtype=torch.int8), tensor([0.0200, 0.0002]))
    """
    if not values.is_floating_point() or values.dim() == 0:
        raise ArgumentError(f"quantise: expected floating-point values [..., n], got {values.dtype} of {values.shape}")
    if block < 1:
        raise ArgumentError(f"quantise: expected a block of at least 1 element, got {block}")
    numel = values.shape[-1]
    num_blocks = -(-numel // block)
    blocks = pad(values.float(), (0, num_blocks * block - numel)) if numel % block else values.float()
    blocks = blocks.unflatten(-1, (num_blocks, block))
    largest = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())  # on the CPU ten times as fast as an infinity norm
    # At least the smallest normal number: blocks of zeros divide by it, and subnormal scales would lose precision.
    scales = largest.div_(_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
    scales.masked_fill_(scales.isinf(), float("nan"))
    # Within -127..127, because nothing exceeds the largest of its block.
    steps = (blocks / scales.unsqueeze(-1)).round_().nan_to_num_(nan=0.0)
    return steps.to(torch.int8).flatten(-2)[..., :numel].contiguous(), scales


def dequantise(q: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """``out = q * scale`` of each block, computed in fp32 and rounded to `out`'s dtype.

    Args:
        q: int8 ``[..., n]``, contiguous.
        scales: fp32 ``[..., ceil(n / block)]``.
        block: as for `quantise`.
        out: ``[..., n]``, floating point, with any strides.

    Raises:
        ArgumentError: the shapes do not match.
    """
    *batch, numel = q.shape
    if scales.shape != (*batch, -(-numel // block)) or out.shape != q.shape:
        raise ArgumentError(
            f"dequantise: for q {tuple(q.shape)} in blocks of {block}, expected scales {(*batch, -(-numel // block))} "
            f"and out {tuple(q.shape)}; got {tuple(scales.shape)} and {tuple(out.shape)}"
        )
    num_full = numel // block
    whole = num_full * block
    if whole:
        shape = (num_full, block)
        blocks, target = q[..., :whole].unflatten(-1, shape), out[..., :whole].unflatten(-1, shape)
        torch.mul(blocks, scales[..., :num_full, None], out=target)
    if numel > whole:
        torch.mul(q[..., whole:], scales[..., num_full:], out=out[..., whole:])


class Int8Gather:
    """The `Extension` of one floating-point parameter with ``MixedPrecisionPolicy(all_gather_dtype=torch.int8)``. Every
    rank dequantises the same numbers, including its own rows, so all ranks compute with the same parameters::

        padded shard --quantise--> int8, scales ==collective==> those of all ranks --dequantise--> unsharded parameter
    """

    def __init__(self, param: ManagedParameter):
        self._param = ref(param)

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[Sequence[torch.Tensor], None]:
        """int8 ``[padded shard numel]`` and fp32 ``[number of blocks]``."""
        param = self._param()
        assert param is not None
        flat = param.flat.to(param.roles.device, non_blocking=True)
        return quantise(flat, DEFAULT_BLOCK), None

    def fsdp_post_all_gather(
        self,
        gathered: Sequence[torch.Tensor],
        _metadata: None,
        param_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]] | None:
        """Dequantise into the parameter."""
        param = self._param()
        assert param is not None
        whole = (
            param.whole
            if out is not None
            else torch.empty(param.layout.shape, dtype=param_dtype, device=gathered[0].device)
        )
        assert whole is not None
        size, layout = param.layout.parts, param.layout
        ints, scales = gathered[0].view(size, -1), gathered[1].view(size, -1)
        if layout.dim == 0 and layout.even:
            dequantise(ints, scales, DEFAULT_BLOCK, whole.view(size, -1))
        else:
            rows = torch.empty(size, layout.padded_numel, dtype=param_dtype, device=whole.device)
            dequantise(ints, scales, DEFAULT_BLOCK, rows)
            pairs = interleave(rows, 0, whole, layout)
            foreach_copy([destination for _, destination in pairs], [source for source, _ in pairs])
        if out is not None:
            return None
        tensor = param.geometry.from_memory(whole)
        return tensor, [tensor]

    @staticmethod
    def fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool:
        """The integers are not needed once they are dequantised."""
        return True


hooks.gather_dtypes[torch.int8] = Int8Gather
