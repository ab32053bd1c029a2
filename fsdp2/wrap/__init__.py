"""`auto_shard`: choose the modules that become units, shard them and the root, and report why. Layer: above the api.

A *policy* looks at the model once and returns a *rule*; the rule answers, for one module at a time, whether that module
becomes a unit, and why. Everything is decided before anything is sharded, from the module tree alone, without data or
communication. So all ranks decide the same, and meta models work.

With every policy, modules are visited children first, and the root is always a unit. A module never becomes a unit if
it has no `forward`, is already sharded, has no parameters that no other unit holds, or is read by its parent without
being called.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from fsdp2._torch import composable_apis
from fsdp2.api import fully_shard
from fsdp2.arguments import parameter_set
from fsdp2.errors import ArgumentError, MisuseError
from fsdp2.runtime.unit import has_forward, unit_of
from fsdp2.wrap.policies import (
    Place,
    Policy,
    Verdict,
    by_class,
    by_predicate,
    by_size,
    classes_of,
    join,
    transformer_blocks,
)

__all__ = [
    "Left",
    "Place",
    "Policy",
    "Verdict",
    "WrapReport",
    "Wrapped",
    "auto_shard",
    "by_class",
    "by_predicate",
    "by_size",
    "transformer_blocks",
]

_logger = logging.getLogger("fsdp2")
# These use the parameters of a module below them (out_proj) without calling it, so nothing would gather a unit there.
_READ_THEIR_CHILDREN = (nn.MultiheadAttention,)


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
class Left:
    """Modules of one class that did not become units, for one reason; their parameters belong to the unit above them.

    Attributes:
        class_name: their class.
        fqns: their names.
        numel: elements of parameters at and below them that no unit below them holds, together.
        reason: why not.
    """

    class_name: str
    fqns: tuple[str, ...]
    numel: int
    reason: str


@dataclass(frozen=True)
class WrapReport:
    """What `auto_shard` did, or would do. ``str(report)`` is a readable table.

    Attributes:
        policy: the policy's name.
        units: in the order in which they are sharded: children first, the root last.
        left: modules that did not become units: those whose parameters the root holds, and those that the policy chose
            but that cannot be units.
    """

    policy: str
    units: tuple[Wrapped, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        rows = [("unit", "class", "parameters", "why")]
        # A run of equal units is one row: a model of 80 layers should fit on a screen.
        for _, run in groupby(self.units, key=lambda unit: (unit.class_name, unit.numel, unit.reason, unit.options)):
            units = list(run)
            first, last = units[0], units[-1]
            many = len(units) > 1
            names = f"{first.fqn} ... {last.fqn}" if many else first.fqn or "(root)"
            class_name = f"{len(units)} x {first.class_name}" if many else first.class_name
            own = "".join(f", {key}={value!r}" for key, value in first.options.items())
            rows.append((names, class_name, f"{first.numel:,}{' each' if many else ''}", first.reason + own))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{len(self.units)} units by {self.policy}"]
        lines += ["  " + "  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
        for left in self.left:
            names = ", ".join(left.fqns[:3]) + (", ..." if len(left.fqns) > 3 else "")
            lines.append(f"  not a unit: {len(left.fqns)} x {left.class_name} ({names}), {left.numel:,}: {left.reason}")
        return "\n".join(lines)


def auto_shard(model: nn.Module, policy: Policy, *, dry_run: bool = False, **options: Any) -> WrapReport:
    """Call `fully_shard` on the modules that `policy` chooses, children first, and then on `model`.

    Every rank of the mesh must call it on the same model with the same policy, before optimizers are created. The
    report is also logged at level INFO by the logger "fsdp2".

    Args:
        model: becomes the root unit, which holds the parameters that no other unit holds.
        policy: `transformer_blocks`, `by_class`, `by_size`, `by_predicate`.
        dry_run: only report; nothing is sharded, no process group is needed, and `model` may be on the meta device.
        options: of `fully_shard`, for every unit (`mesh`, `mp_policy`, `reshard_after_forward`, ...).

    Returns:
        Which units there are, how large they are, and why; ``print(report)`` shows a table.

    Raises:
        ArgumentError: the policy chooses no module, or names a class that the model does not have; nothing is sharded
            then. Or `fully_shard` refuses an option; earlier units are sharded by then.
        MisuseError: `model` itself is already sharded. (Modules below it may be; they stay as they are.)

    Example::

        report = auto_shard(model, transformer_blocks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        print(report)

    Source: the auto_wrap_policy of FSDP1, https://docs.pytorch.org/docs/stable/fsdp.html.
    """
    if not isinstance(policy, Policy):
        raise ArgumentError(
            f"auto_shard: expected a policy, such as transformer_blocks() or by_class(Block), got {policy!r}; a "
            "function of one's own goes into by_predicate(function)"
        )
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and not has_forward(model):
        raise ArgumentError(
            f"auto_shard: a {type(model).__name__} has no forward, so it cannot be the root; pass the model"
        )
    if unit_of(model) is not None:
        raise MisuseError(f"auto_shard: this {type(model).__name__} is sharded already; call it once, on a plain model")
    if "ignored_params" in options:
        options["ignored_params"] = parameter_set(options["ignored_params"])
    plan = _Plan(policy.rule_for(model), model, options.get("ignored_params") or set())
    report = WrapReport(policy.name, tuple(unit for _, unit in plan.units), plan.left())
    if len(plan.units) == 1:
        why = "; ".join(f"{len(left.fqns)} x {left.class_name}: {left.reason}" for left in report.left)
        raise ArgumentError(
            f"auto_shard: {policy.name} chooses no module below the root ({why}). The model has {classes_of(model)}. "
            "Choose among these with by_class, or call fully_shard(model) for one unit."
        )
    if not dry_run:
        for module, unit in plan.units:
            fully_shard(module, **{**options, **unit.options})
        _logger.info("%s", report)
    return report


# --- the plan ---------------------------------------------------------------------------------------------------------


class _Plan:
    """Asks the rule about every module, children first.

    Attributes:
        units: modules to shard, in that order, the root last.
    """

    def __init__(self, rule: Callable[[Place], Verdict], model: nn.Module, ignored: set[nn.Parameter]):
        self.units: list[tuple[nn.Module, Wrapped]] = []
        self._rule = rule
        self._held = set(ignored)
        self._answers: dict[nn.Module, tuple[Place, Verdict]] = {}
        self._passages: set[nn.Module] = set()  # modules with units below them
        self._refused: list[nn.Module] = []
        self._model = model
        self._visit("", model, "")

    def _visit(self, fqn: str, module: nn.Module, reader: str) -> bool:
        """Decide for `module` and the modules below it. `reader`: the class above that reads them without calling them.
        Returns whether there are units at or below `module`."""
        if module in self._answers:
            return module in self._passages or self._answers[module][1].shard
        if unit_of(module) is not None or "replicate" in composable_apis(module):
            self._held.update(module.parameters())
            return True
        inner_reader = reader or (type(module).__name__ if isinstance(module, _READ_THEIR_CHILDREN) else "")
        below = [self._visit(join(fqn, name), child, inner_reader) for name, child in module.named_children()]
        if any(below):
            self._passages.add(module)
        own = [param for param in module.parameters() if param not in self._held]
        place = Place(fqn, module, sum(param.numel() for param in own))
        verdict = self._rule(place)
        if module is self._model:
            verdict = Verdict(True, "the root: all that no other unit holds", verdict.options)
        elif verdict.shard and (obstacle := _obstacle(place, reader)):
            verdict = Verdict(False, obstacle)
            self._refused.append(module)
        self._answers[module] = place, verdict
        if verdict.shard:
            self._held.update(own)
            unit = Wrapped(fqn, type(module).__name__, place.numel, verdict.reason, verdict.options)
            self.units.append((module, unit))
        return verdict.shard or any(below)

    def left(self) -> tuple[Left, ...]:
        """The modules to report: the outermost ones whose parameters the root holds, and those that were refused."""
        groups: dict[tuple[str, str], list[Place]] = {}
        for module in dict.fromkeys([*self._left_to_root(self._model), *self._refused]):
            place, verdict = self._answers[module]
            groups.setdefault((type(module).__name__, verdict.reason), []).append(place)
        return tuple(
            Left(class_name, tuple(place.fqn for place in places), sum(place.numel for place in places), reason)
            for (class_name, reason), places in groups.items()
        )

    def _left_to_root(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in self._answers or self._answers[child][1].shard:
                continue
            if child in self._passages or (not has_forward(child) and any(child.children())):
                yield from self._left_to_root(child)
            elif self._answers[child][0].numel:
                yield child


def _obstacle(place: Place, reader: str) -> str:
    """Why a module that the policy wants cannot be a unit."""
    if not has_forward(place.module):
        return "has no forward, so nothing would gather its parameters"
    if reader:
        return f"{reader} reads it without calling it"
    return "" if place.numel else "no parameters that no other unit holds"
