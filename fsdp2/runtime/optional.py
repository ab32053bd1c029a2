"""Optional units: units that some ranks run in a forward of the root and others do not. Layer: runtime, below the unit.

::

    root pre-forward    agree: which optional units does any rank run?          (only where policies have a `runs_if`)
    host pre-forward    gather the host, then those of its guests that some rank runs     on all ranks, in tree order
      forward           the ranks that run a guest find it gathered
    host post-forward   reshard the host and its guests
    host pre-backward   gather them again, where they were resharded
    end of backward     agree: which gradients does any rank have?  Reduce these; zeros where a rank has none

The *host* of an optional unit is the nearest unit above it that every rank runs; the optional unit is its *guest*. So a
guest's gathers have the place of its host's in the order of collectives, which is the same on all ranks, and it does
not matter when, how often or whether a rank runs the guest. The host's gradients are reduced with its guests', because
what stands around an optional unit (the projector of a vision tower) may have no gradient on the same ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
import torch.distributed as dist

from fsdp2._torch import outside_transforms
from fsdp2.comm.base import What, all_reduce
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.events import emit
from fsdp2.mesh import Axis, MeshRoles
from fsdp2.policies import OptionalPolicy, UnitSettings
from fsdp2.runtime.param_group import ParamGroup, Phase
from fsdp2.runtime.parameter import ManagedParameter


class Member(Protocol):
    """`Unit`, as seen from the modules below it."""

    groups: list[ParamGroup]
    settings: UnitSettings
    fqn: str

    @property
    def params(self) -> list[ManagedParameter]: ...
    def in_backward(self) -> UnitSettings: ...
    def reshard(self, to_smaller: bool = False, within_step: bool = False) -> None: ...
    def complete_forward(self) -> None: ...
    def forget_uses(self) -> None: ...
    def reset(self) -> None: ...
    def drop_stale(self) -> None: ...
    def finish_backward(self) -> None: ...
    def check_no_partials(self) -> None: ...


@dataclass(eq=False)
class Decision:
    """What decides whether an optional unit, and the units below it, run.

    Attributes:
        fqn: the unit whose policy it is.
        units: those that it decides about, in the order of the module tree.
        runs_here: whether this rank may run them in the current forward of the root.
    """

    fqn: str
    policy: OptionalPolicy
    units: list[ref[Member]] = field(default_factory=list)
    runs_here: bool = True

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide for a forward of the root with these inputs. Raises `ArgumentError` if `runs_if` returns no bool."""
        if self.policy.runs_if is None:
            return
        answer = self.policy.runs_if(*args, **kwargs)
        if not isinstance(answer, bool):
            raise ArgumentError(
                f"unit '{self.fqn}': expected a bool from runs_if, got {answer!r}. It is called with the inputs of the "
                "root's forward; for a tensor on a device return tensor.item()."
            )
        self.runs_here = answer


class _Found(NamedTuple):
    """The parameters of a group of which some rank has a gradient, and how many ranks have new gradients."""

    indices: frozenset[int]
    num_ranks: int


class OptionalUnits:
    """The optional units below one root, and their hosts, in the order of the module tree."""

    def __init__(self, decisions: Sequence[Decision], reduced_at_end: Sequence[Member]):
        self._decisions = decisions
        self._reduced_at_end = [ref(unit) for unit in reduced_at_end]
        self._found: dict[int, _Found] = {}

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """The root's forward starts, with these inputs: agree on which units run. Returns the ids of the groups that no
        rank needs. Collective over the meshes of units whose policies have a `runs_if`."""
        for decision in self._decisions:
            decision.ask(args, kwargs)
        by_mesh: dict[object, list[tuple[ParamGroup, bool]]] = {}
        for decision in self._decisions:
            if decision.policy.runs_if is not None:
                for unit in _alive(decision.units):
                    for group in unit.groups:
                        by_mesh.setdefault(group.roles.mesh, []).append((group, decision.runs_here))
        skipped: set[int] = set()
        for found in by_mesh.values():
            sums = _sums([[runs] for _, runs in found], found[0][0].roles)
            skipped.update(id(group) for (group, _), (num_ranks,) in zip(found, sums, strict=True) if not num_ranks)
        return frozenset(skipped)

    def begin_reductions(self) -> None:
        """Backward is over: agree on which gradients there are. Collective over the units' meshes, unless all units
        have gradient sync turned off."""
        by_mesh: dict[object, list[tuple[ParamGroup, list[bool]]]] = {}
        for unit in _alive(self._reduced_at_end):
            for group in unit.groups if unit.in_backward().requires_gradient_sync else ():
                flags = group.gradients.which_wait()
                by_mesh.setdefault(group.roles.mesh, []).append((group, [*flags, any(flags)]))
        self._found = {}
        for found in by_mesh.values():
            sums = _sums([flags for _, flags in found], found[0][0].roles)
            for (group, _), (*nums, num_ranks) in zip(found, sums, strict=True):
                indices = frozenset(index for index, num in enumerate(nums) if num)
                self._found[id(group)] = _Found(indices, num_ranks)

    def end_reductions(self) -> None:
        """All reductions were started."""
        self._found = {}

    def found(self, group: ParamGroup) -> _Found:
        """What the ranks have of the gradients of `group`, between `begin_reductions` and `end_reductions`."""
        return self._found[id(group)]


