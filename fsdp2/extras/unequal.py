"""`join`: ranks that run different numbers of microbatches in a step. Layer: extras.

In each turn the ranks exchange who has a microbatch left. Ranks without one *serve* the others::

    turn      0              1              2              3
    rank 0    microbatch 0   microbatch 1   microbatch 2   -
    rank 1    microbatch 0   serves         serves         -
    rank 2    serves         serves         serves         -

A serving rank calls the hooks of all units in the order of the last forward. A unit computes nothing. It passes on a
tensor whose backward gives its parameters zero gradients. So the rank takes part in all collectives, in the same
order, and all settings of units apply. A rank that has not run a forward yet learns from another rank, through the
store of the process group, which units start and end.
"""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2._torch import backward_is_running, flatten_mesh, local_tensor
from fsdp2._torch.shared import store_of
from fsdp2.errors import ArgumentError, CollectiveError, OrderError, UnsupportedError
from fsdp2.module import FSDPModule
from fsdp2.runtime.forward import post_forward, pre_forward
from fsdp2.runtime.root import units_below
from fsdp2.runtime.unit import Unit
from fsdp2.watch.exchange import Exchange, at_once
from fsdp2.watch.trail import trail_of

Batch = TypeVar("Batch")
_NONE: Any = object()
_PATIENCE = timedelta(minutes=5)  # for each next unit of another rank's first forward


class _Call(NamedTuple):
    """One event of a forward: ``start`` or ``end`` of a module with a unit's hooks, ``use`` of a module that holds some
    of its parameters. `unit`, `module`: the index of the unit below the root, and of the module in the unit."""

    kind: str
    unit: int
    module: int = 0


# By the root: the last forward without and with gradients.
_known: WeakKeyDictionary[Unit, dict[bool, list[_Call]]] = WeakKeyDictionary()
_FIRST, _LAST = _Call("start", 0), _Call("end", 0)


