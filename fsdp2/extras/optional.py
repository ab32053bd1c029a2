"""Optional units: units that some ranks run in a forward of the root and others do not. Layer: extras.

::

    root pre-forward    agree: which optional units does any rank run?          (only if policies have a `runs_if`)
    host pre-forward    gather the host, then the guests that any rank runs     on all ranks, in tree order
      forward           the ranks that run a guest find it gathered
    host post-forward   reshard the host and its guests
    host pre-backward   gather them again if they were resharded
    end of backward     agree: which gradients does any rank have?  Reduce these; zeros where a rank has none

A unit is optional if its own policy, or that of a unit around it, says so. Its *host* is the nearest unit around it
that is not optional; it is a *guest* of that host. A guest is gathered together with its host, so the order of
collectives is the same on all ranks, no matter when, how often or whether a rank runs the guest. The nearest policy
with a `runs_if`, its own or one around it, decides whether it runs. The host's gradients are reduced with its guests',
because the modules around an optional unit (the projector of a vision tower) may have no gradient on the same ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from fsdp2._torch import backward_is_running, outside_transforms
from fsdp2.errors import ArgumentError, OrderError, UnsupportedError
from fsdp2.events import emit
from fsdp2.mesh import Axis, MeshRoles
from fsdp2.policies import UnitSettings
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket, Phase
from fsdp2.runtime.state import Stage
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit
from fsdp2.watch.exchange import Exchange, at_once

_Reducing = Any  # (group, settings) -> the settings of its reduction
_FEATURE = "optional"  # the argument of `fully_shard`, and the key in `Step.notes`


@dataclass(frozen=True)
class OptionalPolicy:
    """For a unit that only some ranks run in a forward of the root: the vision tower of a model that gets text-only
    batches on some ranks, an expert that gets no token. No rank needs a dummy forward.

    The unit around it (its *host*), which must run on all ranks, is gathered, kept and freed together with it and with
    the units below it, which are optional too. Gradients of the optional unit and of its host wait for the end of the
    backward. Then the ranks agree on which gradients exist (one tensor of a few bytes). Parameters that have a gradient
    on any rank are reduced, with zeros from the other ranks. All others keep ``grad = None``, as in one process.

    Attributes:
        runs_if: called on each rank before each forward of the root, with that forward's inputs, as
            ``runs_if(*args, **kwargs)``; returns whether this rank may run the unit in it. The ranks exchange the
            answers (one tensor of a few bytes for all optional units of a mesh). If all are False, the unit is not
            gathered. A rank that answered False and runs the unit gets an `OrderError`. None: always gathered.
        average_over: ``"all"``: divide the sum of gradients by the number of all ranks, as if the others had run the
            unit on a dummy input. ``"ran"``: by the number of ranks that ran it and have gradients at the reduction
            (a sum over microbatches is divided once). `FSDPModule.set_gradient_divide_factor` takes precedence.

    Raises:
        ArgumentError: `runs_if` is not a function, or `average_over` is unknown.

    Example::

        has_images = OptionalPolicy(runs_if=lambda *args, pixel_values=None, **kwargs: pixel_values is not None)
        fully_shard([model.vision_tower, model.projector], optional=has_images)
        fully_shard(model)
    """

    runs_if: Callable[..., bool] | None = None
    average_over: Literal["all", "ran"] = "all"

    def __post_init__(self) -> None:
        if self.runs_if is not None and not callable(self.runs_if):
            raise ArgumentError(f"OptionalPolicy: runs_if: expected a function or None, got {self.runs_if!r}")
        if self.average_over not in ("all", "ran"):
            raise ArgumentError(f"OptionalPolicy: average_over: expected 'all' or 'ran', got {self.average_over!r}")


def _policy_of(optional: Any) -> OptionalPolicy:
    """The argument of `fully_shard` as a policy."""
    if isinstance(optional, bool):
        return OptionalPolicy()
    if isinstance(optional, OptionalPolicy):
        return optional
    hint = f". Pass OptionalPolicy(runs_if={getattr(optional, '__name__', 'function')})." if callable(optional) else ""
    raise ArgumentError(f"fully_shard: optional: expected a bool or an OptionalPolicy, got {optional!r}{hint}")


@dataclass(eq=False)
class _Decision:
    """A policy with a `runs_if`, and the optional units for which it decides.

    Attributes:
        fqn: the unit whose policy it is.
        units: the units for which it decides, in the order of the module tree.
        runs_here: whether this rank may run them in the current forward of the root.
    """

    fqn: str
    policy: OptionalPolicy
    units: list[ref[Unit]] = field(default_factory=list)
    runs_here: bool = True

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide for a forward of the root with these inputs. Raises `ArgumentError` if `runs_if` returns no bool."""
        if self.policy.runs_if is None:
            return
        if not args and not kwargs:  # this rank serves others (`join`)
            self.runs_here = False
            return
        answer = self.policy.runs_if(*args, **kwargs)
        if not isinstance(answer, bool):
            raise ArgumentError(
                f"unit '{self.fqn}': expected a bool from runs_if, got {answer!r}. It is called with the inputs of the "
                "root's forward; for a tensor on a device return tensor.item()."
            )
        self.runs_here = answer


