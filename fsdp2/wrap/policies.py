"""Which modules become units: the policies of `auto_shard`. Layer: above the api, below `wrap`.

A *policy* looks at the model once and returns a *rule*; the rule answers, for one module at a time, whether that module
becomes a unit, and why. Policies look only at the module tree, without data or communication, so all ranks decide the
same, and models on the meta device work.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.runtime.unit import has_forward, unit_of

_Container = nn.ModuleList | nn.ModuleDict | nn.Sequential


@dataclass(frozen=True)
class Place:
    """The module that a rule decides about.

    Attributes:
        fqn: the module's first name; ``""`` for the root.
        module: the module.
        numel: elements of the parameters at and below it that no unit chosen so far holds.
    """

    fqn: str
    module: nn.Module
    numel: int


@dataclass(frozen=True)
class Verdict:
    """The decision of a rule.

    Attributes:
        shard: whether the module becomes a unit.
        reason: why, or why not, in words.
        options: options of `fully_shard` for this module, which override those given to `auto_shard`.
    """

    shard: bool
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """Which modules become units: from `by_class`, `by_size`, `by_predicate` or `transformer_blocks`, or your own.

    Attributes:
        name: for the report.
        rule_for: called once with the model; returns the rule. The rule is called with each module, children first,
            and must answer the same on all ranks. Neither may change the model.
    """

    name: str
    rule_for: Callable[[nn.Module], Callable[[Place], Verdict]]


def by_class(*classes: type[nn.Module] | str) -> Policy:
    """Every module of one of these classes, or of a class derived from one, becomes a unit.

    A string is the name of a class, for classes that are inconvenient to import. This is FSDP1's `ModuleWrapPolicy` and
    `transformer_auto_wrap_policy`, and Accelerate's `TRANSFORMER_BASED_WRAP`.

    Raises:
        ArgumentError: no class is given, or something that is not a class; from `auto_shard`: the model has no
            module of that class.

    Example::

        auto_shard(model, by_class(Block, nn.Embedding))
        auto_shard(model, by_class("LlamaDecoderLayer"))
    """
    given: tuple[Any, ...] = classes
    for wanted in given:
        if not isinstance(wanted, str) and not (isinstance(wanted, type) and issubclass(wanted, nn.Module)):
            raise ArgumentError(f"by_class: expected classes of modules, or their names, got {wanted!r}")
    if not classes:
        raise ArgumentError("by_class: expected at least one class, got none")
    names = [wanted if isinstance(wanted, str) else wanted.__name__ for wanted in classes]

    def rule_for(model: nn.Module) -> Callable[[Place], Verdict]:
        modules = list(model.modules())
        for wanted, name in zip(classes, names, strict=True):
            if not any(_is_a(module, wanted) for module in modules):
                raise ArgumentError(f"by_class: the model has no module of class {name}. It has {classes_of(model)}.")

        def rule(place: Place) -> Verdict:
            for wanted, name in zip(classes, names, strict=True):
                if _is_a(place.module, wanted):
                    return Verdict(True, f"its class is {name}")
            return Verdict(False, f"its class is not {' or '.join(names)}")

        return rule

    return Policy(f"by_class({', '.join(names)})", rule_for)


def by_size(min_numel: float = 1e8) -> Policy:
    """A module becomes a unit when the parameters below it that no unit holds yet have at least `min_numel` elements.

    Children are decided before their parents, so units are as small as the limit allows. This is FSDP1's
    `size_based_auto_wrap_policy` (with `min_num_params`), and Accelerate's `SIZE_BASED_WRAP`.

    Raises:
        ArgumentError: `min_numel` is not positive; from `auto_shard`: no module is that large.
    """
    if not min_numel > 0:
        raise ArgumentError(f"by_size: expected a positive number of elements, got {min_numel!r}")

    def rule(place: Place) -> Verdict:
        if place.numel >= min_numel:
            return Verdict(True, f"reaches {min_numel:,.0f} elements")
        return Verdict(False, f"smaller than {min_numel:,.0f} elements")

    return Policy(f"by_size({min_numel:,.0f})", lambda model: rule)


def by_predicate(predicate: Callable[[str, nn.Module], bool | Mapping[str, Any]]) -> Policy:
    """Every module for which ``predicate(fqn, module)`` is true becomes a unit.

    A dict means yes, with options of `fully_shard` for this unit (also for the root, whose FQN is ``""``). This is
    FSDP1's `lambda_auto_wrap_policy` and `CustomPolicy`, with the FQN added.

    Example::

        def last_stays(fqn, module):  # the last block is needed at once in backward: keep it unsharded
            return {"reshard_after_forward": fqn != "blocks.31"} if isinstance(module, Block) else False

        auto_shard(model, by_predicate(last_stays))
    """
    name = getattr(predicate, "__name__", type(predicate).__name__)

    def rule(place: Place) -> Verdict:
        answer = predicate(place.fqn, place.module)
        if isinstance(answer, Mapping):
            return Verdict(True, f"{name} chose it", answer)
        return Verdict(bool(answer), f"{name} chose it" if answer else f"{name} did not choose it")

    return Policy(f"by_predicate({name})", lambda model: rule)


def transformer_blocks(min_share: float = 0.01) -> Policy:
    """The repeated blocks of the model become units.

    If a model names its blocks (Hugging Face's `_no_split_modules`), these become units. Otherwise the policy looks for
    *stacks*: two or more modules of one class in a ModuleList, ModuleDict or Sequential, which have modules with
    parameters below them. There may be several stacks (an encoder's and a decoder's). Only outermost stacks count, so
    the experts of a block stay with it. But if the elements of a stack consist mostly of a stack of such blocks, as the
    stages of a hierarchical vision model do, the inner blocks become units.

    Args:
        min_share: stacks with less than this fraction of the model's parameters belong to the unit above them.

    Raises:
        ArgumentError: `min_share` is not between 0 and 1; from `auto_shard`: the model has no such blocks.
    """
    if not 0 <= min_share <= 1:
        raise ArgumentError(f"transformer_blocks: expected a min_share within 0 and 1, got {min_share!r}")

    def rule_for(model: nn.Module) -> Callable[[Place], Verdict]:
        blocks = _named_blocks(model) or _stacked_blocks(model, min_share)
        other = Verdict(False, "not an element of a stack of blocks")
        return lambda place: blocks.get(place.module, other)

    return Policy("transformer_blocks()", rule_for)


def _named_blocks(model: nn.Module) -> dict[nn.Module, Verdict]:
    """The blocks by the class names in `_no_split_modules` of Hugging Face models."""
    owner_of: dict[str, str] = {}
    for module in model.modules():
        for name in getattr(module, "_no_split_modules", None) or ():
            owner_of.setdefault(name, type(module).__name__)
    return {
        module: Verdict(True, f"{name} is in _no_split_modules of {owner_of[name]}")
        for module in model.modules()
        if (name := type(module).__name__) in owner_of
    }


def _stacked_blocks(model: nn.Module, min_share: float) -> dict[nn.Module, Verdict]:
    """The elements of the outermost stacks."""
    blocks: dict[nn.Module, Verdict] = {}
    for fqn, elements in _stacks("", model, set()):
        share = _numel(*elements) / _numel(model)
        text = f"one of {len(elements)} in '{fqn}', which have {share:.1%} of all parameters"
        verdict = Verdict(True, text) if share >= min_share else Verdict(False, f"{text}, less than {min_share:.1%}")
        blocks.update(dict.fromkeys(elements, verdict))
    return blocks


def _stacks(fqn: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, list[nn.Module]]]:
    if module in seen or unit_of(module) is not None:
        return
    seen.add(module)
    for elements in _alike(module):
        if not any(_is_stage(element) for element in elements):
            seen.update(elements)
            yield fqn, elements
    for name, child in module.named_children():
        yield from _stacks(join(fqn, name), child, seen)


def _alike(module: nn.Module) -> list[list[nn.Module]]:
    """The elements of a container that could be blocks, grouped by class, for classes with two or more elements."""
    if not isinstance(module, _Container):
        return []
    by_type: dict[type, list[nn.Module]] = {}
    for element in module.values() if isinstance(module, nn.ModuleDict) else module:
        if has_forward(element) and any(map(_numel, element.children())):
            by_type.setdefault(type(element), []).append(element)
    return [elements for elements in by_type.values() if len(elements) > 1]


def _is_stage(module: nn.Module) -> bool:
    """Whether the module consists mostly of a stack, directly below it, of modules whose children have children with
    parameters. (Experts consist of leaf modules.)"""
    for container in (module, *module.children()):
        for elements in _alike(container):
            have_parts = any(_numel(part) for child in elements[0].children() for part in child.children())
            if have_parts and 2 * _numel(*elements) > _numel(module):
                return True
    return False


def _is_a(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        return any(base.__name__ == wanted for base in type(module).__mro__)
    return isinstance(module, wanted)


def _numel(*modules: nn.Module) -> int:
    return sum(param.numel() for param in {param for module in modules for param in module.parameters()})


def join(prefix: str, name: str) -> str:
    """The FQN of a child."""
    return f"{prefix}.{name}" if prefix else name


def classes_of(model: nn.Module) -> str:
    """The classes that could be units, those of the largest modules first, for messages."""
    by_name: dict[str, list[int]] = {}
    for module in model.modules():
        if module is not model and has_forward(module) and (numel := _numel(module)):
            by_name.setdefault(type(module).__name__, []).append(numel)
    largest = sorted(by_name, key=lambda name: (-max(by_name[name]), name))
    shown = [f"{len(by_name[name])} x {name} (up to {max(by_name[name]):,} elements)" for name in largest[:12]]
    return ", ".join(shown) + (", ..." if len(largest) > 12 else "") if shown else "no module with parameters"
