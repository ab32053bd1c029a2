"""Find the blocks of a model, by a policy of `fsdp2.wrap` or as the user specifies. Layer: parallel.

A block is recomputed, compiled and sharded as one. If a specification matches nothing, the error lists what there is.
Only the module tree is read, so all ranks decide the same, and meta models work.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.runtime.unit import has_forward
from fsdp2.wrap import auto_shard, transformer_blocks
from fsdp2.wrap.policies import Policy, classes_of

__all__ = ["Block", "Blocks", "blocks_of", "matches", "root_options"]

Blocks = Policy | nn.Module | type[nn.Module] | str
"""A policy, a module, a class, or the name of a class or of modules (a pattern, such as ``layers.*``)."""


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        fqn: its name in the model.
        module: the module.
        options: of `fully_shard`, only for this block.
    """

    fqn: str
    module: nn.Module
    options: Mapping[str, Any] = field(default_factory=dict)


def blocks_of(model: nn.Module, spec: Blocks | Sequence[Blocks] | None) -> list[Block]:
    """The blocks of `model`, children before their parents, otherwise in the order of the module tree.

    Args:
        spec: None for `transformer_blocks()`; or a specification, or a list of these.

    Raises:
        ArgumentError: there are no blocks; or a specification matches nothing.
    """
    if spec is None or isinstance(spec, Policy):
        return _by_policy(model, spec or transformer_blocks())
    specs = spec if isinstance(spec, (list, tuple)) else [spec]
    if not specs:
        raise ArgumentError("parallelize: expected some blocks, got an empty list; None finds them")
    chosen: dict[nn.Module, Mapping[str, Any]] = {}
    for each in specs:
        if isinstance(each, Policy):
            chosen |= {block.module: block.options for block in _by_policy(model, each)}
        else:
            for module in _selected(model, each):
                chosen.setdefault(module, {})  # a policy's options stay
    chosen.pop(model, None)
    return [Block(fqn, module, chosen[module]) for fqn, module in _children_first(model) if module in chosen]


def root_options(model: nn.Module, spec: Blocks | Sequence[Blocks] | None) -> Mapping[str, Any]:
    """The options of `fully_shard` that the policies in `spec` have for the root."""
    specs = spec if isinstance(spec, (list, tuple)) else [spec]
    units = [unit for each in specs if isinstance(each, Policy) for unit in auto_shard(model, each, dry_run=True).units]
    return {name: value for unit in units if not unit.fqn for name, value in unit.options.items()}


def matches(pattern: str, fqn: str) -> bool:
    """Whether a name matches a pattern part by part: ``layers.*`` matches ``layers.0``, but not ``layers.0.mlp``."""
    wanted, parts = pattern.split("."), fqn.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _by_policy(model: nn.Module, policy: Policy) -> list[Block]:
    units = auto_shard(model, policy, dry_run=True).units
    return [Block(unit.fqn, model.get_submodule(unit.fqn), unit.options) for unit in units if unit.fqn]


def _selected(model: nn.Module, spec: Any) -> Iterator[nn.Module]:
    """The modules that one specification selects."""
    if isinstance(spec, nn.Module):
        found: Iterable[nn.Module] = [module for module in model.modules() if module is spec]
        what = f"that is this {type(spec).__name__}"
    elif isinstance(spec, type) and issubclass(spec, nn.Module):
        found = [module for module in model.modules() if isinstance(module, spec)]
        what = f"of class {spec.__name__}"
    elif isinstance(spec, str):
        found = [module for fqn, module in model.named_modules() if matches(spec, fqn) or _has_name(module, spec)]
        what = f"'{spec}'"
    else:
        raise ArgumentError(
            f"parallelize: expected blocks as a policy, classes, modules, or names of classes or modules; got {spec!r}"
        )
    if not found:
        raise ArgumentError(f"parallelize: the model has no module {what}{_near(model, spec)}. {_what_there_is(model)}")
    for module in found:
        if has_forward(module):
            yield module
            continue
        elements = [child for child in module.children() if has_forward(child)]  # a module list stands for its blocks
        if not elements:
            raise ArgumentError(
                f"parallelize: {what} is a {type(module).__name__} without forward, so it cannot be a block; name its "
                "elements"
            )
        yield from elements


def _has_name(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _near(model: nn.Module, spec: Any) -> str:
    if not isinstance(spec, str):
        return ""
    names = {type(module).__name__ for module in model.modules()} | {fqn for fqn, _ in model.named_modules() if fqn}
    near = get_close_matches(spec, sorted(names), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _what_there_is(model: nn.Module) -> str:
    top = ", ".join(f"'{name}'" for name, _ in model.named_children())
    return f"At its top it has {top or 'nothing'}; its classes are {classes_of(model)}."


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their first names, each after its submodules."""
    order: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(fqn: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child)
        order.append((fqn, module))

    visit("", model)
    return order