@dataclass(eq=False)
class _Host:
    """A unit that every rank runs, and its guests, in the order of the module tree."""

    unit: ref[Unit]
    guests: list[ref[Unit]] = field(default_factory=list)
    reduction_settings: _Reducing = None
    in_order = True

    def select(self, gathering: bool) -> list[Bucket]:
        """Gather its own groups, and those of guests that any rank needs. Free all of them."""
        (unit,) = _alive([self.unit])
        guests = [group for guest in _alive(self.guests) for group in guest.groups]
        if not gathering:
            for group in guests:
                group.users.clear()  # the same on ranks that ran them and ranks that did not
        elif (skipped := _notes_of(unit).get(_FEATURE)) is not None:
            guests = [group for group in guests if id(group) not in skipped]
        return [*unit.groups, *unit.borrowed, *guests]


@dataclass(eq=False)
class _Guest:
    """An optional unit."""

    unit: ref[Unit]
    decision: _Decision
    reduction_settings: _Reducing = None
    _ran_alone: bool = False
    in_order = False  # its host is

    def select(self, gathering: bool) -> list[Bucket]:
        """Gather nothing, since its host has, unless it is called alone. Raises `OrderError` if `runs_if` returned
        False, or its host is not running."""
        (unit,) = _alive([self.unit])
        groups = [*unit.groups, *unit.borrowed]
        if not gathering:
            return groups
        in_forward, in_backward = unit.ready_step().order is not None, backward_is_running()
        if unit.state.stage is Stage.FORWARD and not in_backward:
            self._ran_alone = not in_forward
            if in_forward and not self.decision.runs_here:
                raise OrderError(
                    f"optional unit '{unit.fqn}' runs, but runs_if of '{self.decision.fqn}' returned False for the "
                    "inputs of this forward of the root. Let it return True whenever the unit may run: a rank that "
                    "does not run it after all contributes zeros."
                )
        if all(group.phase in (Phase.GATHERING, Phase.UNSHARDED) for group in groups):
            return []
        if (in_forward or in_backward) and not self._ran_alone:
            raise OrderError(
                f"optional unit '{unit.fqn}' runs outside of the forward or backward of the unit around it, which "
                "gathers it for all ranks. Call it within that module's forward, and use its outputs there only."
            )
        return groups


class _Found(NamedTuple):
    """The parameters of a group that have a gradient on any rank, and how many ranks have new gradients."""

    indices: frozenset[int]
    num_ranks: int


