"""`Reduction`: one group's gradients on their way from `unsharded.grad` to `sharded.grad`. Layer: runtime.

What rank 0 of two has, for small gradients `a` and `b` and a large one `g`, each with rows for both ranks::

    gradients             [a0|a1]  [b0|b1]  [g0|g1]
    [1] packed buffer     [a0 b0|a1 b1]
    [2] flat output       [a0 b0 g0]     one reduce-scatter of two operands, the buffer and `g`
    [3] partials          a0, b0, g0     kept with the group, views of the flat output

Steps, cited in `Reduction._steps`::

    [1] pack       small or oddly shaped gradients are copied into one buffer; large ones are operands themselves
    [2] scatter    reduce-scatter over the shard axis, into one flat output for all parameters
    [3] partial    HSDP without all-reduce: the output is kept, and added to the next one
    [4] replicas   all-reduce over the replicate axis; reduce-scatter where the shards are cut over it too
    [5] scale      what the collectives did not divide; the all-reduce hook; the sink receives the flat output
    [6] hand over  the sink sets `sharded.grad` or adds to it, and runs the hooks

On an accelerator [1], [2], [4] and [5] are enqueued without a pause. On the CPU each wait ends a step, and the context
takes the next step when it has to.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._torch import foreach_copy, foreach_divided, hooks_of, post_accumulate_grad_hooks, profiler_is_on
from fsdp2.comm.base import Bounds, Collective, wrapped
from fsdp2.comm.scaling import Scaling, scaling_for
from fsdp2.errors import CollectiveError
from fsdp2.events import profiler_range
from fsdp2.layout import Lane
from fsdp2.nothing import NOTHING
from fsdp2.policies import UnitSettings
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.packing import Packing
from fsdp2.runtime.parameter import ManagedParameter, sharded_of
from fsdp2.runtime.sink import Params, Sink
from fsdp2.runtime.streams import Streams

_dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
MakeSink = Callable[[Params], Sink]
_Waits = tuple[Any, Any]  # `first.wait(second)` waits


class Partial(NamedTuple):
    """A gradient that was reduce-scattered but not yet all-reduced.

    Attributes:
        flat: the reduce-scattered sum, 1-D and padded.
        divisor: the number by which the sum over the replicas still has to be divided.
    """

    flat: torch.Tensor
    divisor: float

    def over(self, divisor: float) -> torch.Tensor:
        """The sum, rescaled so that it still has to be divided by `divisor`. The divide factor that was set when a
        gradient was reduce-scattered applies to that gradient, even if the factor has changed since."""
        return self.flat if divisor == self.divisor else self.flat * (divisor / self.divisor)


Partials = dict[ManagedParameter, Partial]
Tensors = list[torch.Tensor]


class ReductionPlan:
    """What all reductions of the same gradients of a group have in common.

    Args:
        params, has_grad: those of the group.
        members: indices of those that take part, of one dtype; each has a gradient, or a partial one.

    Attributes:
        indices: `members` in the order of the flat output: packed ones, direct ones, those without a gradient.
        num_grads: how many have a gradient.
        params, sizes: of `indices`; the elements of each in the flat output, padded.
        dtype: in which gradients are summed.
        is_plain: gradients are plain tensors, dims in memory order.
        packing, direct: the buffer of the packed ones; position and elements on this rank of each direct one.
        inner: how the flat output is packed for a reduce-scatter over the replicas; None for an all-reduce.
        averages: whether the reduce-scatter and the all-reduce can divide by the number of ranks.
        collectives: by group, whether it averages, and the name of the unit.
    """

    def __init__(
        self, params: Params, members: Sequence[int], has_grad: Sequence[bool], channel: Channel, make_sink: MakeSink
    ):
        self.channel = channel
        self.dtype: torch.dtype = reduce(torch.promote_types, [params[index].reduce_dtype for index in members])
        itemsize, lane_of = self.dtype.itemsize, channel.comm.scatter_lane
        lanes = {index: lane_of(params[index].layout, itemsize) for index in members if has_grad[index]}
        packed = [index for index, lane in lanes.items() if lane is Lane.PACKED]
        direct = [index for index, lane in lanes.items() if lane is not Lane.PACKED]
        self.indices = [*packed, *direct, *(index for index in members if index not in lanes)]
        self.num_grads = len(lanes)
        self.params = [params[index] for index in self.indices]
        self.sizes = [param.layout.padded_numel for param in self.params]
        self.is_plain = all(each.geometry.as_is and each.plan.specs.inner_mesh is None for each in self.params)
        self.packing = Packing([params[index].layout for index in packed])
        sizes = [params[index].layout.local_numel(channel.roles.shard_rank) for index in direct]
        self.direct = list(enumerate(sizes, len(packed)))
        inner = [param.geometry.outer for param in self.params if param.geometry.outer is not None]
        self.inner = Packing(inner) if inner else None
        self.sink = make_sink(self.params)
        self.averages = channel.comm.has_average, channel.base.has_average
        self.collectives: dict[tuple[dist.ProcessGroup, bool, str], Collective] = {}

    def planned(self, group: dist.ProcessGroup, average: bool, fqn: str) -> Collective:
        """That of [2] or, over the replicas, of [4], from now on in `collectives`."""
        return self.collectives.setdefault((group, average, fqn), self._planned(group, average))

    def _planned(self, group: dist.ProcessGroup, average: bool) -> Collective:
        kind, bounds = "reduce_scatter", list[Bounds]()
        packing: Packing | None = self.packing
        if group is self.channel.roles.replicate_group:
            comm, packing, sizes = self.channel.base, self.inner, self.sizes
            kind, sizes = ("all_reduce", sizes) if packing is None else (kind, [packing.segment])
        else:
            comm, sizes = self.channel.comm, self.sizes[: self.num_grads]
            bounds += [self.params[index].layout.flat_bounds for index, _ in self.direct]
        what = self.channel.what(kind, group, sum(sizes), sum(sizes) * self.dtype.itemsize, self.dtype)
        if packing is None:
            return wrapped(comm.plan_all_reduce(what, average))
        if packing.segment:
            bounds.append(range(0, group.size() * packing.segment + 1, packing.segment))
        return wrapped(comm.plan_reduce_scatter(bounds, what, average))


class Reduction:
    """One reduction.

    Args:
        grads: of the parameters of `plan` that have one, in its order; whole, dims in memory order.
        partials: with a replicate axis, what earlier backwards left for this all-reduce; or what this one adds to.

    Gradients are only read: the tensor in `.grad` may share its memory with a gradient that autograd still uses.

    Attributes:
        leaves_partials: its results will wait for a later all-reduce.
    """

    def __init__(
        self, grads: Tensors, partials: Partials, plan: ReductionPlan, settings: UnitSettings, streams: Streams
    ):
        self.params: Params = plan.params
        self.fqn = plan.channel.fqn
        self.leaves_partials = plan.channel.roles.replicate_group is not None and not settings.requires_all_reduce
        self._plan = plan
        self._settings = settings
        self._streams = streams
        self._waits: _Waits | None = None
        self._run = self._steps(grads, partials)

    def advance(self) -> bool:
        """Take one step: on the CPU to the next wait, on an accelerator to the wait of the compute stream. Returns
        whether steps are left."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.advance()
        streams, waits, self._waits = self._streams, self._waits, None
        try:
            while True:
                if waits is not None:
                    waits[0].wait(waits[1])
                waits = None  # it may hold memory
                waits = next(self._run, None)
                if streams.lazy or waits is None or waits[0] is streams:
                    break
        except BaseException:
            self._run.close()  # leaves the stream of the step
            raise
        self._waits = waits
        return waits is not None

    def finish(self) -> None:
        """Take all steps that are left."""
        while self.advance():
            pass

    def abandon(self) -> None:
        """Wait for what is in flight, and change no gradient. A failure of communication was already reported."""
        waits, self._waits = self._waits, None
        with suppress(CollectiveError):
            if waits is not None:
                waits[0].wait(waits[1])
        self._run.close()

    def _steps(self, grads: Tensors, partials: Partials) -> Generator[_Waits]:
        """Yields what the current stream, or the CPU, has to wait for. The variables keep all tensors alive."""
        plan, streams, settings, roles = self._plan, self._streams, self._settings, self._plan.channel.roles
        factor, is_lazy = settings.gradient_divide_factor, streams.lazy
        averages = (False, False) if settings.force_sum else plan.averages
        scaling = scaling_for(plan.dtype, roles.shard_size, roles.replicate_size, factor, averages)
        ready = streams.record()
        with streams.reducing():
            # Gradients are allocated on the compute stream and read here. Outputs are allocated here and become the
            # sharded gradients; the next reduction starts after the compute stream's use of them. `kept` holds what
            # other streams read until the compute stream has waited.
            if ready is not None:
                streams.wait(ready)
            kept = [] if is_lazy else [*grads]
            if set(map(_dtype_of, grads)) != {plan.dtype} or not all(map(torch.Tensor.is_contiguous, grads)):
                grads = [grad.to(plan.dtype).contiguous() for grad in grads]
            if scaling.pre != 1:
                grads = foreach_divided(grads, scaling.pre)
            with profiler_range("FSDP::reduce_scatter", self.fqn) if profiler_is_on() else NOTHING:
                flat, waits = self._scatter(grads, scaling.scatter_averages, kept)  # [1] [2]
            del grads
            if waits is not None:
                yield waits
                waits = None
            if roles.replicate_group is None:
                flat = self._scaled(flat, scaling.post, kept)  # [5]
            done = streams.record()
        if self.leaves_partials:
            if not is_lazy:  # otherwise compute would wait for each reduce-scatter as soon as it is issued
                yield streams, done
            _keep(plan, flat, partials, scaling.after_scatter(roles.replicate_size))  # [3]
            return
        if roles.replicate_group is not None:
            with streams.all_reducing():
                streams.wait(done)
                with profiler_range("FSDP::all_reduce", self.fqn) if profiler_is_on() else NOTHING:
                    flat, waits = self._over_replicas(flat, partials, scaling, kept)  # [4]
                if waits is not None:
                    yield waits
                    waits = None
                flat = self._scaled(flat, scaling.post, kept)  # [5]
                done = streams.record()
        if not is_lazy:
            yield streams, done
        if done is not None and plan.sink.is_on_host:
            done.synchronize()  # the optimizer reads host memory
        del partials
        kept.clear()  # every stream has finished with them, and [6] may step an optimizer
        with profiler_range("FSDP::hand_over", self.fqn) if profiler_is_on() else NOTHING:
            params = plan.sink.deliver(map(torch.Tensor.as_strided, repeat(flat), *plan.sink.views))  # [6]
            if settings.when_reduced or any(map(hooks_of, map(sharded_of, params))):
                _tell(params, settings.when_reduced)

    def _scatter(self, grads: Tensors, average: bool, kept: Tensors) -> tuple[torch.Tensor, _Waits | None]:
        """Start the reduce-scatter of `grads` into the flat output. Returns that, and what waits for it."""
        plan, num_grads = self._plan, len(grads)
        flat = torch.empty(sum(plan.sizes), dtype=plan.dtype, device=plan.channel.roles.device)
        numel = sum(plan.sizes[:num_grads])
        if num_grads < len(plan.sizes):
            flat[numel:].zero_()
        if plan.channel.roles.shard_size == 1:
            foreach_copy(flat.split(plan.sizes)[:num_grads], [grad.view(-1) for grad in grads])
        if plan.channel.roles.shard_size == 1 or not numel:
            return flat, None
        sources, outputs = [], []
        pieces = flat.split(plan.sizes) if plan.direct else ()
        for index, local_numel in plan.direct:
            if local_numel != plan.sizes[index]:
                pieces[index][local_numel:].zero_()  # the all-reduce and its hook read the padding
            sources.append(grads[index].view(-1))
            outputs.append(pieces[index][:local_numel])
        if plan.packing.segment:
            sources.append(plan.packing.pack(grads[: plan.packing.num_tensors]).view(-1))
            outputs.append(flat[: plan.packing.segment])
        if not self._streams.lazy:
            kept += [*grads, *sources]
        assert plan.channel.scatter_group is not None
        key = plan.channel.scatter_group, average, self.fqn
        collective = plan.collectives.get(key) or plan.planned(*key)
        return flat, (collective, collective.start(sources, outputs))

    def _over_replicas(
        self, flat: torch.Tensor, partials: Partials, scaling: Scaling, kept: Tensors
    ) -> tuple[torch.Tensor, _Waits | None]:
        """Start the sum of the flat output, with the partial gradients, over the replicas; returns as `_scatter`."""
        plan, inner = self._plan, self._plan.inner
        outputs = flat.split(plan.sizes)
        divisor = scaling.after_scatter(plan.channel.roles.replicate_size)
        for param, output in zip(plan.params, outputs, strict=True):
            if (earlier := partials.get(param)) is not None:
                output.add_(earlier.over(divisor))
        key = plan.channel.roles.replicate.group, scaling.all_reduce_averages, self.fqn
        collective = plan.collectives.get(key) or plan.planned(*key)
        if inner is None:
            return flat, (collective, collective.start([flat], [flat]))
        # Each replica gets its piece of this rank's shard. The buffers were allocated on the reduce-scatter stream or
        # here, and are read here.
        pairs = zip(inner.layouts, outputs, strict=True)
        kept += [flat, inner.pack([output[: layout.numel].view(layout.shape) for layout, output in pairs])]
        piece = torch.empty(inner.segment, dtype=plan.dtype, device=flat.device)
        if not inner.segment:
            return piece, None
        return piece, (collective, collective.start([kept[-1].view(-1)], [piece]))

    def _scaled(self, flat: torch.Tensor, post: float, kept: Tensors) -> torch.Tensor:
        """Apply the remaining division and run the user's hook. Returns what the sink makes of the flat output."""
        if post != 1:
            flat.div_(post)
        if self._settings.all_reduce_hook is not None:
            _run_hook(flat, self._plan.channel.roles.mesh, self._streams, *self._settings.all_reduce_hook)
        kept.append(flat)  # allocated on the reduce-scatter stream, may be read on the all-reduce stream
        return self._plan.sink.receive(flat)


def _run_hook(flat: torch.Tensor, mesh: DeviceMesh, streams: Streams, hook: Callable[..., None], stream: Any) -> None:
    if stream is None or streams.lazy:
        return hook(flat, mesh)
    # The current stream owns `flat` and waits until the hook's stream has finished with it.
    ready = streams.record()
    with stream:
        streams.wait(ready)
        hook(flat, mesh)
        done = streams.record()
    streams.wait(done)


def _keep(plan: ReductionPlan, flat: torch.Tensor, partials: Partials, divisor: float) -> None:
    """Add the flat output to the partial gradients, which still have to be divided by `divisor`."""
    for param, output in zip(plan.params, flat.split(plan.sizes), strict=True):
        earlier = partials.get(param)
        partials[param] = Partial(output if earlier is None else earlier.over(divisor).add_(output), divisor)


def _tell(params: Params, then: Sequence[Callable[[Params], None]]) -> None:
    """The gradients of `params` are complete: run the user's post-accumulate hooks, and call all of `then`."""
    calls = [(hook, param.sharded) for param in params for hook in post_accumulate_grad_hooks(param.sharded)]
    for hook, sharded in calls:
        hook(sharded)
    for call in then if params else ():
        call(params)
