"""`Gradients`: detects when a group's gradients are complete, and takes them for reduction. Layer: runtime, below the
bucket.

Where a gradient is, and what moves it on::

    unsharded.grad  --take-->  Reduction  --sink-->  sharded.grad      whole, in the reduce dtype; this rank's rows
                                   |  ^
                                   v  |  with HSDP, between two all-reduces: this rank's rows, in the reduce dtype
                                 partials

Autograd adds to `unsharded.grad`, and then runs a hook of ours. The reduction starts when no hook is missing. Our hook
is a parameter's last one, because it takes the gradient, which the model's own hooks may change.

A custom backward may write a gradient without running the hook, so `take` takes all gradients that exist. It may also
run further backwards inside itself, for instance one per tile of a sequence. A gradient does not show which of them is
the last, so gradients from a backward nested in the unit's own wait for the end of the unit's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, count
from operator import attrgetter, is_not
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2._torch import grad_of, hooks_of, local_tensor, running_backward
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.policies import UnitSettings
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.parameter import ManagedParameter, sharded_of
from fsdp2.runtime.reduction import MakeSink, Partials, Reduction, ReductionPlan
from fsdp2.runtime.sink import Params, sink_of
from fsdp2.runtime.streams import Streams

MAX_PLANS = 64
_is_there: Callable[[object], bool] = partial(is_not, None)
_NONE = torch.empty(0)  # in place of unsharded parameters that do not exist; has no gradient
needs_grad: Callable[[torch.Tensor | None], bool] = attrgetter("requires_grad")
_grad_dtype: Callable[[torch.Tensor], torch.dtype | None] = attrgetter("grad_dtype")
_Key = tuple[tuple[bool, ...], tuple[bool, ...], tuple[torch.dtype | None, ...]]


class Gradients:
    """The gradients of one group's parameters.

    Args:
        on_ready: called in backward when all trainable parameters have received a gradient since the last were taken.
        on_unannounced: called for each gradient that arrives without `begin_backward`.

    Attributes:
        make_sink: makes the sink of a reduction.
        unsharded: the unsharded parameters; none before the first unshard.
        trainable: `requires_grad` of both forms when they were last compared; empty before the first unshard.
        partials: with HSDP, reduce-scattered gradients that wait for their all-reduce.
        were_taken: gradients of this backward were taken for a reduction.
    """

    def __init__(
        self, params: Params, channel: Channel, on_ready: Callable[[], None], on_unannounced: Callable[[], None]
    ):
        self._params = params
        self._channel = channel
        self._on_ready = on_ready
        self._on_unannounced = on_unannounced
        self.make_sink: MakeSink = sink_of
        self.unsharded: list[nn.Parameter] = []
        self.trainable: list[bool] = []
        self.partials: Partials = {}
        self.were_taken = False
        self._missing: set[int] = set()  # trainable parameters that got no gradient since the last were taken
        self._backward: int | None = None
        self._had_grads = False  # the last backward left gradients
        self._hooks: dict[int, RemovableHandle] = {}
        # By which gradients and which partial ones there are, and the sharded parameters' `grad_dtype`.
        self._plans: dict[_Key, list[ReductionPlan]] = {}

    # --- who is trained ----------------------------------------------------------------------------------------------

    def sync_trainable(self) -> None:
        """Copy the sharded parameters' `requires_grad` to the unsharded ones, once these exist."""
        wanted = list(map(needs_grad, map(sharded_of, self._params)))
        if wanted != self.trainable:
            self.unsharded = [param.unsharded for param in self._params if param.unsharded is not None]
            for unsharded, trainable in zip(self.unsharded, wanted, strict=True):
                if unsharded.requires_grad != trainable:
                    unsharded.requires_grad = trainable  # `requires_grad_` refuses within transforms of torch.func
            self.trainable = wanted
            self._missing = set(compress(count(), wanted))
            for index in self._missing - self._hooks.keys():
                self._hook(index)

    def follow_unsharded(self) -> None:
        """If the user froze or unfroze an unsharded parameter, or the sharded one meanwhile, do it to the other."""
        self.follow([param.unsharded for param in self._params])
        self.sync_trainable()

    def follow(self, forms: Sequence[nn.Parameter | None]) -> None:
        """If the user froze or unfroze one of `forms`, which the modules have held instead of the sharded parameters,
        do the same to the sharded one."""
        if self.trainable:
            for param, form, before in zip(self._params, forms, self.trainable, strict=True):
                if form is not None and form.requires_grad != before:
                    param.sharded.requires_grad = form.requires_grad

    def forget_unsharded(self) -> None:
        """The unsharded parameters will be created again, unless they match by the next unshard."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self.trainable, self.unsharded = [], []
        self._missing.clear()
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop the plans, because parameters, dtypes or the channel may have changed."""
        self._plans.clear()

    # --- what has arrived --------------------------------------------------------------------------------------------

    @property
    def none_arrived(self) -> bool:
        """Whether there are trainable parameters, none of which has received a gradient since the last were taken."""
        return bool(self._missing) and len(self._missing) == sum(self.trainable)

    @property
    def some_arrived(self) -> bool:
        """Whether some parameter has received a gradient in this backward."""
        return self.were_taken or len(self._missing) < sum(self.trainable)

    def begin_backward(self) -> None:
        """The unit's backward begins, in the current backward pass."""
        self._backward = running_backward()
        self.keep_hooks_last()

    def end_backward(self) -> None:
        """The whole backward is over."""
        self._had_grads = not self.were_taken and any(map(_is_there, map(grad_of, self.unsharded)))
        if self._had_grads:
            for param, unsharded in zip(self._params, self.unsharded, strict=bool(self.unsharded)):
                if param.sharded.grad_dtype is None and unsharded.grad is not None:
                    unsharded.grad = unsharded.grad.to(param.reduce_dtype)  # others will be added to it
        self._backward = None
        self.were_taken = False
        self._missing = set(compress(count(), self.trainable))

    def _hook(self, index: int) -> None:
        weak_self = ref(self)  # the parameter holds the hook, and self holds the parameter

        def hook(unsharded: torch.Tensor) -> None:
            if (gradients := weak_self()) is None:
                return
            if gradients._backward is None:
                gradients._on_unannounced()
            if gradients._backward in (None, running_backward()):
                gradients._missing.discard(index)
                # Our hook is not the last only if the model added one since backward began. Then the gradients are
                # reduced at the end of the unit's backward.
                if not gradients._missing and next(reversed((hooks_of(unsharded) or {}).values())) is hook:
                    gradients._on_ready()

        self._hooks[index] = self.unsharded[index].register_post_accumulate_grad_hook(hook)

    def keep_hooks_last(self) -> None:
        """Move our hooks behind hooks that the model has added to unsharded parameters since forward. The order of
        reductions stays the same even if only some ranks have added hooks."""
        if sum(map(len, filter(None, map(hooks_of, self.unsharded)))) != len(self._hooks):
            for index, handle in self._hooks.items():
                handle.remove()
                self._hook(index)

    def drop(self) -> None:
        """Drop all unreduced and partial gradients."""
        self.partials.clear()
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self.end_backward()

    # --- what is reduced ---------------------------------------------------------------------------------------------

    def take(self, settings: UnitSettings, at_end: bool, streams: Streams) -> list[Reduction]:
        """Reductions, not yet started, of all existing gradients, one for each dtype of parameters. The unsharded
        parameters have no gradients afterwards. None before the end of backward, if all gradients are of earlier
        microbatches: the unit ran several times, and gets the sum over its uses in the backward of the first one.

        Args:
            at_end: backward is over. Only then are zeros used for trainable parameters without a gradient (if the
                settings require it), and partials without new gradients reduced: earlier, more gradients could still
                arrive.
        """
        fill = at_end and bool(settings.reduce_unused)
        forms: Sequence[torch.Tensor] = self.unsharded or [
            _NONE if param.unsharded is None else param.unsharded for param in self._params
        ]
        grads = list(map(grad_of, forms))
        if not (fill or (at_end and self.partials) or any(map(_is_there, grads))):
            return []
        if not at_end and self._had_grads and self.none_arrived:
            return []
        self._missing = set(compress(count(), self.trainable))
        for each in forms:
            each.grad = None
        if fill:
            _fill(self._params, grads, settings.reduce_unused)
        partials, has_partial = self.partials, tuple[bool, ...]()
        if settings.requires_all_reduce and partials:
            self.partials, has_partial = {}, tuple(map(partials.__contains__, self._params))
        key = tuple(map(_is_there, grads)), has_partial, tuple(map(_grad_dtype, map(sharded_of, self._params)))
        plans = self._plans.get(key)
        if plans is None:
            plans = self._plan(key, grads)
        self.were_taken = self.were_taken or bool(plans)
        reductions = []
        for plan in plans:
            taken: Any = list(map(grads.__getitem__, plan.indices[: plan.num_grads]))
            if not plan.is_plain or any(map(needs_grad, taken)):
                taken = list(map(_local, plan.params, taken))
            reductions.append(Reduction(taken, partials, plan, settings, streams))
        return reductions

    def _plan(self, key: _Key, grads: Sequence[torch.Tensor | None]) -> list[ReductionPlan]:
        """One plan for each dtype of the parameters, in their order, which is the same on every rank."""
        has_grad, has_partial, _ = key
        if len(self._plans) >= MAX_PLANS:  # other parameters get gradients in each step
            self._plans.clear()
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            if grad is not None and grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"'{param.fqn}': expected a dense gradient, got one of layout {grad.layout}, which cannot be "
                    "reduced. Build the embedding with sparse=False."
                )
            if grad is not None or (has_partial and has_partial[index]):
                by_dtype.setdefault(param.dtype, []).append(index)
        plans = self._plans[key] = [
            ReductionPlan(self._params, members, has_grad, self._channel, self.make_sink)
            for members in by_dtype.values()
        ]
        return plans


