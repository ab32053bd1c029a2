"""`Reduction`: one group's gradients on their way from `unsharded.grad` to `sharded.grad`. Layer: runtime.

What rank 0 of two has, for small gradients `a` and `b` and a large one `g`, each with rows for both ranks::

    gradients             [a0|a1]  [b0|b1]  [g0|g1]
    [1] packed buffer     [a0 b0|a1 b1]
    [2] flat output       [a0 b0 g0]     one reduce-scatter of two operands, the buffer and `g`
    [3] partials          a0, b0, g0     kept by the group, views of the flat output

`_steps` takes these steps::

    [1] pack       small or oddly shaped gradients are copied into one buffer; large ones are operands themselves
    [2] scatter    reduce-scatter over the shard axis, into one flat output for all parameters
    [3] partial    HSDP without all-reduce: the output is kept, and added to the next one
    [4] replicas   all-reduce over the replicate axis
    [5] scale      what the collectives did not divide; the all-reduce hook; the sink receives the flat output
    [6] hand over  the sink sets `sharded.grad` or adds to it; hooks run

It pauses (``|``) where it must wait for something. `InFlight` decides when a reduction continues::

    CPU, without and with HSDP     [1] [2] | [5] [6]     [1] [2] | [3] [4] | [5] [6]     all-reduce off [1] [2] | [3]
    accelerator                    [1] [2] [3] [4] [5] | [6]     enqueued on its streams; compute waits before [6]
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import accumulate, repeat
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_divided, hooks_of, post_accumulate_grad_hooks, profiler_is_on
from fsdp2.comm.base import Collective, OpInfo, wrapped
from fsdp2.comm.scaling import scaling_for
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


class Partial(NamedTuple):
    """A gradient that was reduce-scattered (1-D, padded) but not yet all-reduced. The sum over the replicas must still
    be divided by `divisor`."""

    flat: torch.Tensor
    divisor: float

    def rescaled(self, divisor: float) -> torch.Tensor:
        """`flat` for another `divisor`. It was divided by the factor that was set at its reduce-scatter, which may
        have changed since."""
        return self.flat if divisor == self.divisor else self.flat * (divisor / self.divisor)


Partials = dict[ManagedParameter, Partial]
Tensors = list[torch.Tensor]
Wait = Callable[[], None]


class ReductionPlan:
    """How to reduce one set of a group's gradients; made once.

    Args:
        params, has_grad: the group's parameters, and which have a gradient.
        members: indices of the parameters that take part, all of one dtype; each has a gradient or a partial one.

    Attributes:
        params: the parameters that take part, in the order of the flat output: packed, direct, without a gradient.
        sources: the indices of the parameters with a gradient.
        sizes, numel: each parameter's elements in the flat output, padded; and the total.
        scattered: the number of elements that come from gradients; they are first.
        packing, direct: the layout of the packed gradients; each direct one's index and part of the flat output.
        zeros: the parts of the flat output that no collective fills.
        dtype: dtype of the sums.
        is_plain, casts: whether all gradients are plain tensors, dims in memory order; whether one may need a cast.
    """

    sink_type: type[Sink] = Sink

    def __init__(self, params: Params, members: Sequence[int], has_grad: Sequence[int], channel: Channel):
        self.channel, roles = channel, channel.roles
        self.dtype: torch.dtype = reduce(torch.promote_types, [params[index].reduce_dtype for index in members])
        lane_of, itemsize = channel.comm.scatter_lane, self.dtype.itemsize
        given = [index for index in members if has_grad[index]]
        packed = [i for i in given if roles.shard_size == 1 or lane_of(params[i].layout, itemsize) is Lane.PACKED]
        self.sources = [*packed, *(index for index in given if index not in packed)]
        self.params = [params[i] for i in (*self.sources, *(i for i in members if not has_grad[i]))]
        self.sizes = [param.layout.padded_numel for param in self.params]
        starts = list(accumulate(self.sizes, initial=0))
        self.numel, self.scattered = starts[-1], starts[len(given)]
        self.packing = Packing([params[index].layout for index in packed])
        self.direct, self.zeros = list[tuple[int, slice]](), [slice(self.scattered, self.numel)]
        for at in range(len(packed), len(given)):
            end = starts[at] + self.params[at].layout.local_numel(roles.shard_rank)
            self.direct.append((at, slice(starts[at], end)))
            self.zeros.append(slice(end, starts[at + 1]))
        self.zeros = [part for part in self.zeros if part.start < part.stop]
        forms = [params[index].unsharded for index in given]
        self.casts = any(form is None or form.grad_dtype != self.dtype for form in forms)
        self.is_plain = all(each.geometry.as_is and each.plan.specs.inner_mesh is None for each in self.params)
        self.sink = self.sink_type(self.params)
        self._planned: dict[tuple[str, bool], Collective] = {}  # by kind, and whether they average

    def info(self, kind: str, group: dist.ProcessGroup, numel: int) -> OpInfo:
        """The description of a collective of `numel` elements."""
        return self.channel.info(kind, group, numel, numel * self.dtype.itemsize, self.dtype)

    def scatter(self, grads: Tensors, average: bool, streams: Streams) -> tuple[torch.Tensor, Tensors, Wait | None]:
        """[1] [2] Start the reduce-scatter. Returns the flat output, the tensors sent, and the remaining wait."""
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.channel.roles.device)
        for part in self.zeros:
            flat[part].zero_()  # the all-reduce and its hook read it
        segment, sources, outputs = self.packing.segment, Tensors(), Tensors()
        if self.channel.roles.shard_size == 1 and segment:
            self.packing.pack(grads, flat[:segment].view(1, segment))
        if self.channel.roles.shard_size == 1 or not self.scattered:
            return flat, sources, None
        for at, part in self.direct:
            sources.append(grads[at].view(-1))
            outputs.append(flat[part])
        if segment:
            sources.append(self.packing.pack(grads[: self.packing.num_tensors]).view(-1))
            outputs.append(flat[:segment])
        collective = self._planned.get(("scatter", average)) or self._plan_scatter(average)
        return flat, sources, streams.later(collective.wait, collective.start(sources, outputs))

    def _plan_scatter(self, average: bool) -> Collective:
        group, comm, segment = self.channel.scatter_group, self.channel.comm, self.packing.segment
        assert group is not None
        bounds = [self.params[at].layout.flat_bounds for at, _ in self.direct]
        if segment:
            bounds.append(range(0, group.size() * segment + 1, segment))
        info = self.info("reduce_scatter", group, self.scattered)
        planned = self._planned["scatter", average] = wrapped(comm.plan_reduce_scatter(bounds, info, average))
        return planned

    def over_replicas(
        self, flat: torch.Tensor, average: bool, streams: Streams, _kept: Tensors
    ) -> tuple[torch.Tensor, Wait | None]:
        """[4] Start the sum of the flat output over the replicas. Returns the sum, and the remaining wait. Tensors that
        must stay alive until the compute stream has waited are appended to the last argument."""
        if (collective := self._planned.get(("replicas", average))) is None:
            info = self.info("all_reduce", self.channel.roles.replicate.group, self.numel)
            collective = self._planned["replicas", average] = wrapped(self.channel.base.plan_all_reduce(info, average))
        return flat, streams.later(collective.wait, collective.start([flat], [flat]))


class Reduction:
    """One reduction in flight.

    Args:
        grads: the gradients of `plan.sources`, in that order; whole, dims in memory order.
        partials: with a replicate axis, partial gradients of earlier backwards, to be all-reduced or added to.

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
        self._wait: Wait | None = None
        self._run = _steps(plan, grads, partials, settings, streams)

    def advance(self) -> bool:
        """Wait for what the last step has started, and take the next step. Returns whether steps are left."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.advance()
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
            wait = None  # it holds memory
        self._wait = next(self._run, None)
        return self._wait is not None

    def finish(self) -> None:
        """Take all remaining steps."""
        while self.advance():
            pass

    def abandon(self) -> None:
        """Wait for what is in flight without changing a gradient. A communication failure was reported before."""
        wait, self._wait = self._wait, None
        with suppress(CollectiveError):
            if wait is not None:
                wait()
        self._run.close()


class InFlight:
    """The reductions of one root that are in flight; the next one to continue is first. Owns them and their buffers
    until they are finished. Several roots may share one."""

    def __init__(self) -> None:
        self._max_reductions = 1
        self._reductions: deque[Reduction] = deque()

    def __iter__(self) -> Iterator[Reduction]:
        return iter(self._reductions)

    def limit(self, _user: object, max_reductions: int) -> None:
        """Allow this many reductions in flight before compute waits for the oldest."""
        self._max_reductions = max_reductions

    def start(self, reductions: Sequence[Reduction]) -> None:
        """Start reductions. If too many are in flight, the oldest advance first."""
        for reduction in reductions:
            num_due = len(self._reductions) - self._max_reductions + 1
            if num_due > 0:
                with profiler_range("FSDP::post_backward_rs_wait", reduction.fqn) if profiler_is_on() else NOTHING:
                    for _ in range(num_due):
                        self._advance_oldest()
            with profiler_range("FSDP::post_backward_reduce", reduction.fqn) if profiler_is_on() else NOTHING:
                if reduction.advance():
                    self._reductions.append(reduction)

    def _advance_oldest(self) -> None:
        """A separate function, so that a finished reduction is freed before the next one allocates its buffers."""
        oldest = self._reductions.popleft()
        if oldest.advance():
            self._reductions.append(oldest)

    def finish_partials(self) -> None:
        """Finish the reductions whose results the next all-reduce must include."""
        while any(reduction.leaves_partials for reduction in self._reductions):
            self._reductions.popleft().finish()

    def finish_all(self) -> None:
        """Finish every reduction."""
        while self._reductions:
            self._reductions.popleft().finish()

    def abandon_all(self) -> None:
        """Abandon every reduction, and change no gradient."""
        while self._reductions:
            self._reductions.popleft().abandon()


def _steps(
    plan: ReductionPlan, grads: Tensors, partials: Partials, settings: UnitSettings, streams: Streams
) -> Generator[Wait]:
    """Yields what to wait for before it continues. Its local variables keep all tensors alive."""
    roles, is_lazy = plan.channel.roles, streams.lazy
    factor, has_replicas = settings.gradient_divide_factor, roles.replicate_group is not None
    both, sums = (plan.channel.comm, plan.channel.base), settings.force_sum
    averages = both[0].has_average and not sums, both[1].has_average and not sums
    scaling = scaling_for(plan.dtype, roles.shard_size, roles.replicate_size, factor, averages)
    ready = streams.record()
    with streams.reducing():
        # Gradients are allocated on the compute stream and read here. Outputs are allocated here and become the sharded
        # gradients; no later reduction starts before compute has used them. `kept` holds what other streams
        # read until the compute stream has waited.
        streams.wait(ready)
        kept = [] if is_lazy else [*grads]
        if plan.casts or not all(map(torch.Tensor.is_contiguous, grads)):
            grads = [grad.to(plan.dtype).contiguous() for grad in grads]
        if scaling.pre != 1:
            grads = foreach_divided(grads, scaling.pre)
        with profiler_range("FSDP::reduce_scatter", plan.channel.fqn) if profiler_is_on() else NOTHING:
            flat, sent, wait = plan.scatter(grads, scaling.scatter_averages, streams)  # [1] [2]
        if not is_lazy:
            kept += [*grads, *sent]
        del grads, sent
        if wait is not None:
            yield wait
            wait = None  # it holds memory
        if not has_replicas:
            flat = _scaled(plan, flat, scaling.post, settings, streams, kept)  # [5]
        done = streams.record()
    if has_replicas:
        divisor = scaling.after_scatter(roles.replicate_size)
        if not settings.requires_all_reduce:
            if not is_lazy:  # without this pause, compute would wait for each reduce-scatter as soon as it is issued
                yield partial(streams.wait, done)
            _add(plan, flat, partials, divisor)  # [3]
            for param, output in zip(plan.params, flat.split(plan.sizes), strict=True):
                partials[param] = Partial(output, divisor)
            return
        with streams.all_reducing():
            streams.wait(done)
            _add(plan, flat, partials, divisor)
            with profiler_range("FSDP::all_reduce", plan.channel.fqn) if profiler_is_on() else NOTHING:
                flat, wait = plan.over_replicas(flat, scaling.all_reduce_averages, streams, kept)  # [4]
            if wait is not None:
                yield wait
                wait = None
            flat = _scaled(plan, flat, scaling.post, settings, streams, kept)  # [5]
            done = streams.record()
    if not is_lazy:
        yield partial(streams.wait, done)
    if done is not None and plan.sink.is_on_host:
        done.synchronize()  # the optimizer reads host memory
    del partials
    kept.clear()  # every stream has finished with them, and [6] may step an optimizer
    with profiler_range("FSDP::hand_over", plan.channel.fqn) if profiler_is_on() else NOTHING:
        params = plan.sink.deliver(map(torch.Tensor.as_strided, repeat(flat), *plan.sink.views))  # [6]
        if settings.when_reduced or any(map(hooks_of, map(sharded_of, params))):
            _run_hooks(params, settings.when_reduced)


def _scaled(
    plan: ReductionPlan, flat: torch.Tensor, post: float, settings: UnitSettings, streams: Streams, kept: Tensors
) -> torch.Tensor:
    """Apply the remaining division and run the user's hook. Returns the flat output after `Sink.receive`."""
    if post != 1:
        flat.div_(post)
    if settings.all_reduce_hook is not None:
        settings.all_reduce_hook(flat, plan.channel.roles.mesh, streams)
    kept.append(flat)  # allocated on the reduce-scatter stream, may be read on the all-reduce stream
    return plan.sink.receive(flat)


def _add(plan: ReductionPlan, flat: torch.Tensor, partials: Partials, divisor: float) -> None:
    """Add the partial gradients to the flat output, which must still be divided by `divisor`."""
    for param, output in zip(plan.params, flat.split(plan.sizes), strict=True) if partials else ():
        if (earlier := partials.get(param)) is not None:
            output.add_(earlier.rescaled(divisor))


def _run_hooks(params: Params, callbacks: Sequence[Callable[[Params], None]]) -> None:
    """The gradients of `params` are complete: run the user's post-accumulate hooks, then `callbacks`."""
    calls = [(hook, param.sharded) for param in params for hook in post_accumulate_grad_hooks(param.sharded)]
    for hook, sharded in calls:
        hook(sharded)
    for callback in callbacks if params else ():
        callback(params)
