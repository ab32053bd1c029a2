"""Points at which the ranks of a group compare what they have done. Layer: watch.

They are the end of a backward that reduced gradients, and an optimizer's step. If the order of exchanges up to such a
point has occurred before, no rank waits, and hashes are compared later. A new order is compared at once: before
`backward` returns, and before the optimizer steps.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2._torch import real_tensors
from fsdp2.errors import CollectiveError, OrderError, StepError
from fsdp2.runtime import hooks
from fsdp2.watch.current import current, waiting
from fsdp2.watch.settings import settings
from fsdp2.watch.trail import Entry, Trail, forget_old_entries, trail_of, trails
from fsdp2.watch.watchdog import Watchdog, watchdog

_HELD_S = 60.0  # after this a rank continues without the comparison: the others are alive but elsewhere


class _Held:
    """A comparison that all ranks of a group must reach (see `fsdp2.watch.current.Awaited`)."""

    def __init__(self, trail: Trail, position: int, total: int):
        self.what = "the comparison of orders"
        self.fqn: str | None = None
        self.group_name = trail.name
        self.position = position
        self.ranks = trail.ranks
        self.total = str(total)
        self.key = f"at/{trail.name}/{position}"
        self.before, trail.last_held = trail.last_held, self.key
        self.is_done = False

    def post(self, dog: Watchdog) -> None:
        """Publish what this rank has done."""
        if dog.board.claim(self.key, self.total) != self.total:
            dog.ask()
        elif dog.board.count(f"{self.key}/ranks") == len(self.ranks):
            dog.board.put(f"{self.key}/same", "1")
            dog.board.drop([self.before + part for part in ("", "/ranks", "/same")] if self.before else [])
            self.is_done = True

    def wait(self, dog: Watchdog) -> None:
        """Return when all ranks of the group have done the same."""
        pause, start = 0.0001, time.monotonic()
        while not self.is_done:
            if dog.board.has(f"{self.key}/same") or dog.agreed.get(self.group_name, 0) >= self.position:
                return
            if dog.failure is not None:
                raise CollectiveError(dog.failure)
            if current.step is not None:
                current.step.check()
            if not dog.is_alive or time.monotonic() - start > _HELD_S:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def compare_order(ends_step: bool = False, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Compare the order, after all reductions of a backward were issued or before an optimizer steps. Every rank of a
    group calls it at the same places.

    Args:
        groups: the groups to compare; None for all in which gradients were reduced since the last call.

    Raises:
        CollectiveError: ranks have done different things; raised on all of them.
    """
    if current.failure is not None:
        raise CollectiveError(current.failure)
    wanted = None if groups is None else set(groups)
    held: list[_Held] = []
    dog = watchdog() if settings().is_on else None
    for group, trail in trails():
        if trail.has_reduced if wanted is None else group in wanted:
            position, total, is_new = trail.mark(ends_step)
            if is_new:
                held.append(_Held(trail, position, total))
            elif dog is not None and (trail.num_marks < 16 or trail.num_marks % 64 == 0):
                dog.later.append((trail.name, position, total))
    if dog is not None and held:
        _hold(dog, held)


def _watch_root(context: Any) -> None:
    context.hooks.before_forward.append(lambda *_: forget_old_entries())
    context.hooks.before_wait.append(compare_order)


hooks.root_made.append(_watch_root)


def compare_before_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer` is about to step. All ranks that hold its parameters must have done the same up to here.

    Raises:
        CollectiveError: see `compare_order`.
        OrderError: the ranks have not agreed on the step yet.
    """
    if watchdog() is None:
        return  # nothing to compare: one process, fake groups and fake tensors, or switched off
    groups = _groups_of(optimizer)
    if groups and current.step is not None:
        raise OrderError(
            f"{type(optimizer).__name__}.step() within agree_on_step: no rank may step before all have left the block. "
            "Step after it"
        )
    for group in groups:
        trail_of(group).note(Entry("optimizer step", None))
    if groups:
        compare_order(ends_step=True, groups=groups)


_meshes: WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], list[frozenset[int]]]] = WeakKeyDictionary()


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dist.ProcessGroup]:
    """The groups in which sharded parameters of `optimizer` are communicated: those within a parameter's mesh, because
    every rank of a mesh has the parameter."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    known = _meshes.get(optimizer)
    if known is None or known[0] != sizes:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        meshes = {id(param.device_mesh): param.device_mesh for param in params if isinstance(param, DTensor)}
        with real_tensors():  # the program may be under a mode of fake ones
            ranks = [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes.values()]
        known = _meshes[optimizer] = sizes, ranks
    return [group for group, trail in trails() if any(ranks.issuperset(trail.ranks) for ranks in known[1])]


def _hold(dog: Watchdog, held: Sequence[_Held]) -> None:
    try:
        for each in held:
            each.post(dog)
        for each in held:
            with waiting(each):
                each.wait(dog)
    except (CollectiveError, StepError):
        raise
    except RuntimeError:
        return  # the store is gone together with its process; the next exchange will fail anyway
