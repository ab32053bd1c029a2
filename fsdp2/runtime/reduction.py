"""`Reduction`: one group's gradients on their way from `unsharded.grad` to `sharded.grad`. Layer: runtime.

Steps, cited in `Reduction._steps`::

    [1] pack       small or oddly shaped gradients are copied into one buffer; large ones are operands themselves
    [2] scatter    reduce-scatter over the shard axis, into one flat output for all parameters
    [3] partial    HSDP without all-reduce: the output is kept, and added to the next one
    [4] all-reduce over the replicate axis
    [5] scale      what the collectives did not divide; the all-reduce hook; cast to the dtype of the sharded gradients
    [6] hand over  `sharded.grad` is set or added to; the user's post-accumulate hooks run

On an accelerator [1] to [5] are enqueued at once. On the CPU each wait ends a step, and the context takes the next step
when it has to.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from fsdp2._torch import chunk_cat, foreach_add, foreach_copy, foreach_divided, local_tensor, post_accumulate_grad_hooks
from fsdp2.comm.base import Comm, Operand, Pending, Scatter
from fsdp2.comm.scaling import scaling_for
from fsdp2.errors import CollectiveError
from fsdp2.events import emit
from fsdp2.layout import Lane, choose_lane
from fsdp2.policies import UnitSettings
from fsdp2.runtime.gather import interleave, named
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.streams import Streams

__all__ = ["Contribution", "Reduction"]


@dataclass(frozen=True)
class Contribution:
    """What one parameter brings to a reduction: a gradient of global shape, or what an earlier backward left for this
    all-reduce (1-D, padded), or both."""

    param: ManagedParameter
    grad: torch.Tensor | None
    partial: torch.Tensor | None


class Reduction:
    """One reduction; all of its gradients have one dtype.

    Gradients are only read: what autograd left in `.grad` may share its memory with a gradient that still flows.
    Gradients and partials were made on other streams than those that read them here; this object keeps them alive
    until `finish`, when the compute stream has waited for the reduction, and so it does with its own buffers.

    Args:
        fqn: of the unit.
        contributions: at least one, all for parameters of one mesh and one reduce dtype.
    """

    def __init__(
        self,
        fqn: str,
        contributions: Sequence[Contribution],
        comm: Comm,
        settings: UnitSettings,
        streams: Streams,
    ):
        self.fqn = fqn
        self.roles = contributions[0].param.roles
        self._comm = comm
        self._settings = settings
        self._streams = streams
        self._contributions = list(contributions)
        lanes = [self._lane(each) for each in contributions]
        self._num_packed = lanes.count(Lane.PACKED)
        # Packed ones first, so that their outputs are one piece of the flat output; those without a gradient last.
        order = sorted(range(len(lanes)), key=lambda index: (lanes[index] is not Lane.PACKED, lanes[index] is None))
        self._contributions = [contributions[index] for index in order]
        self._flat: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._is_abandoned = False
        self._run = self._steps()

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients while they are reduced."""
        return self._contributions[0].param.reduce_dtype

    def _lane(self, contribution: Contribution) -> Lane | None:
        if contribution.grad is None:
            return None
        comm, layout = self._comm, contribution.param.layout
        return choose_lane(layout, self.dtype.itemsize, comm.direct_min_bytes, comm.direct_allows_uneven)

    def advance(self) -> bool:
        """Take one step; returns whether there is another."""
        with torch.no_grad():
            if next(self._run, True) is None:
                return True
        self._contributions, self._kept, self._outputs, self._flat = [], [], [], None
        return False

    def finish(self) -> None:
        """Take all steps that are left."""
        while self.advance():
            pass

    def abandon(self) -> None:
        """Take all steps that are left, but change no gradient. A failure was reported before and is not again."""
        self._is_abandoned = True
        with suppress(CollectiveError):
            self.finish()

    @property
    def leaves_partials(self) -> bool:
        """Whether its results will wait for a later all-reduce."""
        return self.roles.replicate_group is not None and not self._settings.requires_all_reduce

    def _steps(self) -> Iterator[None]:
        settings, streams, roles = self._settings, self._streams, self.roles
        scaling = scaling_for(
            self.dtype, roles.shard_size, roles.replicate_size, settings.gradient_divide_factor, settings.force_sum
        )
        born = streams.record()
        with streams.reducing():
            # Gradients: allocated on the compute stream, read here; kept by this object until [6]. Outputs: allocated
            # here, become the sharded gradients; the next reduction starts after the compute stream's use of them.
            streams.wait(born)
            grads = [each.grad.contiguous() for each in self._contributions if each.grad is not None]
            if scaling.pre != 1:
                grads = foreach_divided(grads, scaling.pre)
            self._kept += grads
            pending = self._scatter(grads, scaling.scatter_averages)  # [1] [2]
            if pending is not None:
                if streams.lazy:
                    yield
                with named("reduce-scatter", self.fqn, roles):
                    pending.wait()
            done = streams.record()
        if roles.replicate_group is not None:
            if self.leaves_partials:  # [3]
                streams.wait(done)
                self._keep_partial()
                return
            with streams.all_reducing():
                streams.wait(done)
                pending = self._all_reduce(scaling.all_reduce_averages)  # [4]
                if streams.lazy:
                    yield
                with named("all-reduce", self.fqn, roles):
                    pending.wait()
                self._scale(scaling.post)  # [5]
                done = streams.record()
        else:
            with streams.reducing():
                self._scale(scaling.post)
                done = streams.record()
        if not streams.lazy:
            yield
        streams.wait(done)
        self._hand_over()  # [6]

    def _scatter(self, grads: Sequence[torch.Tensor], average: bool) -> Pending | None:
        """Make the flat output and issue the reduce-scatter of `grads` into it."""
        roles = self.roles
        sizes = [each.param.layout.padded_numel for each in self._contributions]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self._contributions[0].param.flat.device)
        self._flat, self._outputs = flat, list(flat.split(sizes))
        for output in self._outputs[len(grads) :]:
            output.zero_()
        if roles.shard_size == 1:
            foreach_copy(self._outputs[: len(grads)], [grad.view(-1) for grad in grads])
            return None
        numel = sum(sizes[: len(grads)])
        if not numel:
            return None
        emit("reduce_scatter", self.fqn, numel, numel * flat.itemsize, flat.dtype, roles.shard_size)
        scatters = self._direct_scatters(grads)
        packed_numel = sum(sizes[: self._num_packed])
        if packed_numel:
            packed = self._pack(grads[: self._num_packed], packed_numel)
            self._kept.append(packed)
            bounds = range(0, (roles.shard_size + 1) * packed_numel, packed_numel)
            scatters.append(Scatter(Operand(packed.view(-1), bounds), flat[:packed_numel]))
        with named("reduce-scatter", self.fqn, roles):
            return self._comm.reduce_scatter(scatters, roles.shard_group, average)

    def _direct_scatters(self, grads: Sequence[torch.Tensor]) -> list[Scatter]:
        """Large gradients are operands themselves."""
        scatters = []
        for index in range(self._num_packed, len(grads)):
            param, output = self._contributions[index].param, self._outputs[index]
            operand = Operand(grads[index].view(-1), param.layout.flat_bounds)
            numel = param.local_numel
            if numel != output.numel():
                output[numel:].zero_()  # padding is seen by the all-reduce and its hook
            scatters.append(Scatter(operand, output[:numel]))
        return scatters

    def _pack(self, grads: Sequence[torch.Tensor], segment_numel: int) -> torch.Tensor:
        """The other gradients in one buffer ``[ranks, segment_numel]``, padding zero."""
        layouts = [each.param.layout for each in self._contributions[: len(grads)]]
        size, device = self.roles.shard_size, grads[0].device
        if all(layout.dim == 0 for layout in layouts):
            packed = torch.empty(size, segment_numel, dtype=self.dtype, device=device)
            chunk_cat([grad for grad in grads if grad.numel()], size, packed)
            return packed
        packed = torch.zeros(size, segment_numel, dtype=self.dtype, device=device)
        offset = 0
        destinations, sources = [], []
        for layout, grad in zip(layouts, grads, strict=True):
            for destination, source in interleave(packed, offset, grad, layout):
                destinations.append(destination)
                sources.append(source)
            offset += layout.padded_numel
        foreach_copy(destinations, sources)
        return packed

    def _keep_partial(self) -> None:
        """Add the outputs to what waits for an all-reduce."""
        if self._is_abandoned:
            return
        for each, output in zip(self._contributions, self._outputs, strict=True):
            partial = each.param.partial
            each.param.partial = output if partial is None else partial.add_(output)

    def _all_reduce(self, average: bool) -> Pending:
        """Issue the all-reduce of the flat output, with what earlier backwards left."""
        assert self._flat is not None and self.roles.replicate_group is not None
        for each, output in zip(self._contributions, self._outputs, strict=True):
            if each.partial is not None:
                output.add_(each.partial)
        flat, group = self._flat, self.roles.replicate_group
        emit("all_reduce", self.fqn, flat.numel(), flat.nbytes, flat.dtype, group.size())
        with named("all-reduce", self.fqn, self.roles):
            return self._comm.all_reduce(flat, group, average)

    def _scale(self, post: float) -> None:
        """Divide what is left to divide, run the user's hook, cast to the parameters' dtype."""
        assert self._flat is not None
        if post != 1:
            self._flat.div_(post)
        if self._settings.all_reduce_hook is not None:
            self._settings.all_reduce_hook(self._flat)
        dtypes = [each.param.grad_dtype for each in self._contributions]
        if set(dtypes) == {self.dtype}:
            return
        self._kept.append(self._flat)  # made on the reduce-scatter stream, read on the all-reduce stream
        if len(set(dtypes)) == 1:
            self._flat = self._flat.to(dtypes[0])
            self._outputs = list(self._flat.split([output.numel() for output in self._outputs]))
        else:
            self._outputs = [output.to(dtype) for dtype, output in zip(dtypes, self._outputs, strict=True)]

    def _hand_over(self) -> None:
        """Set `sharded.grad`, or add to the one that is there."""
        if self._is_abandoned:
            return
        params = [each.param for each in self._contributions]
        old, new = [], []
        for param, output in zip(params, self._outputs, strict=True):
            grad = param.grad_from(output)
            if param.sharded.grad is None:
                param.sharded.grad = grad
            else:
                old.append(local_tensor(param.sharded.grad))
                new.append(local_tensor(grad))
        foreach_add(old, new)
        for param in params:
            for hook in post_accumulate_grad_hooks(param.sharded):
                hook(param.sharded)
