"""`auto_shard`: choose the modules that become units, shard them and the root, and report why. Layer: above the api.

A *policy* looks at the model once and returns a *rule*; the rule decides for one module at a time whether it becomes a
unit, and why. Everything is decided before anything is sharded, from the module tree alone, without data or
communication. So all ranks decide the same, and meta models work.

With every policy, modules are visited children first, and the root is always a unit. A module never becomes a unit if
it has no `forward`, is already sharded, has no parameters left for it, or is read by its parent without being called.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from fsdp2._torch import is_replicated
from fsdp2.api import fully_shard
from fsdp2.arguments import parameter_set
from fsdp2.errors import ArgumentError, MisuseError
from fsdp2.runtime.unit import has_forward, unit_of

__all__ = ["Policy", "WrapReport", "Wrapped", "auto_shard", "by_class", "by_predicate", "by_size", "transformer_blocks"]

_logger = logging.getLogger("fsdp2")
# These use the parameters of a submodule (out_proj) without calling it, so a unit there would never be gathered.
_READ_THEIR_CHILDREN = (nn.MultiheadAttention,)

# Called with a module's FQN, the module, and the number of elements of its parameters that no unit holds so far.
# Returns the reason why it becomes a unit ("" if it does not), and options of `fully_shard` for it.
Rule = Callable[[str, nn.Module, int], tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Policy:
    """Which modules become units: from `by_class`, `by_size`, `by_predicate` or `transformer_blocks`.

    Attributes:
        name: its name in the report.
        rule_for: called once with the model; returns the rule, which must give the same answers on all ranks.
    """

    name: str
    rule_for: Callable[[nn.Module], Rule]


@dataclass(frozen=True)
class Wrapped:
    """One unit.

    Attributes:
        fqn: its module's name, ``""`` for the root.
        class_name: its module's class.
        numel: elements of the unsharded parameters that this unit manages.
        reason: why it is a unit.
        options: options that the policy gave for this unit.
    """

    fqn: str
    class_name: str
    numel: int
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WrapReport:
    """What `auto_shard` did, or would do. ``str(report)`` is a readable table.

    Attributes:
        policy: the policy's name.
        units: in the order in which they are sharded: children first, the root last.
        refused: modules that the policy chose but that cannot be units: name -> reason.
    """

    policy: str
    units: tuple[Wrapped, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        rows = [("unit", "class", "parameters", "why")]
        # A run of equal units is one row, so that a model with 80 layers fits on a screen.
        for _, run in groupby(self.units, key=lambda unit: (unit.class_name, unit.numel, unit.reason, unit.options)):
            first, *others = run
            names = f"{first.fqn} ... {others[-1].fqn}" if others else first.fqn or "(root)"
            class_name = f"{len(others) + 1} x {first.class_name}" if others else first.class_name
            own = "".join(f", {key}={value!r}" for key, value in first.options.items())
            rows.append((names, class_name, f"{first.numel:,}{' each' if others else ''}", first.reason + own))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{len(self.units)} units by {self.policy}"]
        lines += ["  " + "  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
        return "\n".join(lines + [f"  not a unit: {fqn}: {reason}" for fqn, reason in self.refused.items()])


def auto_shard(model: nn.Module, policy: Policy, *, dry_run: bool = False, **options: Any) -> WrapReport:
    """Call `fully_shard` on the modules that `policy` chooses, children first, and then on `model`.

    Every rank of the mesh must call it on the same model with the same policy, before optimizers are created. The
    report is also logged at level INFO by the logger "fsdp2".

    Args:
        model: becomes the root unit, which holds the parameters that no other unit holds.
        policy: `transformer_blocks`, `by_class`, `by_size`, `by_predicate`.
        dry_run: only report; nothing is sharded, no process group is needed, and `model` may be on the meta device.
        options: options of `fully_shard` for every unit (`mesh`, `mp_policy`, `reshard_after_forward`, ...).

    Returns:
        The units, their sizes and reasons; ``print(report)`` shows a table.

    Raises:
        ArgumentError: the policy chooses no module, or names a class that the model does not have; in these cases
            nothing is sharded. Or `fully_shard` rejects an option; earlier units are sharded by then.
        MisuseError: `model` itself is already sharded. (Modules below it may be; they stay as they are.)

    Example::

        report = auto_shard(model, transformer_blocks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        print(report)

    Source: the auto_wrap_policy of FSDP1, https://docs.pytorch.org/docs/stable/fsdp.html.
    """
    if not isinstance(policy, Policy):
        raise ArgumentError(
            f"auto_shard: expected a policy, such as transformer_blocks() or by_class(Block), got {policy!r}; wrap "
            "a function of your own with by_predicate(function)"
        )
    if not has_forward(model):
        raise ArgumentError(
            f"auto_shard: a {type(model).__name__} has no forward, so it cannot be the root; pass the model"
        )
    if unit_of(model) is not None:
        raise MisuseError(f"auto_shard: this {type(model).__name__} is sharded already; call it once, on a plain model")
    if "ignored_params" in options:
        options["ignored_params"] = parameter_set(options["ignored_params"])
    units, refused = _plan(model, policy.rule_for(model), options.get("ignored_params") or ())
    report = WrapReport(policy.name, tuple(units.values()), refused)
    if len(units) == 1:
        why = "".join(f"'{fqn}': {reason}. " for fqn, reason in refused.items())
        raise ArgumentError(
            f"auto_shard: {policy.name} chooses no module below the root. {why}The model has {classes_of(model)}. "
            "Choose among these with by_class, or call fully_shard(model) for one unit."
        )
    if not dry_run:
        for module, unit in units.items():
            fully_shard(module, **{**options, **unit.options})
        _logger.info("%s", report)
    return report


def _plan(model: nn.Module, rule: Rule, ignored: Any) -> tuple[dict[nn.Module, Wrapped], dict[str, str]]:
    """The modules to shard, in order; and the chosen modules that cannot be units, with the reason."""
    units: dict[nn.Module, Wrapped] = {}
    refused: dict[str, str] = {}
    held: set[nn.Parameter] = set(ignored)
    seen: set[nn.Module] = set()

    def visit(fqn: str, module: nn.Module, reader: str) -> None:
        """Decide for the modules below `module`, then for it. `reader`: a class above that does not call them."""
        if module in seen:
            return
        seen.add(module)
        if unit_of(module) is not None or is_replicated(module):
            held.update(module.parameters())
            return
        below = type(module).__name__ if isinstance(module, _READ_THEIR_CHILDREN) else reader
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child, below)
        own = [param for param in module.parameters() if param not in held]
        numel = sum(param.numel() for param in own)
        reason, options = rule(fqn, module, numel)
        if module is model:
            reason = "the root: all that no other unit holds"
        elif not reason:
            return
        elif not has_forward(module):
            refused[fqn] = "has no forward, so nothing would gather its parameters"
        elif reader:
            refused[fqn] = f"{reader} reads it without calling it"
        elif not own:
            refused[fqn] = "no parameters that no other unit holds"
        if fqn not in refused:
            held.update(own)
            units[module] = Wrapped(fqn, type(module).__name__, numel, reason, options)

    visit("", model, "")
    return units, refused


# --- policies ---------------------------------------------------------------------------------------------------------


def by_class(*classes: type[nn.Module] | str) -> Policy:
    """Every module of one of these classes, or of a class derived from one, becomes a unit.

    A string is the name of a class, for classes that are inconvenient to import. This is FSDP1's `ModuleWrapPolicy` and
    `transformer_auto_wrap_policy`, and Accelerate's `TRANSFORMER_BASED_WRAP`.

    Raises:
        ArgumentError: no class is given, or an argument is not a class; from `auto_shard`: the model has no module of
            that class.

    Example::

        auto_shard(model, by_class(Block, nn.Embedding))
        auto_shard(model, by_class("LlamaDecoderLayer"))
    """
    given: tuple[Any, ...] = classes
    for wanted in given or (None,):
        if not isinstance(wanted, str) and not (isinstance(wanted, type) and issubclass(wanted, nn.Module)):
            raise ArgumentError(f"by_class: expected classes of modules, or their names, got {wanted!r}")
    names = [wanted if isinstance(wanted, str) else wanted.__name__ for wanted in classes]

    def bases(module: nn.Module) -> set[object]:
        return {key for base in type(module).__mro__ for key in (base, base.__name__)}

    def rule(fqn: str, module: nn.Module, numel: int) -> tuple[str, Mapping[str, Any]]:
        found = [f"its class is {name}" for name, wanted in zip(names, classes, strict=True) if wanted in bases(module)]
        return found[0] if found else "", {}

    def rule_for(model: nn.Module) -> Rule:
        there = set().union(*map(bases, model.modules()))
        for name, wanted in zip(names, classes, strict=True):
            if wanted not in there:
                raise ArgumentError(f"by_class: the model has no module of class {name}. It has {classes_of(model)}.")
        return rule

    return Policy(f"by_class({', '.join(names)})", rule_for)


def by_size(min_numel: float = 1e8) -> Policy:
    """A module becomes a unit when the parameters below it that no unit holds yet have at least `min_numel` elements.

    Children are decided before their parents, so units are as small as the limit allows. This is FSDP1's
    `size_based_auto_wrap_policy` (with `min_num_params`), and Accelerate's `SIZE_BASED_WRAP`.

    Raises:
        ArgumentError: `min_numel` is not positive; from `auto_shard`: no module is large enough.
    """
    if not min_numel > 0:
        raise ArgumentError(f"by_size: expected a positive number of elements, got {min_numel!r}")
    reason = f"reaches {min_numel:,.0f} elements"
    return Policy(
        f"by_size({min_numel:,.0f})", lambda model: lambda fqn, module, numel: (reason * (numel >= min_numel), {})
    )


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

    def rule(fqn: str, module: nn.Module, numel: int) -> tuple[str, Mapping[str, Any]]:
        answer = predicate(fqn, module)
        options = answer if isinstance(answer, Mapping) else None
        return f"{name} chose it" if options is not None or answer else "", options or {}

    return Policy(f"by_predicate({name})", lambda model: rule)


def transformer_blocks() -> Policy:
    """The repeated blocks of the model become units.

    If a model names its blocks (Hugging Face's `_no_split_modules`), these become units. Otherwise the policy looks for
    *stacks*: two or more modules of one class in a ModuleList, ModuleDict or Sequential, which contain modules with
    parameters. There may be several stacks (an encoder's and a decoder's). Only outermost stacks count, so the experts
    of a block are not units.

    Raises:
        ArgumentError: from `auto_shard`: no such blocks were found.
    """

    def rule_for(model: nn.Module) -> Rule:
        blocks = _named_blocks(model) or _stacked_blocks(model)
        return lambda fqn, module, numel: (blocks.get(module, ""), {})

    return Policy("transformer_blocks()", rule_for)


def _named_blocks(model: nn.Module) -> dict[nn.Module, str]:
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    names = {module: type(module).__name__ for module in model.modules()}
    return {module: f"{name} is in _no_split_modules" for module, name in names.items() if name in named}


def _stacked_blocks(model: nn.Module) -> dict[nn.Module, str]:
    """The elements of the outermost stacks."""
    blocks: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for fqn, module in model.named_modules():  # parents first
        if module in inside or not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        elements = [each for each in module.children() if has_forward(each) and any(map(_numel, each.children()))]
        counts = Counter(map(type, elements))
        stack = [each for each in elements if counts[type(each)] > 1]
        blocks |= dict.fromkeys(stack, f"one of {len(stack)} in '{fqn}'")
        inside.update(below for each in stack for below in each.modules())
    return blocks


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def classes_of(model: nn.Module) -> str:
    """The classes of possible units, those of the largest modules first, for messages."""
    sizes: dict[str, list[int]] = {}
    for module in model.modules():
        if module is not model and has_forward(module) and (numel := _numel(module)):
            sizes.setdefault(type(module).__name__, []).append(numel)
    largest = sorted(sizes, key=lambda name: (-max(sizes[name]), name))[:12]
    shown = [f"{len(sizes[name])} x {name} (up to {max(sizes[name]):,} elements)" for name in largest]
    return ", ".join(shown) or "no module with parameters"
