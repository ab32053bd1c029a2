"""`Reduction`: one group's gradients on their way from `unsharded.grad` to `sharded.grad`. Layer: runtime.

Steps, cited in `Reduction._steps`::

    [1] pack       small or oddly shaped gradients are copied into one buffer; large ones are operands themselves
    [2] scatter    reduce-scatter over the shard axis, into one flat output for all parameters
    [3] partial    HSDP without all-reduce: the output is kept, and added to the next one
    [4] replicas   all-reduce over the replicate axis; reduce-scatter where the shards are cut over it too
    [5] scale      what the collectives did not divide; the all-reduce hook; cast to the dtype of the sharded gradients
    [6] hand over  `sharded.grad` is set or added to; the user's post-accumulate hooks run

On an accelerator [1] to [5] are enqueued at once. On the CPU each wait ends a step, and the context takes the next step
when it has to.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import torch

from fsdp2._torch import foreach_add, foreach_copy, foreach_divided, local_tensor, post_accumulate_grad_hooks
from fsdp2.comm.base import Operand, Pending, Scatter
from fsdp2.comm.scaling import scaling_for
from fsdp2.errors import CollectiveError
from fsdp2.events import emit
from fsdp2.layout import Lane, ShardLayout, choose_lane
from fsdp2.mesh import MeshRoles
from fsdp2.policies import CPUOffloadPolicy, UnitSettings
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gather import named
from fsdp2.runtime.packing import packed
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.streams import Streams

__all__ = ["Contribution", "Reduction"]


@dataclass(frozen=True)
class Contribution:
    """What one parameter brings to a reduction: a whole gradient (dims in memory order), or what an earlier backward
    left for this all-reduce (1-D, padded), or both."""

    param: ManagedParameter
    grad: torch.Tensor | None
    partial: torch.Tensor | None


class Reduction:
    """One reduction, in the dtype to which the reduce dtypes of its parameters promote.

    Gradients are only read: what autograd left in `.grad` may share its memory with a gradient that still flows.
    Gradients and partials were made on other streams than those that read them here; this object keeps them alive
    until `finish`, when the compute stream has waited for the reduction, and so it does with its own buffers.

    Args:
        fqn: of the unit.
        contributions: at least one, all for parameters of one mesh.
    """

    def __init__(
        self,
        fqn: str,
        contributions: Sequence[Contribution],
        channel: Channel,
        settings: UnitSettings,
        streams: Streams,
    ):
        self.fqn = fqn
        self.dtype = reduce(torch.promote_types, [each.param.reduce_dtype for each in contributions])
        self._channel = channel
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
    def roles(self) -> MeshRoles:
        """Mesh and axes."""
        return self._channel.roles

    def _lane(self, contribution: Contribution) -> Lane | None:
        if contribution.grad is None:
            return None
        comm, param = self._channel.comm, contribution.param
        minimum = comm.scatter_direct_min_bytes
        return choose_lane(param.layout, self._wire_dtype.itemsize, minimum, comm.direct_allows_uneven)

    @property
    def _wire_dtype(self) -> torch.dtype:
        """In which gradients travel to be summed in `dtype`."""
        wanted = self._contributions[0].param.plan.policy.reduce_scatter_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

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
            grads = [each.grad.to(self.dtype).contiguous() for each in self._contributions if each.grad is not None]
            if scaling.pre != 1:
                grads = foreach_divided(grads, scaling.pre)
            self._kept += grads
            pending = self._scatter(grads, scaling.scatter_averages)  # [1] [2]
            if pending is not None:
                if streams.lazy:
                    yield
                with named("reduce-scatter", self.fqn, roles.shard):
                    pending.wait()
            done = streams.record()
        if roles.replicate_group is not None:
            if self.leaves_partials:  # [3]
                streams.wait(done)
                self._keep_partial()
                return
            with streams.all_reducing():
                streams.wait(done)
                pending = self._over_replicas(scaling.all_reduce_averages)  # [4]
                if streams.lazy:
                    yield
                with named("all-reduce", self.fqn, roles.replicate):
                    pending.wait()
                self._scale(scaling.post)  # [5]
                done = streams.record()
        else:
            with streams.reducing():
                self._scale(scaling.post)
                done = streams.record()
        if not streams.lazy:
            yield
        if done is not None and isinstance(self._contributions[0].param.plan.offload, CPUOffloadPolicy):
            done.synchronize()  # the optimizer reads host memory, which no stream orders
        streams.wait(done)
        self._hand_over()  # [6]

    def _scatter(self, grads: Sequence[torch.Tensor], average: bool) -> Pending | None:
        """Make the flat output and issue the reduce-scatter of `grads` into it."""
        roles = self.roles
        sizes = [each.param.layout.padded_numel for each in self._contributions]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=roles.device)
        self._flat, self._outputs = flat, list(flat.split(sizes))
        for output in self._outputs[len(grads) :]:
            output.zero_()
        if roles.shard_size == 1:
            foreach_copy(self._outputs[: len(grads)], [grad.view(-1) for grad in grads])
            return None
        numel = sum(sizes[: len(grads)])
        if not numel:
            return None
        wire = self._wire_dtype
        if wire != self.dtype:
            grads = [grad.to(wire) for grad in grads]
            self._kept += grads
        emit("reduce_scatter", self.fqn, numel, numel * wire.itemsize, wire, roles.shard_size)
        scatters = self._direct_scatters(grads)
        packed_numel = sum(sizes[: self._num_packed])
        if packed_numel:
            layouts = [each.param.layout for each in self._contributions[: self._num_packed]]
            scatters.append(self._packed_scatter(grads[: self._num_packed], layouts, flat[:packed_numel]))
        group = self._channel.scatter_group
        assert group is not None
        with named("reduce-scatter", self.fqn, roles.shard):
            return self._channel.comm.reduce_scatter(scatters, group, average)

    def _packed_scatter(
        self, tensors: Sequence[torch.Tensor], layouts: Sequence[ShardLayout], output: torch.Tensor
    ) -> Scatter:
        """Several tensors in one buffer, of which each rank gets its segment."""
        buffer = packed(tensors, layouts, tensors[0].dtype)
        self._kept.append(buffer)
        bounds = range(0, (layouts[0].parts + 1) * output.numel(), output.numel())
        return Scatter(Operand(buffer.view(-1), bounds), output)

    def _direct_scatters(self, grads: Sequence[torch.Tensor]) -> list[Scatter]:
        """Large gradients are operands themselves."""
        scatters = []
        for index in range(self._num_packed, len(grads)):
            param, output = self._contributions[index].param, self._outputs[index]
            operand = Operand(grads[index].view(-1), param.layout.flat_bounds)
            numel = param.layout.local_numel(self.roles.shard_rank)
            if numel != output.numel():
                output[numel:].zero_()  # padding is seen by the all-reduce and its hook
            scatters.append(Scatter(operand, output[:numel]))
        return scatters

    def _keep_partial(self) -> None:
        """Add the outputs to what waits for an all-reduce."""
        if self._is_abandoned:
            return
        for each, output in zip(self._contributions, self._outputs, strict=True):
            partial = each.param.partial
            each.param.partial = output if partial is None else partial.add_(output)

    def _over_replicas(self, average: bool) -> Pending:
        """Issue what sums the flat output over the replicas, with what earlier backwards left."""
        assert self._flat is not None
        for each, output in zip(self._contributions, self._outputs, strict=True):
            if each.partial is not None:
                output.add_(each.partial)
        if self.roles.sharded_replicas:
            return self._scatter_replicas(average)
        flat, axis = self._flat, self.roles.replicate
        emit("all_reduce", self.fqn, flat.numel(), flat.nbytes, flat.dtype, axis.size)
        with named("all-reduce", self.fqn, axis):
            return self._channel.comm.all_reduce(flat, axis.group, average)

    def _scatter_replicas(self, average: bool) -> Pending:
        """Each replica gets its piece of this rank's shard."""
        axis = self.roles.replicate
        layouts, inner = [], []
        for each, output in zip(self._contributions, self._outputs, strict=True):
            assert each.param.outer is not None
            layouts.append(each.param.outer)
            inner.append(output[: layouts[-1].numel].view(layouts[-1].shape))
        sizes = [layout.padded_numel for layout in layouts]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=inner[0].device)
        self._flat, self._outputs = flat, list(flat.split(sizes))
        emit("reduce_scatter", self.fqn, flat.numel(), flat.nbytes, flat.dtype, axis.size)
        scatters = [self._packed_scatter(inner, layouts, flat)] if flat.numel() else []
        with named("reduce-scatter", self.fqn, axis):
            return self._channel.comm.reduce_scatter(scatters, axis.group, average)

    def _scale(self, post: float) -> None:
        """Divide what is left to divide, run the user's hook, cast to the parameters' dtype."""
        assert self._flat is not None
        if post != 1:
            self._flat.div_(post)
        self._run_hook(self._flat)
        dtypes = [each.param.grad_dtype for each in self._contributions]
        self._kept.append(self._flat)  # made on the reduce-scatter stream, read on the all-reduce stream
        if len(set(dtypes)) == 1:
            self._flat = self._at_home(self._flat.to(dtypes[0]))
            self._outputs = list(self._flat.split([output.numel() for output in self._outputs]))
        else:
            outputs = zip(dtypes, self._outputs, strict=True)
            self._outputs = [self._at_home(output.to(dtype)) for dtype, output in outputs]

    def _run_hook(self, flat: torch.Tensor) -> None:
        if self._settings.all_reduce_hook is None:
            return
        hook, stream = self._settings.all_reduce_hook
        if stream is None or self._streams.lazy:
            hook(flat)
            return
        # `flat` belongs to the current stream, which goes on only when the hook's stream is through with it.
        ready = self._streams.record()
        with stream:
            self._streams.wait(ready)
            hook(flat)
            done = self._streams.record()
        self._streams.wait(done)

    def _at_home(self, grad: torch.Tensor) -> torch.Tensor:
        """A reduced gradient where the sharded parameter lives; offloaded, the copy is complete at `_hand_over`."""
        plan = self._contributions[0].param.plan
        if grad.device == plan.home:
            return grad
        self._kept.append(grad)
        return torch.empty_like(grad, device=plan.home, pin_memory=plan.pins).copy_(grad, non_blocking=True)

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
