"""`Gradients`: detects when a group's gradients are complete, and takes them for reduction. Layer: runtime, below the
bucket.

The path of a gradient::

    unsharded.grad  --take-->  Reduction  --sink-->  sharded.grad      whole, in the reduce dtype; this rank's rows
                                   |  ^
                                   v  |  with HSDP, between two all-reduces: this rank's rows, in the reduce dtype
                                 partials

Autograd adds to `unsharded.grad`, and then runs our hook. The reduction starts when all hooks have run. Our hook is a
parameter's last one: it takes the gradient, and the model's own hooks may change the gradient before.

A custom backward may write a gradient without running the hook, so `take` takes all gradients that exist. It may also
run further backwards inside itself, for instance one per tile of a sequence. A gradient does not show which of them is
the last, so gradients from a backward nested in the unit's own backward wait for the end of the latter.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2._torch import grad_of, hooks_of, local_tensor, running_backward, set_grad
from fsdp2.errors import UnsupportedError
from fsdp2.policies import UnitSettings
from fsdp2.runtime import hooks
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.parameter import ManagedParameter, sharded_of
from fsdp2.runtime.reduction import Partials, Reduction, ReductionPlan
from fsdp2.runtime.sink import Params, is_there
from fsdp2.runtime.streams import Streams

MAX_PLANS = 64
_NONE = torch.empty(0)  # stands in for unsharded parameters that do not exist; has no gradient
needs_grad: Callable[[torch.Tensor | None], bool] = attrgetter("requires_grad")


class Gradients:
    """The gradients of one group's parameters.

    Args:
        on_ready: called in backward when all trainable parameters have received a gradient since the last `take`.
        on_unannounced: called for each gradient that arrives without `begin_backward`.

    Attributes:
        make_plan: makes the plan of a reduction.
        unsharded: the unsharded parameters; none before the first unshard.
        trainable: `requires_grad` of both forms when they were last compared; empty before the first unshard.
        partials: with HSDP, reduce-scattered gradients that wait for their all-reduce.
        were_taken: gradients were taken in this backward.
    """

    def __init__(
        self, params: Params, channel: Channel, on_ready: Callable[[], None], on_unannounced: Callable[[], None]
    ):
        self._params = params
        self._channel = channel
        self._on_ready = on_ready
        self._on_unannounced = on_unannounced
        self.make_plan: type[ReductionPlan] = ReductionPlan
        self.unsharded: list[nn.Parameter] = []
        self.trainable: list[bool] = []
        self.partials: Partials = {}
        self.were_taken = False
        self._missing: set[int] = set()  # trainable parameters without a gradient since the last `take`
        self._wait = False  # gradients of earlier backwards wait in the unsharded parameters
        self._backward: int | None = None  # number of the running backward, once it has reached the unit
        self._hooks: dict[int, RemovableHandle] = {}  # of the trainable parameters
        self._plans: dict[tuple[bytes, bytes], list[ReductionPlan]] = {}  # by which gradients and partials exist

    # --- trainable parameters ----------------------------------------------------------------------------------------

    def sync_trainable(self) -> None:
        """Copy the sharded parameters' `requires_grad` to the unsharded ones, once these exist."""
        wanted = list(map(needs_grad, map(sharded_of, self._params)))
        if wanted != self.trainable:
            self.forget_unsharded()
            self.trainable = wanted
            self.unsharded = [param.unsharded for param in self._params if param.unsharded is not None]
            for index, (unsharded, trainable) in enumerate(zip(self.unsharded, wanted, strict=True)):
                if unsharded.requires_grad != trainable:
                    unsharded.requires_grad = trainable  # `requires_grad_` raises under transforms of torch.func
                if trainable:
                    self._hook(index)
            self._missing = set(self._hooks)

    def follow_unsharded(self) -> None:
        """If the user froze or unfroze an unsharded or a sharded parameter, do the same to the other form."""
        self.follow([param.unsharded for param in self._params])
        self.sync_trainable()

    def follow(self, forms: Sequence[nn.Parameter | None]) -> None:
        """Freeze or unfreeze sharded parameters as the user did with `forms`, which modules held."""
        if self.trainable:
            for param, form, before in zip(self._params, forms, self.trainable, strict=True):
                if form is not None and form.requires_grad != before:
                    param.sharded.requires_grad = form.requires_grad

    def forget_unsharded(self) -> None:
        """Forget the unsharded parameters until `sync_trainable` reads them again."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks, self.trainable, self.unsharded, self._missing = {}, [], [], set()
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop the plans, because parameters, dtypes, names or the channel may have changed."""
        self._plans.clear()

    # --- arrived gradients -------------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        """Whether any parameter has received a gradient in this backward since the last `take`."""
        return len(self._missing) < len(self._hooks)

    def begin_backward(self) -> None:
        """The current backward pass has reached the unit."""
        self._backward = running_backward()
        self.keep_hooks_last()

    def end_backward(self) -> None:
        """The whole backward is over."""
        self._wait = not self.were_taken and any(map(is_there, map(grad_of, self.unsharded)))
        if self._wait:
            for param, unsharded in zip(self._params, self.unsharded, strict=True):
                if param.sharded.grad_dtype is None and unsharded.grad is not None:
                    unsharded.grad = unsharded.grad.to(param.reduce_dtype)  # later gradients are added in this dtype
        self._backward, self.were_taken, self._missing = None, False, set(self._hooks)

    def _hook(self, index: int) -> None:
        weak_self = ref(self)  # the parameter holds the hook, and self holds the parameter

        def hook(unsharded: torch.Tensor) -> None:
            if (gradients := weak_self()) is None:
                return
            if (backward := gradients._backward) is None:
                gradients._on_unannounced()
            if backward is None or backward == running_backward():
                gradients._missing.discard(index)
                # If the model added a hook since backward began, ours is not the last. Then the gradients are reduced
                # at the end of the unit's backward.
                if not gradients._missing and next(reversed((hooks_of(unsharded) or {}).values())) is hook:
                    gradients._on_ready()

        self._hooks[index] = self.unsharded[index].register_post_accumulate_grad_hook(hook)

    def keep_hooks_last(self) -> None:
        """Move our hooks behind those that the model has added to unsharded parameters since forward. The order of
        reductions stays the same, even if only some ranks have added hooks."""
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

    # --- taking gradients --------------------------------------------------------------------------------------------

    def take(self, settings: UnitSettings, at_end: bool, streams: Streams) -> list[Reduction]:
        """Take all existing gradients. Returns their reductions, not yet started, one for each dtype of parameters.
        Before the end of backward it takes nothing if all gradients are from earlier microbatches: then the unit ran
        several times, and the backward of its first use completes its gradients.

        `at_end`: no more gradients will arrive. Only then are missing gradients filled with zeros, if the settings ask
        for that, and partials without new gradients reduced.
        """
        fills = at_end and bool(settings.reduce_unused)
        forms: Sequence[torch.Tensor] = self.unsharded or [
            _NONE if param.unsharded is None else param.unsharded for param in self._params
        ]
        grads = list(map(grad_of, forms))
        has_grad = bytes(map(is_there, grads))
        if not (fills or (at_end and self.partials) or 1 in has_grad):
            return []
        if not at_end and self._wait and not self.arrived:
            return []
        self._missing = set(self._hooks)
        list(map(set_grad, forms, repeat(None)))
        if fills:
            fill = hooks.implementation(hooks.gradients, "unused", "set_reduce_scatter_unused_params")
            fill(self._params, grads, settings.reduce_unused)
            has_grad = bytes(map(is_there, grads))
        partials, has_partial = self.partials, b""
        if settings.requires_all_reduce and partials:
            self.partials, has_partial = {}, bytes(map(partials.__contains__, self._params))
        plans = self._plans.get((has_grad, has_partial))
        if plans is None:
            plans = self._plan(grads, has_grad, has_partial)
        self.were_taken = self.were_taken or bool(plans)
        reductions = []
        for plan in plans:
            taken: Any = list(map(grads.__getitem__, plan.sources))
            if not plan.is_plain:
                taken = list(map(_local, plan.params, taken))
            reductions.append(Reduction(taken, partials, plan, settings, streams))
        return reductions

    def _plan(self, grads: Sequence[torch.Tensor | None], has_grad: bytes, has_partial: bytes) -> list[ReductionPlan]:
        """One plan for each dtype of the parameters, in their order, which is the same on every rank."""
        if len(self._plans) >= MAX_PLANS:  # different parameters get gradients in each step
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
        plans = self._plans[has_grad, has_partial] = [
            self.make_plan(self._params, members, has_grad, self._channel) for members in by_dtype.values()
        ]
        return plans


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
