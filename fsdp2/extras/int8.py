"""int8 all-gathers with one scale per block: a quarter of the bytes of fp32, half of those of bf16. Layer: extras.

`Int8Shards` is the source of groups with ``MixedPrecisionPolicy(all_gather_dtype=torch.int8)``; the functions are pure.

Symmetric quantisation by the largest magnitude of each block, like the weights of ZeRO++ (qwZ, arXiv:2306.10209, 3.1):
with one scale for a whole tensor, an outlier would leave no precision for all other values. Every dim but the last is a
batch dim, so that the data of several ranks is dequantised in one call::

    x  [..., n]   ->   q int8 [..., n],  scales fp32 [..., ceil(n / block)]         x is near q * scale

Scales are fp32: 1.6 % of the bytes at 256 elements per block. bf16 scales would save half of that, but the largest
values would be off by up to a quarter of a step, and be clipped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import pad

from fsdp2._torch import foreach_copy
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.layout import ShardLayout
from fsdp2.mesh import MeshRoles
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.packing import interleave
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.source import Shards
from fsdp2.runtime.storage import FlatStorage

DEFAULT_BLOCK = 256
_MAX = 127  # symmetric: -128 is not used


def quantise(values: torch.Tensor, block: int = DEFAULT_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest int8 multiples of each block's scale, and the scales.

    Args:
        values: ``[..., n]``, floating point; read in fp32.
        block: elements of the last dim that share a scale; the last block may be shorter.

    Returns:
        int8 ``[..., n]`` and fp32 ``[..., ceil(n / block)]``. A finite value differs from its dequantised value by at
        most half a scale (and fp32 rounding). A block with an infinity or a NaN has scale NaN and comes back as NaN.

    Raises:
        ArgumentError: `values` is not floating point or has no dim, or `block` is less than 1.

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


class Int8Shards(Shards):
    """Gathers shards in int8. Every rank dequantises the same numbers, including its own rows, so all ranks compute
    with the same parameters::

        | weight | bias | --quantise--> int8, scales ==collective==> those of all ranks --dequantise--> parameters

    Each parameter's padded shard starts a new block, and its last block is filled up with zeros.
    """

    def __init__(self, group: Bucket):
        super().__init__(group)
        blocks = [-(-param.layout.padded_numel // DEFAULT_BLOCK) for param in group.params]
        self._first = [0, *accumulate(blocks)]  # the block at which each shard begins; the number of blocks
        size, count = group.roles.shard_size, self._first[-1]
        self._raw = FlatStorage(size * count * (DEFAULT_BLOCK + torch.float32.itemsize), group.roles.device)
        with torch.inference_mode(False), torch.no_grad():
            self._raw.alloc()
            self._ints = self._raw.view(0, (size, count * DEFAULT_BLOCK), torch.int8)
            self._scales = self._raw.view(self._ints.nbytes, (size, count), torch.float32)
            self._raw.free()

    def _plan(self, group: Bucket) -> Gather:
        with torch.inference_mode(False), torch.no_grad():
            self._raw.alloc()
            fulls = [self._ints.view(-1), self._scales.view(-1)]
            layouts = [ShardLayout((full.numel(),), 0, group.roles.shard_size) for full in fulls]
            self.gather = Gather(layouts, fulls, group.roles.shard, group.channel)
        return self.gather

    def start(self, group: Bucket) -> Callable[[], None]:
        values = torch.zeros(self._first[-1] * DEFAULT_BLOCK, device=group.roles.device)
        for param, block in zip(group.params, self._first, strict=False):
            first = block * DEFAULT_BLOCK
            flat = param.flat.to(values.device, non_blocking=True)  # it is cast there too
            values[first : first + flat.numel()].copy_(flat)
        ints, scales = quantise(values.view(-1, DEFAULT_BLOCK))
        gather, sent = self.gather or self._plan(group), [ints.view(-1), scales.view(-1)]
        return partial(self._finish, group.params, gather.start(sent, False, self._raw))

    def _finish(self, params: Sequence[ManagedParameter], finish_gather: Callable[[], None]) -> None:
        finish_gather()
        self.alloc()
        for param, (block, end) in zip(params, pairwise(self._first), strict=True):
            whole, layout, first = param.whole, param.layout, block * DEFAULT_BLOCK
            assert whole is not None
            ints, scales = self._ints[:, first : first + layout.padded_numel], self._scales[:, block:end]
            if layout.dim == 0 and layout.even:
                dequantise(ints, scales, DEFAULT_BLOCK, whole.view(layout.parts, -1))
            else:
                rows = torch.empty(ints.shape, dtype=whole.dtype, device=whole.device)
                dequantise(ints, scales, DEFAULT_BLOCK, rows)
                pairs = interleave(rows, 0, whole, layout)
                foreach_copy([destination for _, destination in pairs], [source for source, _ in pairs])
        self._raw.free()


def _source_of(group: Bucket) -> Int8Shards | None:
    return Int8Shards(group) if group.params[0].plan.gather_dtype is torch.int8 else None


def _is_sent_in_int8(param: torch.Tensor, roles: MeshRoles) -> bool:
    if roles.sharded_replicas:
        raise UnsupportedError("all_gather_dtype cannot be combined with shard_replicas")
    return param.dtype.is_floating_point and roles.shard_size > 1


hooks.gather_dtypes[torch.int8] = _is_sent_in_int8
hooks.sources.append(_source_of)
