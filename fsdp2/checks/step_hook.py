"""Checks every optimizer before it steps, through torch's global optimizer hooks. Layer: checks.

Installed when the first unit is created, so it costs nothing in a program that shards nothing. Compiled steps are not
checked: under Dynamo the hooks return at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2.watch.order import compare_before_step

Check = Callable[[torch.optim.Optimizer], None]

_before: list[Check] = []
_final: list[Check] = []
_installed: list[object] = []


def before_each_step(check: Check) -> Check:
    """Call `check` with each optimizer that is about to step. Returns it."""
    _before.append(check)
    return check


def when_gradients_are_final(check: Check) -> None:
    """Call `check` with each optimizer that is about to step; with a closure, after the step, because the closure
    computes the gradients."""
    _final.append(check)


def install_step_hooks(_unit: object = None) -> None:
    """Install the hooks. Calling it again does nothing."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
        _installed.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    for check in _before:
        check(optimizer)
    if not _has_closure(args, kwargs):
        for check in _final:
            check(optimizer)
    compare_before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    if _has_closure(args, kwargs):
        for check in _final:
            check(optimizer)
    if not getattr(optimizer, "counts_changes", False):
        _count_changes(optimizer)


def _count_changes(optimizer: torch.optim.Optimizer) -> None:
    """Bump the versions of changed DTensors, by which stale gathered values are detected. Foreach operators do not bump
    them (https://github.com/pytorch/pytorch/pull/197502); optimizers use these with `foreach` and `fused`, and on an
    accelerator by default. The same on all ranks."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    torch.autograd.graph.increment_version([p for p in params if isinstance(p, DTensor) and p.grad is not None])


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])  # the first is the optimizer
