"""`OffloadedPart`: the parameters of one param group of a unit, stepped in the background. Layer: optim.

::

    begin    the caller's thread: takes the current gradients, options and state; the parameters become pending
    _run     the background thread: copies what the step needs to where the gradients are, steps, copies back
    settle   any user of the parameters: waits for `_run`; the parameters are real again

An inner `LocalOptimizer` steps *twins* of the parameters: DTensors on the same shards, or on copies of them, where the
gradients are. What the caller does with gradients, options and state after `begin` does not affect the step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_of, local_tensor, make_dtensor, make_parameter, make_spec, set_local_tensor, spec_of
from fsdp2.disk.file import in_turn
from fsdp2.disk.mapped import ShardFiles, file_of
from fsdp2.errors import ArgumentError
from fsdp2.extras.host_memory import host
from fsdp2.extras.offload import Offload
from fsdp2.extras.simulation import simulation
from fsdp2.optim.background import submit
from fsdp2.optim.flats import identical, local_grad
from fsdp2.optim.local import LocalOptimizer, without_hooks
from fsdp2.optim.on_disk import DiskState
from fsdp2.optim.pending import PendingTensor
from fsdp2.optim.staged import OffloadedState, StagedState, State, for_step
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.parameter import Plan
from fsdp2.runtime.streams import streams_for

NOT_OPTIONS = frozenset({"params", "param_names"})
Groups = Sequence[dict[str, Any]]

_gathers = count()
_on_disk = count()


class OffloadedPart:
    """Parameters that live, and have their gradients, in the same places.

    Args:
        unit_group: the unit's group that has the parameters.
        plan: the plan of one of them.
        lists: the parameters, one list for each param group of the optimizer.
        make: makes the inner optimizer from param groups; the flag says whether it may join contiguous parameters.
        groups: the optimizer's param groups.

    Attributes:
        params: the parameters.
        seen: set from a counter at the first gather after each step, so sorting parts by it gives forward order.
    """

    def __init__(
        self,
        unit_group: Bucket,
        plan: Plan,
        lists: Sequence[Sequence[DTensor]],
        make: Callable[[Groups, bool], LocalOptimizer],
        groups: Groups,
    ):
        assert isinstance(plan.offload, Offload)
        self.params = [param for each in lists for param in each]
        self.seen = next(_gathers)
        self._is_gathered = False  # since its last step
        self._unit_group = ref(unit_group)
        self._policy = plan.offload
        self._streams = streams_for(plan.roles.device)
        self._is_all_host = plan.roles.device == host()
        self._reals = [local_tensor(param) for param in self.params]
        self._pendings: list[PendingTensor] = []
        self._twins = [_twin(param, plan) for param in self.params]
        twins = iter(self._twins)
        pairs = zip(groups, lists, strict=True)
        inner = [{**_options(group), "params": [next(twins) for _ in each]} for group, each in pairs]
        joins = not self._policy.folders  # parts of joined memory cannot be freed
        self._inner = make(inner, joins)
        self._staged = self._offloaded_state(plan.grad_home)
        self._future: Future[None] | None = None
        self._done: torch.Event | None = None
        self._kept: list[Any] = []  # gradients that the device may still read

    def _offloaded_state(self, device: torch.device) -> OffloadedState | None:
        """Where the state is kept, if not where the optimizer steps."""
        folders = self._policy.folders
        if folders and simulation() is None:  # a plan counts files as host memory
            files = ShardFiles(file for real in self._reals if (file := file_of(real)) is not None)
            return DiskState(self._inner.state, device, in_turn(folders, next(_on_disk)), files, self.settle)
        return None if device == host() else StagedState(self._inner.state, device, self._policy.pins)

    def is_current(self, lists: Sequence[Sequence[DTensor]]) -> bool:
        """Whether these are still its parameters, on the same memory. Only while settled."""
        params = [param for each in lists for param in each]
        mine = [len(group["params"]) for group in self._inner.param_groups]
        return (
            [*map(id, params)] == [*map(id, self.params)]
            and [*map(len, lists)] == mine
            and all(local_of(param) is real for param, real in zip(params, self._reals, strict=True))
        )

    # --- the caller's thread -----------------------------------------------------------------------------------------

    def begin(self, groups: Groups, states: State) -> None:
        """Step in the background the parameters that have gradients now. The previous step must be settled.

        Args:
            groups: the optimizer's param groups.
            states: its state, by parameter; it has the new values after `settle`.
        """
        stepped = [(p, twin) for p, twin in zip(self.params, self._twins, strict=True) if p.grad is not None]
        if not stepped:
            return
        for twin in self._twins:
            twin.grad = None  # a step that raised may have left some
        for param, twin in stepped:
            twin.grad = _grad_for(twin, param)
        for group, inner in zip(groups, self._inner.param_groups, strict=True):
            inner.update({key: _as_now(value) for key, value in _options(group).items()})
        with self._stepping():
            has_copied = self._take_states(states)
        ready = self._streams.record()
        # As operations on the DTensors would: autograd must see that tensors which it may have saved will change.
        torch.autograd.graph.increment_version([param for param, _ in stepped])
        self._become_pending()
        if self._staged is not None:
            self._staged.prefetch()
        self._future = submit(lambda: self._run(ready, states), self._policy.threads)
        unit_group = self._unit_group()
        is_used = unit_group is None or unit_group.phase is not Phase.SHARDED
        if not self._policy.overlap or is_used or has_copied:  # copies of all units at once need too much memory
            self.settle()

    def _become_pending(self) -> None:
        if not self._pendings:
            self._pendings = [PendingTensor(real, self.settle) for real in self._reals]
        for param, pending in zip(self.params, self._pendings, strict=True):
            set_local_tensor(param, pending, spec_of(param))
        unit_group = self._unit_group()
        if unit_group is not None and self._unit_needs not in unit_group.changing:
            unit_group.changing.append(self._unit_needs)
        self._is_gathered = False

    def _unit_needs(self, gathering: bool) -> None:
        """The unit's group is about to use the shards."""
        if gathering and not self._is_gathered:  # backward gathers again, in a different order
            self.seen, self._is_gathered = next(_gathers), True
        if gathering and not self._streams.lazy:
            # Only the all-gather stream waits; compute continues. Other code that reads a parameter finds it pending,
            # and waits on its own stream.
            self.release()
            self._streams.wait(self._done)
        else:
            self.settle()

    def release(self) -> None:
        """Wait until the step has been enqueued, and free the gradients."""
        future = self._future
        if future is not None:
            future.result()
        # The next reductions may reuse the memory of the gradients, which the step still reads.
        for stream in (self._streams.reducing, self._streams.all_reducing):
            with stream():
                self._streams.wait(self._done)
        self._kept = []

    def settle(self) -> None:
        """Wait for the step on the current stream, and make the parameters real again.

        Raises:
            Exception: the error of the step.
        """
        try:
            self.release()
        finally:
            if self._future is None or self._future.done():  # False if a signal has interrupted the wait
                self._become_real()
                self._future = None
                self._streams.wait(self._done)

    def _become_real(self) -> None:
        for param, real in zip(self.params, self._reals, strict=True):
            if isinstance(local_of(param), PendingTensor):
                set_local_tensor(param, real, spec_of(param))
        unit_group = self._unit_group()
        if unit_group is not None:
            unit_group.changing[:] = [each for each in unit_group.changing if each != self._unit_needs]

    def synchronize(self) -> None:
        """Let the host wait for the device's writes to host memory, and for files. Call it after `settle`."""
        if self._done is not None:
            self._done.synchronize()
        if self._staged is not None:
            self._staged.finish()

    def _take_states(self, states: State) -> bool:
        """Take the optimizer's state, which may have been loaded or changed since the last step. Returns whether
        anything was copied."""
        inner = self._inner.state
        outers = list(map(states.get, self.params))
        if self._staged is None and self._is_all_host and identical(map(inner.get, self._twins), outers):
            return False  # still what `_publish` stored
        copies = [self._take_state(inner, *each) for each in zip(self._twins, outers, strict=True)]
        return any(copies)

    def _take_state(self, inner: State, twin: Any, outer: State | None) -> bool:
        if not outer:
            inner.pop(twin, None)
        elif self._staged is not None:
            return self._staged.take(twin, outer)
        else:
            inner[twin] = outer
            for key, value in outer.items():
                if not isinstance(value, DTensor):
                    outer[key] = for_step(value, host())
                elif local_tensor(value).device != host():
                    outer[key] = make_dtensor(local_tensor(value).to(host()), spec_of(value))
        return False

    # --- in the background -------------------------------------------------------------------------------------------

    def _stepping(self) -> AbstractContextManager[object]:
        block: AbstractContextManager[object] = self._streams.stepping()
        return block

    def _run(self, ready: torch.Event | None, states: State) -> None:
        with torch.no_grad(), self._stepping():
            self._streams.wait(ready)
            try:
                self._fetch()
                options = [dict(group) for group in self._inner.param_groups]
                without_hooks(self._inner.step)(self._inner)
            except BaseException:
                if self._staged is not None:
                    self._staged.drop()
                raise
            try:
                self._store()
            finally:  # what could not be stored is in memory still
                self._publish(states)
                self._done = self._streams.record()
        grads = [twin.grad for twin in self._twins]
        if not self._streams.lazy:
            self._kept = grads
        for twin in self._twins:
            twin.grad = None
        self._check_options(options)

    def _fetch(self) -> None:
        """Copy what the step needs to where the gradients are."""
        if self._staged is not None:
            self._staged.fetch()
        moved = [(twin, real) for twin, real in self._pairs() if local_of(twin) is not real]
        for twin, real in moved:
            local_tensor(twin).copy_(real, non_blocking=True)
        if moved and (event := self._streams.record()) is not None:
            event.synchronize()  # the host steps, and stream order does not apply to it

    def _store(self) -> None:
        for twin, real in self._pairs():
            if local_of(twin) is not real:
                real.copy_(local_tensor(twin), non_blocking=True)
        if self._staged is not None:
            self._staged.store()

    def _pairs(self) -> list[tuple[Any, torch.Tensor]]:
        return [*zip(self._twins, self._reals, strict=True)]

    def _publish(self, states: State) -> None:
        """Store the state of each parameter in `states`."""
        inner = self._inner.state
        for param, twin in zip(self.params, self._twins, strict=True):
            if twin not in inner:
                if not states.get(param, True):
                    del states[param]  # an optimizer without state
            elif self._staged is None:
                states[param] = inner[twin]
            else:
                self._staged.show(twin, states.setdefault(param, {}))

    def _check_options(self, before: Groups) -> None:
        for group, known in zip(self._inner.param_groups, before, strict=True):
            changed = [key for key, value in group.items() if known.get(key) is not value]
            if changed:
                raise ArgumentError(
                    f"offload_optimizer: the step of {type(self._inner).__name__} changes the options {changed} of its "
                    "param groups, which would happen once per unit instead of once per step. Use it without offload."
                )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def _as_now(value: Any) -> Any:
    """A copy of an option's current value: schedulers change a tensor in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _twin(param: DTensor, plan: Plan) -> Any:
    local = local_tensor(param)
    if local.device != plan.grad_home:
        local = torch.empty_like(local, device=plan.grad_home, pin_memory=plan.offload.pins)
    twin = make_parameter(local, spec_of(param), requires_grad=False)
    if param.grad_dtype != param.dtype:
        twin.grad_dtype = param.grad_dtype
    return twin


def _grad_for(twin: Any, param: Any) -> DTensor:
    """The parameter's gradient on the device of `twin`, as a DTensor that reports this device. (An offloaded gradient
    reports the device of its mesh.)"""
    grad, device = param.grad, local_of(twin).device
    if (
        isinstance(grad, DTensor)
        and grad.device == local_of(grad).device == device
        and grad.placements == param.placements
    ):
        return grad
    moved = local_grad(param, grad).to(device)
    if isinstance(grad, DTensor) and grad.placements == param.placements:
        return make_dtensor(moved, spec_of(grad))
    return make_dtensor(moved, make_spec(param.device_mesh, param.placements, param.shape, param.stride(), moved.dtype))
