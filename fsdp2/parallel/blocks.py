"""The blocks of a model: which modules they are, and their recomputation and compilation. Layer: parallel.

A block is recomputed, compiled and sharded as one. A call of a block, from the outside in::

    checkpoint           keeps only the inputs for backward, and then runs everything inside again
      hooks              of the block: fully_shard gathers its parameters, context parallelism replaces attention
        forward          compiled, together with the hooks of submodules (tensor and context parallelism)

The checkpoint is outermost, so that everything is run again. Parameters are gathered for backward before that, so the
repeated hooks gather nothing. Compilation is inside: torch 2.13 cannot compile a checkpoint over DTensors ("expected
all tensors_saved_with_vc_check to be Tensors"), and this way the hooks of `fully_shard` need not be traced.

As with `fully_shard`, the block's class is replaced by a subclass. Parameter names and `isinstance` stay valid, and
nothing refers back to the block (a forward set on the object would keep it alive).

Source: Training Deep Nets with Sublinear Memory Cost, https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2.errors import ArgumentError
from fsdp2.runtime.unit import has_forward
from fsdp2.wrap import Policy, Rule, Wrapped, auto_shard, by_class, classes_of, transformer_blocks

__all__ = ["Blocks", "matches", "recompute_and_compile", "units_of"]

Blocks = Policy | nn.Module | type[nn.Module] | str
"""A policy, a module, a class, or the name of a class or of modules (a pattern, such as ``layers.*``)."""


def units_of(model: nn.Module, spec: Blocks | Sequence[Blocks] | None) -> tuple[Wrapped, ...]:
    """The units of `model`: its blocks, children before their parents, and last the root. Changes nothing. Without a
    `spec`, the blocks of `transformer_blocks()`. Raises ArgumentError if a specification matches nothing."""
    specs = spec if spec is None or isinstance(spec, (list, tuple)) else [spec]
    policies = [each if isinstance(each, Policy) else _by_name(each) for each in specs or [transformer_blocks()]]

    def rule_for(whole: nn.Module) -> Rule:
        rules = [policy.rule_for(whole) for policy in policies]
        decided = lambda answer: (bool(answer[0]), bool(answer[1]))  # noqa: E731
        return lambda *about: max((rule(*about) for rule in rules), key=decided)  # of equal answers the first

    return auto_shard(model, Policy(", ".join(policy.name for policy in policies), rule_for), dry_run=True).units


def matches(pattern: str, fqn: str) -> bool:
    """Whether a name matches a pattern part by part: ``layers.*`` matches ``layers.0``, but not ``layers.0.mlp``."""
    wanted, parts = pattern.split("."), fqn.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _by_name(spec: Any) -> Policy:
    """The modules that one specification selects. A module list without a forward stands for its elements."""
    if isinstance(spec, type):
        return by_class(spec)
    name = f"this {type(spec).__name__}" if isinstance(spec, nn.Module) else repr(spec)

    def is_meant(fqn: str, module: nn.Module) -> bool:
        classes = [base.__name__ for base in type(module).__mro__]
        return module is spec or (isinstance(spec, str) and (matches(spec, fqn) or spec in classes))

    def rule_for(model: nn.Module) -> Rule:
        found = [module for fqn, module in model.named_modules() if is_meant(fqn, module)]
        if not found:
            raise ArgumentError(
                f"parallelize: the model has no module {name}. At its top it has "
                f"{', '.join(fqn for fqn, _ in model.named_children())}; its classes are {classes_of(model)}"
            )
        chosen = {each for module in found for each in ([module] if has_forward(module) else module.children())}
        return lambda fqn, module, numel: (name if module in chosen else "", {})

    return Policy(name, rule_for)


def recompute_and_compile(blocks: Sequence[nn.Module], every: int, compile: bool | str) -> None:
    """Recompute every `every`-th block in backward, starting with the first (0: none), and compile each; a string names
    the backend of `torch.compile`.

    Only innermost blocks are changed and counted. Nothing is traced before the first forward; blocks of one class share
    their graphs.
    """
    innermost = [block for block in blocks if not any(m in blocks for m in block.modules() if m is not block)]
    for index, block in enumerate(innermost):
        recompute = every > 0 and index % every == 0
        if recompute or compile:
            block.__class__ = _treated_class(type(block), recompute, compile)  # type: ignore[arg-type]


@cache
def _treated_class(cls: type[nn.Module], recompute: bool, compile: bool | str) -> Any:
    """A subclass whose forward is that of `cls`, compiled, checkpointed or both."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super(treated, self).__call__, *args, use_reentrant=False, **kwargs)

    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if recompute:
        names["__call__"] = call
    if compile:
        names["forward"] = torch.compile(cls.forward, backend=compile if isinstance(compile, str) else "inductor")
    treated: Any = type(cls.__name__, (cls,), names)
    return treated
