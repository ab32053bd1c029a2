"""Activation checkpointing and compilation, block by block. Layer: parallel.

What a call of a block does, from the outside in::

    checkpoint           keeps only the inputs for backward, and runs everything inside again then
      hooks              of the block: fully_shard gathers its parameters, context parallelism replaces attention
        forward          compiled, together with the hooks of submodules (tensor and context parallelism)

The checkpoint is outermost, so that everything that ran is run again. Parameters are gathered for backward before that,
so the repeated hooks gather nothing. Compilation is inside: torch 2.13 cannot compile a checkpoint over DTensors
("expected all tensors_saved_with_vc_check to be Tensors"), and the hooks of `fully_shard` then need not be traced.

As with `fully_shard`, the block's class is replaced by a subclass. Names of parameters and `isinstance` stay valid, and
nothing refers back to the block (a forward set on the object would, and so keep it alive).

Source: Training Deep Nets with Sublinear Memory Cost, https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2.errors import MisuseError
from fsdp2.parallel.blocks import Block

__all__ = ["check_plain", "recompute_and_compile"]


class Treated(nn.Module):
    """Mixed into the class of a block whose forward is checkpointed, compiled or both."""


_classes: dict[tuple[type[nn.Module], bool, bool | str], type[nn.Module]] = {}


def check_plain(blocks: Sequence[Block]) -> None:
    """Check that the blocks still have their own forward.

    Raises:
        MisuseError: a block is checkpointed or compiled already.
    """
    for block in blocks:
        if isinstance(block.module, Treated):
            raise MisuseError(f"parallelize: '{block.fqn}' is checkpointed or compiled already; pass a plain model")


def recompute_and_compile(blocks: Sequence[Block], every: int, compile: bool | str) -> None:
    """Recompute every `every`-th of the blocks in backward, from the first (0: none), and compile each.

    Only the innermost blocks are treated and counted. Nothing is traced before the first forward; blocks of one class
    share their graphs.

    Args:
        compile: False does nothing; a string names the backend of `torch.compile`.
    """
    modules = {block.module for block in blocks}
    innermost = [module for module in modules if not any(m in modules for m in module.modules() if m is not module)]
    in_order = [block.module for block in blocks if block.module in innermost]
    for index, module in enumerate(in_order):
        recompute = every > 0 and index % every == 0
        if recompute or compile:
            module.__class__ = _treated_class(type(module), recompute, compile)


def _treated_class(cls: type[nn.Module], recompute: bool, compile: bool | str) -> type[nn.Module]:
    """A subclass whose forward is that of `cls`, compiled, checkpointed or both."""
    key = (cls, recompute, compile)
    if key in _classes:
        return _classes[key]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super(treated, self).__call__, *args, use_reentrant=False, **kwargs)

    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if recompute:
        names["__call__"] = call
    if compile:
        names["forward"] = torch.compile(cls.forward, backend=compile if isinstance(compile, str) else "inductor")
    treated: Any = type(cls.__name__, (Treated, cls), names)
    _classes[key] = treated
    return _classes[key]