class Role:
    """What one unit has to do with optional units: it is one, or a host, or neither (then it has no role).

    Attributes:
        average_over: of the nearest policy, for an optional unit.
        guests: for a host, its optional units, in the order of the module tree.
    """

    def __init__(self, units: OptionalUnits, decision: Decision | None, average_over: str):
        self.units = units
        self.decision = decision
        self.average_over = average_over
        self.guests: list[ref[Member]] = []
        self._ran_alone = False

    @property
    def is_optional(self) -> bool:
        """Whether some ranks may not run the unit."""
        return self.decision is not None

    def begin_forward(self, fqn: str, is_within_root: bool) -> None:
        """An optional unit's forward starts, in a forward of the root or alone. Raises `OrderError` if `runs_if` said
        that it would not."""
        self._ran_alone = not is_within_root
        if is_within_root and self.decision is not None and not self.decision.runs_here:
            raise OrderError(
                f"optional unit '{fqn}' runs, but runs_if of '{self.decision.fqn}' returned False for the inputs of "
                "this forward of the root. Let it return True whenever the unit may run: a rank that does not run it "
                "after all contributes zeros."
            )

    def guest_groups(self, skipped: frozenset[int] = frozenset()) -> list[ParamGroup]:
        """The groups of a host's guests, without those that have one of these ids."""
        return [group for unit in _alive(self.guests) for group in unit.groups if id(group) not in skipped]

    def comes_gathered(self, fqn: str, groups: Sequence[ParamGroup], is_in_pass: bool) -> bool:
        """Whether an optional unit with these groups has been gathered by its host, in a forward or backward
        (`is_in_pass`) of the root. If False, it is called alone and gathers itself. Raises `OrderError` if its host did
        not run."""
        if all(group.phase in (Phase.GATHERING, Phase.UNSHARDED) for group in groups):
            return True
        if is_in_pass and not self._ran_alone:
            raise OrderError(
                f"optional unit '{fqn}' runs outside of the forward or backward of the unit around it, which gathers "
                "it for all ranks. Call it within that module's forward, and use its outputs there only."
            )
        return False

    def reduction_of(self, group: ParamGroup, settings: UnitSettings) -> tuple[UnitSettings, frozenset[int] | None]:
        """How to reduce `group` at the end of backward: the settings, and the parameters of which some rank has a
        gradient; None for all trainable ones, as `set_reduce_scatter_unused_params(True)` says."""
        found = self.units.found(group)
        if self.average_over == "ran" and settings.gradient_divide_factor is None:
            settings = replace(settings, gradient_divide_factor=float(max(1, found.num_ranks)))
        return settings, None if settings.reduce_unused else found.indices


def _alive(members: Sequence["ref[Member]"]) -> list[Member]:
    return [unit for weak in members if (unit := weak()) is not None]


def _sums(rows: Sequence[Sequence[bool]], roles: MeshRoles) -> list[list[int]]:
    """For each flag the number of ranks of the mesh that have it set. Collective: one tensor of a few bytes, over each
    axis of the mesh.

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
    kind = "agreement on optional units"
    all_reduce(sums, What(kind, None, sums.numel(), sums.nbytes, sums.dtype, axis.group, sums.device))


def _device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where to sum flags: on the CPU if the group can, so that the CPU need not wait for the accelerator's queue."""
    backends = str(dist.get_backend_config(group))
    return torch.device("cpu") if "cpu:" in backends else device
