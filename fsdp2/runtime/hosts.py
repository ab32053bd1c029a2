"""Which unit gathers which optional unit: found once, when a root runs its first forward. Layer: runtime, above the
unit.

A unit is optional if its policy says so, or that of a unit around it. Its host is the nearest unit around it that is
not optional. The nearest policy with a `runs_if`, its own or one around it, decides whether it runs.
"""

from collections.abc import Sequence
from weakref import ref

from torch import nn

from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.runtime.optional import Decision, OptionalUnits, Role
from fsdp2.runtime.unit import Unit


def assign_roles(root: nn.Module, units: Sequence[Unit]) -> OptionalUnits | None:
    """Give the optional units and their hosts their roles. Returns what they share; None without optional units.

    Args:
        units: those of `root` and below it, in the order of the module tree.

    Raises:
        ArgumentError: the root is optional.
        UnsupportedError: an optional unit shares a weight with a unit that another decision, or none, is about.
    """
    for unit in units:
        unit.role = None
    if not any(unit.settings.optional for unit in units):
        return None
    if units[0].settings.optional is not None:
        raise ArgumentError(
            "the root is an optional unit, but it has no unit around it that could gather it for the ranks that do not "
            "run it. Leave out optional= there; a model that some ranks do not need can be below a small module."
        )
    around = _units_around(root, units)
    chains = {unit: [each for each in (*around[unit], unit) if each.settings.optional is not None] for unit in units}
    optional = [unit for unit in units if chains[unit]]
    hosts = {unit: next(each for each in reversed(around[unit]) if not chains[each]) for unit in optional}
    decisions: dict[Unit, Decision] = {}
    deciders = {unit: _decider(chains[unit]) for unit in optional}
    for unit in optional:
        decider = deciders[unit]
        assert decider.settings.optional is not None
        decision = decisions.setdefault(decider, Decision(decider.fqn, decider.settings.optional))
        decision.units.append(ref(unit))
    ordered = list(decisions.values())
    shared = OptionalUnits(ordered, [unit for unit in units if unit in hosts or unit in hosts.values()])
    for unit in optional:
        policy = chains[unit][-1].settings.optional
        assert policy is not None
        unit.role = Role(shared, decisions[deciders[unit]], policy.average_over)
    for unit, host in hosts.items():
        if host.role is None:
            host.role = Role(shared, None, "all")
        host.role.guests.append(ref(unit))
    _check_weights(units)
    return shared


def _decider(chain: Sequence[Unit]) -> Unit:
    """The unit whose policy decides, of optional units that are inside of each other, the innermost last."""
    asked = [unit for unit in chain if unit.settings.optional is not None and unit.settings.optional.runs_if]
    return asked[-1] if asked else chain[-1]


def _units_around(root: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[Unit]]:
    """For each unit those that contain all its modules, wherever these are; the innermost last."""
    places: dict[nn.Module, list[str]] = {}
    for fqn, module in root.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(fqn)
    of = {unit: [fqn for module in unit.modules for fqn in places.get(module, ())] for unit in units}
    found: dict[Unit, list[Unit]] = {}
    for unit in units:
        found[unit] = [
            other
            for other in units
            if other is not unit and all(any(_is_in(inner, outer) for outer in of[other]) for inner in of[unit])
        ]
        found[unit].sort(key=lambda other: max(len(fqn) for fqn in of[other]))
    return found


def _is_in(inner: str, outer: str) -> bool:
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _check_weights(units: Sequence[Unit]) -> None:
    """Raise if units that share a weight are not gathered and reduced together."""
    owners = {id(group): unit for unit in units for group in unit.groups}
    for unit in units:
        for group in unit.borrowed:
            owner = owners[id(group)]
            if _decision(owner) is not _decision(unit):
                names = [param.fqn for param in group.params]
                raise UnsupportedError(
                    f"units '{owner.fqn}' and '{unit.fqn}' share a weight (one of {names}), and not both run on the "
                    "same ranks: at least one of them is optional. Leave out optional=, or give each a weight."
                )


def _decision(unit: Unit) -> Decision | None:
    return None if unit.role is None else unit.role.decision