class Join:
    """What the block of `join` gets.

    Attributes:
        weight: the sum of the weights of this rank's microbatches so far.
    """

    def __init__(self, module: FSDPModule, total: float | None):
        self.weight = 0.0
        self._module = module
        self._units = units_below(module)
        self._total = total
        self._known = _known.setdefault(self._units[0], {})
        self._calls: list[_Call] = []  # of the running forward
        self._published_as: str | None = None  # prefix of the keys with which this rank publishes its forward
        self._has_trained = False  # any rank has
        self._has_weight = False  # the running microbatch has passed its weight
        self._is_open = False  # a loop has begun and not ended
        groups = [group for unit in self._units for group in unit.groups]
        mesh = max((group.roles.mesh for group in groups), key=lambda mesh: mesh.size())
        self._group, self._device = flatten_mesh(mesh).get_group(), self._units[0].device

    def each(self, microbatches: Iterable[Batch], *, accumulate: bool = False) -> Iterator[Batch]:
        """This rank's microbatches, one by one. Collective: all ranks call it, in the same grad mode, each with any
        number of microbatches, including none. If other ranks have more, this one serves them before the loop ends.

        With gradients each microbatch is one forward and one backward of the module; without, one forward.

        Args:
            accumulate: reduce gradients only in the last turn, not in each. All ranks must pass sequences.

        Raises:
            ArgumentError: `accumulate` is set, and a rank's `microbatches` have no length.
            OrderError: there are gradients already; the loop was left early on this rank (raised at the end of `join`).
        """
        is_training = torch.is_grad_enabled()
        num_own = len(microbatches) if isinstance(microbatches, Sized) else -1
        codes = self._exchange("microbatches", 2 * num_own + (is_training in self._known))
        sizes, all_know = [code // 2 for code in codes], all(code % 2 for code in codes)
        num_turns = max(sizes) if min(sizes) >= 0 else None
        if accumulate and num_turns is None:
            raise ArgumentError(
                "join: accumulate=True: expected sequences on all ranks, got an iterable without length"
            )
        if is_training and num_turns != 0:
            self._begin_training()
        self._is_open = True
        own, turn = iter(microbatches), 0
        while turn != num_turns:
            batch: Any = next(own, _NONE)
            have = [size > turn for size in sizes]
            if num_turns is None:
                have = [code == 1 for code in self._exchange("microbatches left", int(batch is not _NONE))]
                if not any(have):
                    break
            turn += 1
            if accumulate:
                self._module.set_requires_gradient_sync(turn == num_turns)
            publisher, all_know = None if all_know else have.index(True), True
            if batch is _NONE:
                self._serve(is_training, publisher is not None)
                continue
            self._published_as = self._name() if publisher == self._group.rank() else None
            self._has_weight = False
            yield batch
            if is_training and not self._has_weight:
                self.weight += 1
        self._is_open = False

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """``loss.backward()`` of a microbatch with this weight: the number of samples or tokens over which `loss` is
        the mean. A plain ``loss.backward()`` has weight 1."""
        self.weight += weight
        self._has_weight = True
        (loss * weight).backward()

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def _exchange(self, what: str, value: int) -> list[int]:
        """The values of all ranks. Collective: a tensor of a few bytes."""
        own = torch.tensor([value], dtype=torch.int64, device=self._device)
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        with at_once(Exchange(what, None, self._group, own.numel(), own.nbytes, own.dtype, own.device)):
            dist.all_gather(found, own, group=self._group)
        return torch.cat(found).tolist()

    def _name(self) -> str:
        """A prefix for keys in the store: the same on all ranks, different in each turn."""
        return f"fsdp2/join/{trail_of(self._group).position}"

    def _received(self) -> Iterator[_Call]:
        """The events of another rank's forward, as they happen."""
        store, name = store_of(self._group), self._name()
        while True:
            key = f"{name}/{len(self._calls)}"
            try:
                store.wait([key], _PATIENCE)
            except RuntimeError as error:
                raise CollectiveError(
                    f"join: no rank has published what follows {self._calls[-1:]} in its forward: {error}"
                ) from error
            kind, *indices = store.get(key).decode().split()
            self._calls.append(_Call(kind, *map(int, indices)))
            yield self._calls[-1]
            if self._calls[-1] == _LAST:
                return

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _begin_training(self) -> None:
        if self._total is None and any(unit.settings.when_reduced for unit in self._units):
            raise UnsupportedError(
                "join: step_in_backward steps with gradients before all weights are known. Pass their sum over the "
                "ranks: join(model, total=...)"
            )
        if self._total is None and any(unit.settings.all_reduce_hook is not None for unit in self._units):
            raise UnsupportedError(
                "join: a unit has an all-reduce hook (as with fsdp2.Replicas), which would get gradients that are not "
                "divided yet. Pass the sum of the weights over the ranks: join(model, total=...)"
            )
        waiting = [param.fqn for unit in self._units for param in unit.params if param.sharded.grad is not None]
        if waiting and not self._has_trained and self._total is None:
            raise OrderError(
                f"join: '{waiting[0]}' has a gradient, which would be divided with the new ones. Call zero_grad()"
            )
        self._has_trained = True

    def divide(self) -> None:
        """Divide the gradients by the weight of all ranks' microbatches. Collective."""
        if self._has_trained and self._total is None:
            weight = torch.tensor([self.weight], dtype=torch.float64, device=self._device)
            with at_once(Exchange("weights", None, self._group, 1, weight.nbytes, weight.dtype, weight.device)):
                dist.all_reduce(weight, group=self._group)
            if total := weight.item():
                for unit in self._units:
                    for param in unit.params:
                        if (grad := param.sharded.grad) is not None:
                            local_tensor(grad).div_(total)

    def check_ended(self) -> None:
        """Raise `OrderError` if a loop was left early."""
        if self._is_open:
            raise OrderError(
                "join: the loop over each(...) was left early on this rank (break, return), while others wait for it. "
                "Pass each() the microbatches that this rank will run, such as microbatches[:3]"
            )

    # --- serving -----------------------------------------------------------------------------------------------------

    def follow(self) -> list[RemovableHandle]:
        """Record the order in which units run. Returns handles that end this."""
        handles = []
        for index, unit in enumerate(self._units):
            for number, module in enumerate(unit.modules):
                start, end = _Call("start", index, number), _Call("end", index, number)
                # Before the unit's own hooks: ranks that read this must gather it too.
                handles.append(module.register_forward_pre_hook(partial(self._note, start), prepend=True))
                handles.append(module.register_forward_hook(partial(self._note, end)))
            for holder in dict.fromkeys(slot.module for param in unit.params for slot in param.slots):
                if holder is not None:
                    handles.append(holder.register_forward_pre_hook(partial(self._note, _Call("use", index))))
        return handles

    def _note(self, call: _Call, *_: object) -> None:
        if backward_is_running():  # a checkpoint recomputes
            return
        if call == _FIRST:
            self._calls = []
        if self._published_as is not None:
            store_of(self._group).set(f"{self._published_as}/{len(self._calls)}", " ".join(map(str, call)))
        self._calls.append(call)
        if call == _LAST:
            self._known[torch.is_grad_enabled()], self._published_as = self._calls, None

    def _serve(self, is_training: bool, is_new: bool) -> None:
        """Take part in a forward of other ranks, and its backward if training. `is_new`: its order is published."""
        self._calls = []
        value = torch.zeros(1, device=self._device, requires_grad=is_training)
        done: set[int] = set()
        for call in self._received() if is_new else self._known[is_training]:
            unit = self._units[call.unit]
            if not unit.in_order:  # optional, and this rank does not run it
                continue
            module = unit.modules[call.module]
            if call.kind == "start":
                # The root's inputs need no gradients on the other ranks either. Optional units see that this rank
                # serves, because the root gets no inputs.
                args, _ = pre_forward(module, () if call == _FIRST else (value,), {})
                value = args[0] if args else value
            elif is_training and call.unit not in done:
                # At the unit's first use, whose gradients come last; else at its end.
                done.add(call.unit)
                value = _zeros(value, *_trained(unit))
            if call.kind == "end":
                value = post_forward(module, (), value.clone())  # its hooks run before those of inner units
        if is_new:
            self._known[is_training] = self._calls
        if is_training:
            value.sum().backward()


class _Zeros(torch.autograd.Function):
    """Identity on `value`; its backward gives the parameters zero gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*params)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *map(torch.zeros_like, ctx.saved_tensors)


_zeros: Any = _Zeros.apply


def _trained(unit: Unit) -> list[torch.Tensor]:
    """Its unsharded parameters that get gradients."""
    return [form for group in unit.groups for form in group.gradients.unsharded if form.requires_grad]


@contextmanager
def join(module: nn.Module, *, total: float | None = None) -> Iterator[Join]:
    """Let ranks run different numbers of microbatches, including none, with or without gradients. Collective: all ranks
    enter and leave it, with the root.

    Gradients are the weighted mean over all ranks' microbatches: what one process gets that runs them all. The ranks
    exchange the weights at the end of the block; step the optimizer after it. Ranks that differ only in their
    tensor-parallel part must have the same microbatches.

    Args:
        module: the root of sharded modules.
        total: the sum of all ranks' weights, if known in advance. Then each reduction divides. `step_in_backward`,
            all-reduce hooks and `Replicas` need that.

    Raises:
        ArgumentError: `module` is not sharded.
        OrderError: a loop over `Join.each` was left early on this rank.

    Example::

        with fsdp2.join(model) as work:
            for batch in work.each(microbatches):  # of this rank
                work.backward(loss_of(model, batch), weight=len(batch))
        optimizer.step()

    Use ``use_reentrant=False`` for activation checkpoints, because reentrant ones gather in another order. A serving
    rank does not know which parameters get no gradient; if there are any, use `set_reduce_scatter_unused_params`.
    """
    if not isinstance(module, FSDPModule):
        raise ArgumentError(f"join: expected a module on which fully_shard was called, got {type(module)}")
    work = Join(module, total)
    units = units_below(module)
    names = "gradient_divide_factor", "requires_gradient_sync", "requires_all_reduce"
    before = [{name: getattr(unit.settings, name) for name in names} for unit in units]
    for unit in units:
        unit.settings = replace(unit.settings, gradient_divide_factor=total or 1.0)
    handles = work.follow()
    try:
        yield work
        work.check_ended()
        work.divide()
    finally:
        for handle in handles:
            handle.remove()
        for unit, settings in zip(units, before, strict=True):
            unit.settings = replace(unit.settings, **settings)