class _OptionalUnits:
    """The optional units below one root, and their hosts, in the order of the module tree."""

    def __init__(self, decisions: Sequence[_Decision], reduced_late: Sequence[Unit]):
        self._decisions = decisions
        self._reduced_late = [ref(unit) for unit in reduced_late]
        self._found: dict[int, _Found] = {}

    def before_forward(self, notes: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The root's forward starts with these inputs: agree on which units run, and note the ids of groups that no
        rank needs. Collective over the meshes of units whose policies have a `runs_if`."""
        for decision in self._decisions:
            decision.ask(args, kwargs)
        by_mesh: dict[object, list[tuple[Bucket, bool]]] = {}
        for decision in self._decisions:
            if decision.policy.runs_if is not None:
                for unit in _alive(decision.units):
                    for group in unit.groups:
                        by_mesh.setdefault(group.roles.mesh, []).append((group, decision.runs_here))
        skipped: set[int] = set()
        for found in by_mesh.values():
            sums = _sums([[runs] for _, runs in found], found[0][0].roles)
            skipped.update(id(group) for (group, _), (num_ranks,) in zip(found, sums, strict=True) if not num_ranks)
        notes[_FEATURE] = skipped

    def before_last_reductions(self) -> None:
        """Backward is over: agree on which gradients exist, and on how many ranks have new ones. Collective over the
        units' meshes, unless gradient sync is off for all units."""
        by_mesh: dict[object, list[tuple[Bucket, list[bool]]]] = {}
        for unit in _alive(self._reduced_late):
            for group in unit.groups if unit.state.settings.requires_gradient_sync else ():
                flags = [(whole := param.unsharded) is not None and whole.grad is not None for param in group.params]
                by_mesh.setdefault(group.roles.mesh, []).append((group, [*flags, any(flags)]))
        for found in by_mesh.values():
            sums = _sums([flags for _, flags in found], found[0][0].roles)
            for (group, _), (*nums, num_ranks) in zip(found, sums, strict=True):
                indices = frozenset(index for index, num in enumerate(nums) if num)
                self._found[id(group)] = _Found(indices, num_ranks)

    def settings_of_all(self, group: Bucket, settings: UnitSettings) -> UnitSettings:
        """The settings to reduce the parameters of `group` that have a gradient on any rank (or all, if `settings` say
        so)."""
        return replace(settings, reduce_unused=settings.reduce_unused or self._found[id(group)].indices)

    def settings_of_ran(self, group: Bucket, settings: UnitSettings) -> UnitSettings:
        """The same, divided by the number of ranks that have gradients."""
        if settings.gradient_divide_factor is None:
            num_ranks = max(1, self._found[id(group)].num_ranks)
            settings = replace(settings, gradient_divide_factor=float(num_ranks))
        return self.settings_of_all(group, settings)


def _prepare(step: Step) -> None:
    """Find the optional units of a new root, and their hosts.

    Raises:
        ArgumentError: the root is optional.
        UnsupportedError: an optional unit shares a weight with a unit that another decision, or none, applies to.
    """
    units: list[Unit] = step.units
    if not any(_FEATURE in unit.settings.features for unit in units):
        return
    if _FEATURE in units[0].settings.features:
        raise ArgumentError(
            "the root is an optional unit, but it has no unit around it that could gather it for the ranks that do not "
            "run it. Leave out optional= there; a model that some ranks do not need can be below a small module."
        )
    around = _units_around(units)
    decisions: dict[Unit, _Decision] = {}
    guests: dict[Unit, _Guest] = {}
    averaged_over: dict[Unit, str] = {}
    hosts: dict[Unit, _Host] = {}
    for unit in units:
        chain = [each for each in (*around[unit], unit) if _FEATURE in each.settings.features]
        if chain:
            deciding = [each for each in chain if each.settings.features[_FEATURE].runs_if] or chain
            by = deciding[-1]
            decision = decisions.setdefault(by, _Decision(by.fqn, by.settings.features[_FEATURE]))
            decision.units.append(ref(unit))
            guests[unit] = _Guest(ref(unit), decision)
            averaged_over[unit] = chain[-1].settings.features[_FEATURE].average_over
    for unit in guests:
        host = next(each for each in reversed(around[unit]) if each not in guests)
        hosts.setdefault(host, _Host(ref(host))).guests.append(ref(unit))
    _check_weights(units, guests)
    late = [unit for unit in units if unit in guests or unit in hosts]
    optional, weak = _OptionalUnits(list(decisions.values()), late), ref(step)
    for unit in late:
        role = unit.role = guests[unit] if unit in guests else hosts[unit]
        by_ran = averaged_over.get(unit) == "ran"
        role.reduction_settings = optional.settings_of_ran if by_ran else optional.settings_of_all
    step.hooks.before_forward.append(lambda args, kwargs: optional.before_forward(_notes(weak), args, kwargs))
    step.hooks.before_last_reductions.append(optional.before_last_reductions)


def _units_around(units: Sequence[Unit]) -> dict[Unit, list[Unit]]:
    """For each unit the units that contain all its modules, the innermost last."""
    places: dict[nn.Module, list[str]] = {}
    for fqn, module in units[0].modules[0].named_modules(remove_duplicate=False):
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


def _check_weights(units: Sequence[Unit], guests: Mapping[Unit, _Guest]) -> None:
    """Raise if units that share a weight are not gathered and reduced together."""
    owners = {id(group): unit for unit in units for group in unit.groups}
    decisions = {unit: guest.decision for unit, guest in guests.items()}
    for unit in units:
        for group in unit.borrowed:
            owner = owners[id(group)]
            if decisions.get(owner) is not decisions.get(unit):
                names = [param.fqn for param in group.params]
                raise UnsupportedError(
                    f"units '{owner.fqn}' and '{unit.fqn}' share a weight (one of {names}), and not both run on the "
                    "same ranks: at least one of them is optional. Leave out optional=, or give each a weight."
                )


def _notes_of(unit: Unit) -> dict[str, Any]:
    """The notes on the running forward, or on the forward whose backward is running."""
    return unit.ready_step().notes


def _notes(weak: ref[Step]) -> dict[str, Any]:
    step = weak()
    assert step is not None
    return step.notes


def _alive(members: Sequence[ref[Unit]]) -> list[Unit]:
    return [unit for weak in members if (unit := weak()) is not None]


def _sums(rows: Sequence[Sequence[bool]], roles: MeshRoles) -> list[list[int]]:
    """For each flag the number of ranks of the mesh that set it. Collective: one tensor of a few bytes over each axis.

    ::

        rank 0   [[1, 0], [1]]        --> [[1, 0], [2]]
        rank 1   [[0, 0], [1]]        --> [[1, 0], [2]]
    """
    flags = [int(flag) for row in rows for flag in row]
    axes = [roles.shard] if roles.shard_group is not None else []
    axes += [roles.replicate] if roles.replicate_group is not None else []
    with outside_transforms(), torch.inference_mode(False), torch.no_grad():
        sums = torch.tensor(flags, dtype=torch.int32, device=_device(axes[0].group, roles.device))
        for axis in axes:
            _sum_over(axis, sums)
        found = iter(sums.tolist())
    return [[next(found) for _ in row] for row in rows]


def _sum_over(axis: Axis, sums: torch.Tensor) -> None:
    emit("agreement", "", sums.numel(), sums.nbytes, sums.dtype, axis.size)
    what = "agreement on optional units"
    with at_once(Exchange(what, None, axis.group, sums.numel(), sums.nbytes, sums.dtype, sums.device)):
        dist.all_reduce(sums, group=axis.group)


def _device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where to sum flags: on the CPU if the group can, so that it need not wait for work queued on the accelerator."""
    backends = str(dist.get_backend_config(group))
    return torch.device("cpu") if "cpu:" in backends else device


hooks.options[_FEATURE] = _policy_of
hooks.root_made.append(_prepare)
