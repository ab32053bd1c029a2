"""`ReductionPlan`: the lanes, dtypes and sizes of a reduction, reused while the same parameters of a group are reduced.
Layer: runtime."""

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import NamedTuple

import torch

from fsdp2.layout import Lane
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.parameter import ManagedParameter, Partial


class Contribution(NamedTuple):
    """What one parameter contributes to a reduction: a whole gradient (dims in memory order), or a partial gradient
    that an earlier backward left for this all-reduce, or both."""

    param: ManagedParameter
    grad: torch.Tensor | None
    partial: Partial | None


class ReductionPlan:
    """Valid only for the parameters, and the set of present gradients, that it was built from.

    Attributes:
        channel: how the gradients are communicated.
        dtype: the dtype in which they are summed: the promotion of the parameters' reduce dtypes.
        wire_dtype: the dtype in which they are sent.
        order: the order of the contributions: packed ones first, so that their outputs are contiguous in the flat
            output; those without a gradient last.
        params: the parameters, in that order.
        sizes: the number of elements of each output, in that order.
        scattered_numel, packed_numel: the number of elements of all outputs with a gradient, and of the packed ones.
        packed_layouts: the layouts of the packed parameters.
        grad_dtypes, grad_specs: the dtypes and specs of the sharded gradients.
        casts_outputs: whether the gradients' dtypes or devices differ from the reduction's.
    """

    def __init__(self, contributions: Sequence[Contribution], channel: Channel):
        self.channel = channel
        params = [each.param for each in contributions]
        self.dtype: torch.dtype = reduce(torch.promote_types, [param.reduce_dtype for param in params])
        wanted = params[0].plan.policy.reduce_scatter_dtype
        is_narrower = wanted is not None and self.dtype.is_floating_point and wanted.itemsize < self.dtype.itemsize
        self.wire_dtype = wanted if wanted is not None and is_narrower else self.dtype
        itemsize = self.wire_dtype.itemsize
        lanes = [
            None if each.grad is None else channel.comm.scatter_lane(each.param.layout, itemsize)
            for each in contributions
        ]
        self.order = sorted(
            range(len(lanes)), key=lambda index: (lanes[index] is not Lane.PACKED, lanes[index] is None)
        )
        self.params = params = [params[index] for index in self.order]
        num_packed, num_scattered = lanes.count(Lane.PACKED), len(lanes) - lanes.count(None)
        self.sizes = [param.layout.padded_numel for param in params]
        self.scattered_numel = sum(self.sizes[:num_scattered])
        self.packed_numel = sum(self.sizes[:num_packed])
        self.packed_layouts = [param.layout for param in params[:num_packed]]
        self.grad_dtypes = [param.grad_dtype for param in params]
        self.grad_specs = [
            param.plan.specs.sharded(dtype) for param, dtype in zip(params, self.grad_dtypes, strict=True)
        ]
        self.casts_outputs = set(self.grad_dtypes) != {self.dtype} or params[0].plan.home != channel.roles.device

    @cached_property
    def numel(self) -> int:
        """The number of elements of all outputs."""
        return sum(self.sizes)
