"""Who steps which matrix of an optimizer, agreed by all ranks. Layer: optim, below matrix.

The plan is computed on each rank from shapes, meshes and placements, and then compared, once: if ranks were to differ,
they would wait for each other forever, or step the wrong matrices. After the first step of a matrix its owner tells the
others what its state consists of.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2.comm.groups import group_of_all
from fsdp2.errors import MisuseError
from fsdp2.optim import owners as owning
from fsdp2.optim.exchange import Bucket, Local
from fsdp2.optim.matrices import Share, Split, boxes_of_matrices, cost_of
from fsdp2.optim.owned import Crew
from fsdp2.optim.shown import ShownState, form_of
from fsdp2.placement.tiling import Tiling, replicated, tiling_of

__all__ = ["MatrixGroup", "Owners", "Plan"]

# The owner of each matrix that has one: (group, position, number) -> global rank.
Owners = dict[tuple[int, int, int], int]


@dataclass(frozen=True)
class MatrixGroup:
    """A param group whose parameters are stepped as whole matrices.

    Attributes:
        index: among the param groups.
        names: of the parameters, for messages.
        kind: the name of the optimizer's class.
    """

    index: int
    params: Sequence[torch.Tensor]
    names: Sequence[str]
    split: Split
    kind: str


class Plan:
    """What each rank does in a step.

    Creating it may create process groups, so every rank creates plans in the same order.

    Args:
        owners: those of earlier plans, which stay; those of new matrices are added.

    Attributes:
        params: of all groups; if one is replaced, the plan is no longer valid.
        plain: the matrices of plain parameters, which every rank steps by itself.
        crews: for each set of ranks, the matrices that have owners among them.
        states: what is kept for each matrix.
    """

    def __init__(self, groups: Sequence[MatrixGroup], owners: Owners):
        self.params = [param for group in groups for param in group.params]
        self.plain: list[Share] = []
        self.crews: list[tuple[Crew, list[Share]]] = []
        self._groups = {group.index: group for group in groups}
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        by_ranks: dict[Any, list[tuple[MatrixGroup, int, DTensor]]] = {}
        for group in groups:
            for position, param in enumerate(group.params):
                if isinstance(param, DTensor):
                    mesh = param.device_mesh
                    key = mesh.device_type, tuple(sorted(mesh.mesh.flatten().tolist()))
                    by_ranks.setdefault(key, []).append((group, position, param))
                else:
                    tiling = replicated(param.shape, (self._rank,))
                    self.plain += _shares(group, position, tiling, {})
        for (device_type, _), held in by_ranks.items():
            process_group = group_of_all(held[0][2].device_mesh)
            ranks = tuple(dist.get_process_group_ranks(process_group))
            crew = Crew(ranks, process_group, device_type)
            _choose(held, ranks, owners)
            shares = [
                share
                for group, position, param in held
                for share in _shares(group, position, tiling_of(param, group.names[position]), owners)
            ]
            order = owning.most_expensive_first([cost_of(share.box) for share in shares])
            self.crews.append((crew, [shares[index] for index in order]))
        self._crews = {share: crew for crew, share in self.all_shares()}
        self.states = {
            share: ShownState(share, crew, self._rank, self.home_of(share)) for share, crew in self._crews.items()
        }

    def agree(self) -> None:
        """Compare the plan with the other ranks'. Collective over each crew.

        Raises:
            MisuseError: ranks have different parameters or param groups.
        """
        for crew, shares in self.crews:
            described = "\n".join(map(self._describe, shares))
            if len(set(_said_by_all(crew, hashlib.sha256(described.encode()).hexdigest()))) > 1:
                said = [each.split("\n") for each in _said_by_all(crew, described)]
                for rank, theirs in zip(crew.ranks, said, strict=True):
                    for one, other in zip([*said[0], "nothing more"], [*theirs, "nothing more"], strict=False):
                        if one != other:
                            raise MisuseError(
                                f"the optimizers of ranks {crew.ranks[0]} and {rank} differ: rank {crew.ranks[0]} has "
                                f"{one}; rank {rank} has {other}. Give all ranks the same parameters in the same "
                                "groups and order."
                            )

    def show_new(self, fresh: Sequence[Share], state: Mapping[Any, Any]) -> None:
        """Show the states of matrices that were stepped for the first time. Collective over each crew with some."""
        for crew in [None, *(crew for crew, _ in self.crews)]:
            new = sorted(
                (share for share in fresh if self._crews[share] is crew),
                key=lambda share: (share.group, share.position, share.number),
            )
            insides = {index: self.states[share].inside for index, share in enumerate(new)}
            forms = {index: form_of(inside) for index, inside in insides.items() if inside is not None}
            if crew is not None and new:
                forms = {index: form for own in _said_by_all(crew, forms) for index, form in own.items()}
            for index, form in sorted(forms.items()):  # none of a matrix whose step has failed
                self.states[new[index]].show(state[self.param_of(new[index])], form)

    def buckets(self, local_of: Callable[[Share], Local], limit_bytes: int) -> list[Bucket]:
        """The matrices of parameters that are trained, in buckets."""
        result = []
        for crew, shares in self.crews:
            by_dtype: dict[torch.dtype, list[Share]] = {}
            for share in shares:
                if self.param_of(share).requires_grad:
                    by_dtype.setdefault(share.wire_dtype, []).append(share)
            for trained in by_dtype.values():
                sizes = [share.box.numel * share.dtype.itemsize for share in trained]
                for part in owning.buckets_of(sizes, len(crew.ranks), limit_bytes):
                    result.append(Bucket(crew, [trained[index] for index in part], local_of, self.home_of))
        return result

    def param_of(self, share: Share) -> torch.Tensor:
        """The parameter that a matrix is of."""
        return self._groups[share.group].params[share.position]

    def home_of(self, share: Share) -> torch.device:
        """Where it lives; with CPU offload not where its mesh communicates."""
        param = self.param_of(share)
        return (local_tensor(param) if isinstance(param, DTensor) else param).device

    def all_shares(self) -> Iterator[tuple[Crew | None, Share]]:
        """Every matrix; the same order on every rank of a crew."""
        for share in self.plain:
            yield None, share
        for crew, shares in self.crews:
            for share in shares:
                yield crew, share

    def _describe(self, share: Share) -> str:
        """All that ranks must agree on."""
        tiling = share.tiling
        return (
            f"{self._groups[share.group].kind} of group {share.group}: '{share.name}' {list(tiling.shape)} "
            f"{share.dtype}, gradient {share.grad_dtype}, matrix {share.number} of {share.num_matrices} {share.box}, "
            f"cut {tiling.cuts} over {tiling.grid.shape} {tiling.grid.ranks}, owned by rank {share.owner}"
        )


def _said_by_all(crew: Crew, what: Any) -> list[Any]:
    """What each rank passes, in the order of the ranks. Collective."""
    said: list[Any] = [None] * len(crew.ranks)
    dist.all_gather_object(said, what, group=crew.group)
    return said


def _shares(group: MatrixGroup, position: int, tiling: Tiling, owners: Owners) -> list[Share]:
    """The matrices of a parameter. One without an owner belongs to the only rank of its tiling."""
    param, name = group.params[position], group.names[position]
    boxes = boxes_of_matrices(name, param.shape, group.split)
    grad_dtype = param.grad_dtype or param.dtype
    found = [owners.get((group.index, position, number), tiling.grid.ranks[0]) for number in range(len(boxes))]
    return [
        Share(name, group.index, position, number, len(boxes), box, tiling, owner, param.dtype, grad_dtype)
        for number, (box, owner) in enumerate(zip(boxes, found, strict=True))
    ]


def _choose(held: Sequence[tuple[MatrixGroup, int, DTensor]], ranks: Sequence[int], owners: Owners) -> None:
    """Add the owners of matrices that have none yet."""
    costs: dict[tuple[int, int, int], int] = {}
    for group, position, param in held:
        for number, box in enumerate(boxes_of_matrices(group.names[position], param.shape, group.split)):
            costs[group.index, position, number] = cost_of(box)
    loads = dict.fromkeys(ranks, 0)
    for key, cost in costs.items():
        if key in owners:
            loads[owners[key]] += cost
    new = [key for key in costs if key not in owners]
    chosen = owning.choose_owners([costs[key] for key in new], ranks, [loads[rank] for rank in ranks])
    owners.update(zip(new, chosen, strict=True))