def _fill(params: Params, grads: list[torch.Tensor | None], which: bool | frozenset[int]) -> None:
    """Put zeros where a trainable parameter has no gradient."""
    for index in range(len(params)) if isinstance(which, bool) else sorted(which):
        param = params[index]
        if not param.sharded.requires_grad:
            continue
        if param.sharded.grad_dtype is None and param.plan.policy.reduce_dtype is None:
            raise ArgumentError(
                f"'{param.fqn}': a gradient that some ranks do not have is reduced as zeros there (as "
                "set_reduce_scatter_unused_params(True) asks for), so all must know its dtype; its grad_dtype is "
                "None. Set that, or the policy's reduce_dtype."
            )
        if grads[index] is None:
            zeros = torch.zeros(param.layout.shape, dtype=param.reduce_dtype, device=param.roles.device)
            grads[index] = param.geometry.from_memory(zeros)


def _local(param: ManagedParameter, grad: torch.Tensor) -> torch.Tensor:
    """A gradient of `unsharded` as a plain tensor without a graph, dims in memory order."""
    if grad.requires_grad:
        grad = grad.detach()
    if isinstance(grad, DTensor):
        placements = param.plan.specs.gradient_placements(grad)
        if placements != grad.placements:
            grad = grad.redistribute(placements=placements)
        grad = local_tensor(grad)
    return grad if param.geometry.as_is else param.geometry.to_memory(grad)
