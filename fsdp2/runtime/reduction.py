"""`Reduction`: one group's gradients on their way from `unsharded.grad` to `sharded.grad`. Layer: runtime.

Steps, cited in `Reduction._steps`::

    [1] pack       small or oddly shaped gradients are copied into one buffer; large ones are operands themselves
    [2] scatter    reduce-scatter over the shard axis, into one flat output for all parameters
    [3] partial    HSDP without all-reduce: the output is kept, and added to the next one
    [4] replicas   all-reduce over the replicate axis; reduce-scatter where the shards are cut over it too
    [5] scale      what the collectives did not divide; the all-reduce hook; cast to the dtype of the sharded gradients
    [6] hand over  `sharded.grad` is set or added to; the user's post-accumulate hooks run; `settings.when_reduced`

On an accelerator [1], [2], [4] and [5] are enqueued without a pause. On the CPU each wait ends a step, and the context
takes the next step when it has to.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import accumulate
from operator import attrgetter

import torch
import torch.distributed as dist

from fsdp2._torch import (
    foreach_copy,
    foreach_divided,
    hooks_of,
    post_accumulate_grad_hooks,
    profiler_is_on,
)
from fsdp2.comm.base import Collective, Reported
from fsdp2.comm.scaling import Scaling, scaling_for
from fsdp2.errors import CollectiveError
from fsdp2.events import profiler_range
from fsdp2.layout import Lane
from fsdp2.nothing import NOTHING
from fsdp2.policies import UnitSettings
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.packing import Packing
from fsdp2.runtime.parameter import ManagedParameter, Partial
from fsdp2.runtime.streams import Streams

_NOTHING = torch.empty(0)
_dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")


class ReductionPlan:
    """Lanes, dtypes, sizes and collectives of one reduction; valid only for the parameters, and the set of present
    gradients, that it was built from.

    Args:
        params: those of a group, of which some take part.
        members: their indices in `params`; each has a gradient, or a partial gradient of an earlier backward.
        has_grad: for all of `params`.

    Attributes:
        indices: `members` in the order of the outputs.
        num_grads: how many have a gradient; they are the first ones of `indices`.
        dtype: the dtype in which gradients are summed: the promotion of the parameters' reduce dtypes.
        wire_dtype: the dtype in which they are sent.
        params, sizes, grad_dtypes, grad_specs: in the order of `indices`: packed ones first, so that their outputs are
            contiguous in the flat output; those without a gradient last.
        numel, scattered_numel: elements of all outputs, of those with a gradient.
        packing: of the gradients that are packed.
        direct: index and elements on this rank of those that are operands themselves.
        over_replicas: how shards that are cut over the replicate axis too are packed for it.
        casts_outputs: whether the gradients' dtypes or devices differ from the reduction's.
    """

    def __init__(
        self, params: Sequence[ManagedParameter], members: Sequence[int], has_grad: Sequence[bool], channel: Channel
    ):
        self.channel = channel
        every, params = params, [params[index] for index in members]
        self.dtype: torch.dtype = reduce(torch.promote_types, [param.reduce_dtype for param in params])
        wanted = params[0].plan.policy.reduce_scatter_dtype
        is_narrower = wanted is not None and self.dtype.is_floating_point and wanted.itemsize < self.dtype.itemsize
        self.wire_dtype = wanted if wanted is not None and is_narrower else self.dtype
        itemsize = self.wire_dtype.itemsize
        lanes = [
            channel.comm.scatter_lane(param.layout, itemsize) if has_grad[index] else None
            for index, param in zip(members, params, strict=True)
        ]
        order = sorted(range(len(lanes)), key=lambda at: (lanes[at] is not Lane.PACKED, lanes[at] is None))
        self.indices = [members[at] for at in order]
        self.params = params = [every[index] for index in self.indices]
        num_packed, num_scattered = lanes.count(Lane.PACKED), len(lanes) - lanes.count(None)
        self.num_grads = num_scattered
        self.sizes = [param.layout.padded_numel for param in params]
        self.numel = sum(self.sizes)
        self.scattered_numel = sum(self.sizes[:num_scattered])
        self.packing = Packing([param.layout for param in params[:num_packed]])
        rank = channel.roles.shard_rank
        self.direct = [(index, params[index].layout.local_numel(rank)) for index in range(num_packed, num_scattered)]
        self.over_replicas = Packing([param.geometry.outer for param in params if param.geometry.outer is not None])
        self.grad_dtypes = [param.grad_dtype for param in params]
        self.grad_specs = [
            param.plan.specs.sharded(dtype) for param, dtype in zip(params, self.grad_dtypes, strict=True)
        ]
        moves = params[0].plan.grad_home != channel.roles.device
        self.casts_outputs = moves or set(self.grad_dtypes) != {self.dtype}
        self._collectives: dict[tuple[str, dist.ProcessGroup, bool, str], Collective] = {}

    def collective(self, kind: str, group: dist.ProcessGroup, average: bool) -> Collective:
        """The reduction of this kind over `group`, planned at the first call, and when the unit has another name."""
        key = kind, group, average, self.channel.fqn
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = self._plan(kind, group, average)
        return found

    def _plan(self, kind: str, group: dist.ProcessGroup, average: bool) -> Collective:
        channel, is_outer = self.channel, group is self.channel.roles.replicate_group
        comm = channel.base if is_outer else channel.comm
        numel, dtype = (self.numel, self.dtype) if is_outer else (self.scattered_numel, self.wire_dtype)
        packing = self.over_replicas if is_outer else self.packing
        if kind == "reduce_scatter" and is_outer:
            numel = packing.segment
        what = channel.what(kind, group, numel, numel * dtype.itemsize, dtype)
        if kind == "all_reduce":
            return Reported(comm.plan_all_reduce(what, average), what)
        bounds = [] if is_outer else [self.params[index].layout.flat_bounds for index, _ in self.direct]
        if packing.segment:
            bounds.append(range(0, group.size() * packing.segment + 1, packing.segment))
        return Reported(comm.plan_reduce_scatter(bounds, what, self.dtype, average), what)


class Reduction:
    """One reduction.

    Args:
        grads: of the parameters of `plan` that have one, in its order; whole, dims in memory order.
        partials: with a replicate axis, for each parameter of `plan` what earlier backwards left for this all-reduce.

    Gradients are only read: the tensor in `.grad` may share its memory with a gradient that autograd still uses.
    Gradients and partials were allocated on streams other than those that read them here. This object keeps them, and
    its own buffers, alive until `finish`, when the compute stream has waited for the reduction.
    """

    def __init__(
        self,
        grads: list[torch.Tensor],
        partials: Sequence[Partial | None],
        plan: ReductionPlan,
        settings: UnitSettings,
        streams: Streams,
    ):
        self.params: Sequence[ManagedParameter] = plan.params
        self.fqn = plan.channel.fqn
        self.roles = plan.channel.roles
        self._plan = plan
        self._settings = settings
        self._streams = streams
        self._partials = partials
        self._grads = grads
        self._flat = _NOTHING
        self._sizes = plan.sizes
        self._apart: list[torch.Tensor] | None = None
        self._kept: list[torch.Tensor] = []
        self._is_abandoned = False
        self._run = self._steps()

    def advance(self) -> bool:
        """Take one step. Returns whether steps are left."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.advance()
        if next(self._run, True) is None:
            return True
        self._partials, self._kept, self._apart, self._flat = (), [], None, _NOTHING
        return False

    def finish(self) -> None:
        """Take all steps that are left."""
        while self.advance():
            pass

    def abandon(self) -> None:
        """Take all steps that are left, but change no gradient. A failure of communication was already reported."""
        self._is_abandoned = True
        with suppress(CollectiveError):
            self.finish()

    @property
    def leaves_partials(self) -> bool:
        """Whether its results will wait for a later all-reduce."""
        return self.roles.replicate_group is not None and not self._settings.requires_all_reduce

    def _steps(self) -> Iterator[None]:
        settings, streams = self._settings, self._streams
        roles, dtype = self.roles, self._plan.dtype
        factor, force = settings.gradient_divide_factor, settings.force_sum
        scaling = scaling_for(dtype, roles.shard_size, roles.replicate_size, factor, force)
        born = streams.record()
        with streams.reducing():
            # Gradients are allocated on the compute stream and read here; this object keeps them until [6]. Outputs are
            # allocated here and become the sharded gradients; the next reduction starts after the compute stream's use
            # of them.
            if born is not None:
                streams.wait(born)
            grads = self._take_grads(dtype)
            if scaling.pre != 1:
                grads = foreach_divided(grads, scaling.pre)
            if not streams.lazy or self._plan.wire_dtype == dtype:
                self._keep(grads)
            with profiler_range("FSDP::reduce_scatter", self.fqn) if profiler_is_on() else NOTHING:
                pending = self._scatter(grads, scaling.scatter_averages)  # [1] [2]
            del grads
            if pending is not None:
                if streams.lazy:
                    yield
                pending()
                pending = None  # which may hold memory
            done = streams.record()
        if self._is_abandoned:
            return  # other replicas may have failed before they came to this one
        if roles.replicate_group is not None:
            if self.leaves_partials:  # [3]
                if not streams.lazy:
                    yield  # otherwise compute would wait for each reduce-scatter as soon as it is issued
                streams.wait(done)
                self._keep_partial(scaling.after_scatter(roles.replicate_size))
                return
            with streams.all_reducing():
                streams.wait(done)
                with profiler_range("FSDP::all_reduce", self.fqn):
                    pending = self._over_replicas(scaling)  # [4]
                if streams.lazy:
                    yield
                if pending is not None:
                    pending()
                self._scale(scaling.post)  # [5]
                done = streams.record()
        else:
            with streams.reducing():
                self._scale(scaling.post)
                done = streams.record()
        if not streams.lazy:
            yield
        if done is not None and self._plan.params[0].plan.grad_home != roles.device:
            done.synchronize()  # the optimizer reads host memory, to which no stream order applies
        streams.wait(done)
        self._partials, self._kept = (), []  # every stream has finished with them, and [6] may step an optimizer
        with profiler_range("FSDP::hand_over", self.fqn) if profiler_is_on() else NOTHING:
            self._hand_over()  # [6]

    def _take_grads(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The existing gradients, contiguous and in `dtype`."""
        found, self._grads = self._grads, []
        is_ready = set(map(_dtype_of, found)) <= {dtype} and all(map(torch.Tensor.is_contiguous, found))
        grads = found if is_ready else [grad.to(dtype).contiguous() for grad in found]
        if not self._streams.lazy:
            self._kept += found
        return grads

    def _keep(self, grads: Sequence[torch.Tensor]) -> None:
        """Keep tensors alive until the end: on an accelerator all gradients, because other streams read them; on the
        CPU those that are sent without packing."""
        self._kept += grads[self._plan.packing.num_tensors :] if self._streams.lazy else grads

    def _scatter(self, grads: Sequence[torch.Tensor], average: bool) -> Callable[[], None] | None:
        """Create the flat output and start the reduce-scatter of `grads` into it. Returns what waits for it."""
        plan, roles = self._plan, self.roles
        self._flat = flat = torch.empty(plan.numel, dtype=plan.dtype, device=roles.device)
        numel, wire = plan.scattered_numel, plan.wire_dtype
        if numel != plan.numel:
            flat[numel:].zero_()
        if roles.shard_size == 1:
            foreach_copy(self._outputs()[: len(grads)], [grad.view(-1) for grad in grads])
            return None
        if not numel:
            return None
        if wire != plan.dtype:
            grads = [grad.to(wire) for grad in grads]
            self._keep(grads)
        sources, outputs = [], []
        pieces = self._outputs() if plan.direct else []
        for index, local_numel in plan.direct:
            output = pieces[index]
            if local_numel != output.numel():
                output[local_numel:].zero_()  # the all-reduce and its hook read the padding
            sources.append(grads[index].view(-1))
            outputs.append(output[:local_numel])
        if plan.packing.segment:
            sources.append(self._packed(plan.packing, grads[: plan.packing.num_tensors]))
            outputs.append(flat[: plan.packing.segment])
        group = plan.channel.scatter_group
        assert group is not None
        collective = plan.collective("reduce_scatter", group, average)
        return partial(collective.wait, collective.start(sources, outputs))

    def _outputs(self) -> list[torch.Tensor]:
        """The pieces of the flat output, one for each contribution; 1-D, padded."""
        return list(self._flat.split(self._sizes))

    def _packed(self, packing: Packing, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One buffer of several tensors, of which each rank gets its segment."""
        buffer = packing.pack(tensors)
        self._kept.append(buffer)
        return buffer.view(-1)

    def _keep_partial(self, divisor: float) -> None:
        """Add the outputs to the partials, which still have to be divided by `divisor`."""
        if self._is_abandoned:
            return
        for param, output in zip(self._plan.params, self._outputs(), strict=True):
            total = output if param.partial is None else param.partial.over(divisor).add_(output)
            param.partial = Partial(total, divisor)

    def _over_replicas(self, scaling: Scaling) -> Callable[[], None] | None:
        """Issue the sum of the flat output, including the partials of earlier backwards, over the replicas."""
        average = scaling.all_reduce_averages
        if any(each is not None for each in self._partials):
            divisor = scaling.after_scatter(self.roles.replicate_size)
            for earlier, output in zip(self._partials, self._outputs(), strict=True):
                if earlier is not None:
                    output.add_(earlier.over(divisor))
        if self.roles.sharded_replicas:
            return self._scatter_replicas(average)
        collective = self._plan.collective("all_reduce", self.roles.replicate.group, average)
        return partial(collective.wait, collective.start([self._flat], [self._flat]))

    def _scatter_replicas(self, average: bool) -> Callable[[], None] | None:
        """Reduce-scatter over the replicas: each gets its piece of this rank's shard."""
        packing = self._plan.over_replicas
        pairs = zip(packing.layouts, self._outputs(), strict=True)
        inner = [output[: layout.numel].view(layout.shape) for layout, output in pairs]
        # The inner output was allocated on the reduce-scatter stream and is read here, on the all-reduce stream.
        self._kept.append(self._flat)
        self._sizes = [layout.padded_numel for layout in packing.layouts]
        self._flat = flat = torch.empty(packing.segment, dtype=self._plan.dtype, device=inner[0].device)
        if not packing.segment:
            return None
        collective = self._plan.collective("reduce_scatter", self.roles.replicate.group, average)
        return partial(collective.wait, collective.start([self._packed(packing, inner)], [flat]))

    def _scale(self, post: float) -> None:
        """Apply the remaining division, run the user's hook, cast to the parameters' dtype."""
        if post != 1:
            self._flat.div_(post)
        self._run_hook(self._flat)
        dtypes = self._plan.grad_dtypes
        if not self._plan.casts_outputs:
            return
        self._kept.append(self._flat)  # allocated on the reduce-scatter stream, read on the all-reduce stream
        if len(set(dtypes)) == 1:
            self._flat = self._at_home(self._flat.to(dtypes[0]))
        else:
            outputs = zip(dtypes, self._outputs(), strict=True)
            self._apart = [self._at_home(output.to(dtype)) for dtype, output in outputs]

    def _run_hook(self, flat: torch.Tensor) -> None:
        if self._settings.all_reduce_hook is None:
            return
        hook, stream = self._settings.all_reduce_hook
        if stream is None or self._streams.lazy:
            hook(flat, self.roles.mesh)
            return
        # The current stream owns `flat` and waits until the hook's stream has finished with it.
        ready = self._streams.record()
        with stream:
            self._streams.wait(ready)
            hook(flat, self.roles.mesh)
            done = self._streams.record()
        self._streams.wait(done)

    def _at_home(self, grad: torch.Tensor) -> torch.Tensor:
        """A reduced gradient where it lives; with offload, the copy is complete at `_hand_over`."""
        plan = self._plan.params[0].plan
        if grad.device == plan.grad_home:
            return grad
        self._kept.append(grad)
        pinned = plan.offload.pins
        return torch.empty_like(grad, device=plan.grad_home, pin_memory=pinned).copy_(grad, non_blocking=True)

    def _reduced(self) -> tuple[Sequence[torch.Tensor], Iterable[int]]:
        """For each contribution, the 1-D tensor that holds its result, and the index of its first element there."""
        if self._apart is not None:
            # Views, if nothing was cast.
            return self._apart, [int(output.storage_offset()) for output in self._apart]
        return [self._flat] * len(self._sizes), accumulate(self._sizes[:-1], initial=0)

    def _hand_over(self) -> None:
        """Set or add to `sharded.grad`, and run the hooks of the parameters whose gradient is complete."""
        if self._is_abandoned:
            return
        plan, local = self._plan, zip(self._plan.params, *self._reduced(), strict=True)
        grads = [output.as_strided(*param.geometry.view, offset) for param, output, offset in local]
        complete = plan.params[0].deliver(plan.params, grads, plan.grad_specs)
        sharded = [param.sharded for param in complete]
        if any(map(hooks_of, sharded)):
            calls = [(hook, each) for each in sharded for hook in post_accumulate_grad_hooks(each)]
            for hook, each in calls:
                hook(each)
        for call in self._settings.when_reduced if complete else ():
            call(complete)
