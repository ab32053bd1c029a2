"""`Reduction`: one group's gradients on their way from `unsharded.grad` to `sharded.grad`. Layer: runtime.

Steps, cited in `Reduction._steps`::

    [1] pack       small or oddly shaped gradients are copied into one buffer; large ones are operands themselves
    [2] scatter    reduce-scatter over the shard axis, into one flat output for all parameters
    [3] partial    HSDP without all-reduce: the output is kept, and added to the next one
    [4] all-reduce over the replicate axis
    [5] scale      what the collectives did not divide; the all-reduce hook; cast to the original dtype
    [6] hand over  `sharded.grad` is set or added to; the user's post-accumulate hooks run

On an accelerator [1] to [5] are enqueued at once. On the CPU each wait ends a step, and the context takes the next step
when it has to.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from fsdp2._torch import chunk_cat, foreach_add, foreach_copy, foreach_div, local_tensor, post_accumulate_grad_hooks
from fsdp2.comm.base import Comm, Operand, Pending, Scatter
from fsdp2.comm.scaling import scaling_for
from fsdp2.errors import CollectiveError
from fsdp2.events import emit
from fsdp2.layout import Lane, choose_lane
from fsdp2.policies import UnitSettings
from fsdp2.runtime.gather import interleave, named
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.streams import Streams

__all__ = ["Reduction"]


class Reduction:
    """One reduction; all of its gradients have one dtype.

    Args:
        fqn: of the unit.
        params: parameters with a gradient, then, where partial gradients wait for this all-reduce, those without.
        grads: gradients of the first ``len(grads)`` of them, of global shape; they are read until `finish` and kept
            alive here until the stream that made them has waited for the reduction.
    """

    def __init__(
        self,
        fqn: str,
        params: Sequence[ManagedParameter],
        grads: Sequence[torch.Tensor],
        comm: Comm,
        settings: UnitSettings,
        streams: Streams,
    ):
        self.fqn = fqn
        self.roles = params[0].roles
        self._comm = comm
        self._settings = settings
        self._streams = streams
        self._dtype = params[0].reduce_dtype
        lanes = [
            choose_lane(p.layout, self._dtype.itemsize, comm.direct_min_bytes, comm.direct_allows_uneven)
            for p in params[: len(grads)]
        ]
        # Packed ones first, so that their outputs are one piece of the flat output.
        order = sorted(range(len(grads)), key=lambda index: lanes[index] is Lane.DIRECT)
        self._num_packed = lanes.count(Lane.PACKED)
        self._grads: list[torch.Tensor] = [grads[index].contiguous() for index in order]
        self._params = [params[index] for index in order] + list(params[len(grads) :])
        self._flat: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []
        self._run = self._steps()

    def advance(self) -> bool:
        """Take one step; returns whether there is another."""
        with torch.no_grad():
            return next(self._run, True) is None

    def finish(self) -> None:
        """Take all steps that are left."""
        while self.advance():
            pass

    def abandon(self) -> None:
        """Take all steps that are left, but change no gradient. A failure was reported before and is not again."""
        self._params, self._outputs = [], []
        with suppress(CollectiveError):
            self.finish()

    def _steps(self) -> Iterator[None]:
        settings, streams, roles = self._settings, self._streams, self.roles
        scaling = scaling_for(
            self._dtype, roles.shard_size, roles.replicate_size, settings.gradient_divide_factor, settings.force_sum
        )
        born = streams.record()
        with streams.reducing():
            # Gradients: allocated on the compute stream, read here; kept by self._grads until [6]. Outputs: allocated
            # here, become the sharded gradients; the next reduction starts after the compute stream's use of them.
            streams.wait(born)
            if scaling.pre != 1:
                foreach_div(self._grads, scaling.pre)
            pending = self._scatter(scaling.scatter_averages)  # [1] [2]
            if pending is not None:
                if streams.lazy:
                    yield
                with named("reduce-scatter", self.fqn, roles):
                    pending.wait()
            done = streams.record()
        if roles.replicate_group is not None:
            if not settings.requires_all_reduce:  # [3]
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

    def _scatter(self, average: bool) -> Pending | None:
        """Make the flat output and issue the reduce-scatter into it."""
        roles, params = self.roles, self._params
        if roles.shard_size == 1 and roles.replicate_group is None:
            self._outputs = [grad.view(-1) for grad in self._grads]
            return None
        sizes = [param.layout.padded_numel for param in params]
        device = self._grads[0].device if self._grads else params[0].flat.device
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=device)
        self._flat, self._outputs = flat, list(flat.split(sizes))
        for output in self._outputs[len(self._grads) :]:
            output.zero_()
        if not self._grads:
            return None
        if roles.shard_size == 1:
            foreach_copy(self._outputs[: len(self._grads)], [grad.view(-1) for grad in self._grads])
            return None
        numel = sum(sizes[: len(self._grads)])
        emit("reduce_scatter", self.fqn, numel, numel * flat.itemsize, flat.dtype, roles.shard_size)
        scatters = self._direct_scatters()
        packed_numel = sum(sizes[: self._num_packed])
        if packed_numel:
            packed = self._pack(packed_numel)
            bounds = range(0, (roles.shard_size + 1) * packed_numel, packed_numel)
            scatters.append(Scatter(Operand(packed.view(-1), bounds), flat[:packed_numel]))
        if not scatters:
            return None
        with named("reduce-scatter", self.fqn, roles):
            return self._comm.reduce_scatter(scatters, roles.shard_group, average)

    def _direct_scatters(self) -> list[Scatter]:
        """Large gradients are operands themselves."""
        scatters = []
        for index in range(self._num_packed, len(self._grads)):
            param, grad = self._params[index], self._grads[index]
            operand = Operand(grad.view(-1), param.layout.flat_bounds)
            output, numel = self._outputs[index], param.local_numel
            if numel != output.numel():
                output[numel:].zero_()  # padding is seen by the all-reduce and its hook
            scatters.append(Scatter(operand, output[:numel]))
        return scatters

    def _pack(self, segment_numel: int) -> torch.Tensor:
        """The other gradients in one buffer ``[ranks, segment_numel]``, padding zero."""
        grads = self._grads[: self._num_packed]
        params = self._params[: self._num_packed]
        size, device = self.roles.shard_size, grads[0].device
        if all(param.layout.dim == 0 for param in params):
            packed = torch.empty(size, segment_numel, dtype=self._dtype, device=device)
            chunk_cat([grad for grad in grads if grad.numel()], size, packed)
            return packed
        packed = torch.zeros(size, segment_numel, dtype=self._dtype, device=device)
        offset = 0
        destinations, sources = [], []
        for param, grad in zip(params, grads, strict=True):
            for destination, source in interleave(packed, offset, grad, param.layout):
                destinations.append(destination)
                sources.append(source)
            offset += param.layout.padded_numel
        foreach_copy(destinations, sources)
        return packed

    def _keep_partial(self) -> None:
        """Add the outputs to what waits for an all-reduce."""
        for param, output in zip(self._params, self._outputs, strict=True):
            param.partial = output if param.partial is None else param.partial.add_(output)
        self._grads = []

    def _all_reduce(self, average: bool) -> Pending:
        """Issue the all-reduce of the flat output, with what earlier backwards left."""
        assert self._flat is not None and self.roles.replicate_group is not None
        for param, output in zip(self._params, self._outputs, strict=True):
            if param.partial is not None:
                output.add_(param.partial)
                param.partial = None
        flat, group = self._flat, self.roles.replicate_group
        emit("all_reduce", self.fqn, flat.numel(), flat.nbytes, flat.dtype, group.size())
        with named("all-reduce", self.fqn, self.roles):
            return self._comm.all_reduce(flat, group, average)

    def _scale(self, post: float) -> None:
        """Divide what is left to divide, run the user's hook, cast to the parameters' dtype."""
        flats = self._outputs if self._flat is None else [self._flat]
        if post != 1:
            foreach_div(flats, post)
        if self._settings.all_reduce_hook is not None:
            for flat in flats:
                self._settings.all_reduce_hook(flat)
        dtypes = {param.dtype for param in self._params}
        if dtypes == {self._dtype}:
            return
        if self._flat is not None and len(dtypes) == 1:
            self._flat = self._flat.to(dtypes.pop())
            self._outputs = list(self._flat.split([output.numel() for output in self._outputs]))
        else:
            self._outputs = [output.to(p.dtype) for p, output in zip(self._params, self._outputs, strict=True)]

    def _hand_over(self) -> None:
        """Set `sharded.grad`, or add to the one that is there."""
        self._grads = []
        old, new = [], []
        for param, output in zip(self._params, self._outputs, strict=True):
            grad = param.grad_from(output)
            if param.sharded.grad is None:
                param.sharded.grad = grad
            else:
                old.append(local_tensor(param.sharded.grad))
                new.append(local_tensor(grad))
        foreach_add(old, new)
        for param in self._params:
            for hook in post_accumulate_grad_hooks(param.sharded):
                with torch.enable_grad():
                    hook(param.sharded)
