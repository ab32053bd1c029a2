"""`OwnedTensor`: a tensor that one rank has, and every rank sees. Layer: optim.

It is a DTensor on the mesh of its owner alone, so all that reads DTensors knows where it is: the owner has the whole
tensor, the others have an empty local one. Unlike a plain DTensor it can be gathered by the ranks outside of its mesh,
as `get_optimizer_state_dict(full_state_dict=True)` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch import local_tensor, make_dtensor, make_spec, mesh_of_one
from fsdp2.errors import UnsupportedError
from fsdp2.layout import strides

__all__ = ["Crew", "OwnedTensor"]


@dataclass(frozen=True, eq=False)
class Crew:
    """The ranks among which matrices have owners.

    Attributes:
        ranks: global ranks, in the order of the group.
        group: their process group.
        device_type: of the meshes.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    device_type: str
    _meshes: dict[int, DeviceMesh] = field(default_factory=dict, repr=False)

    def mesh_of(self, owner: int) -> DeviceMesh:
        """The mesh of one rank."""
        if owner not in self._meshes:
            self._meshes[owner] = mesh_of_one(self.device_type, owner)
        return self._meshes[owner]


class OwnedTensor(DTensor):
    """Optimizer state of `matrix_optimizer`, a DTensor: `owner` has the whole tensor, others have an empty local one.

    Any rank of the matrix's group can gather it (`full_tensor`), which is collective there.

    Attributes:
        owner: a global rank.
        crew: the ranks that can gather it.
    """

    owner: int
    crew: Crew

    @staticmethod
    def of(local: torch.Tensor, shape: Sequence[int], owner: int, crew: Crew) -> "OwnedTensor":
        """An owned tensor of `shape`.

        Args:
            local: on the owner the whole tensor, elsewhere an empty one of the same dtype.
        """
        spec = make_spec(crew.mesh_of(owner), (Replicate(),), shape, strides(shape), local.dtype)
        tensor = make_dtensor(local, spec, kind=OwnedTensor)
        assert isinstance(tensor, OwnedTensor)
        tensor.owner, tensor.crew = owner, crew
        return tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective: every rank of the crew must call it."""
        local = local_tensor(self)
        if len(self.crew.ranks) == 1:
            return local
        group_device = torch.device(self.crew.device_type)
        is_owner = dist.get_rank() == self.owner
        sent = local.to(group_device) if is_owner else local.new_empty(self.shape, device=group_device)
        sent = sent.contiguous()
        dist.broadcast(sent, self.owner, self.crew.group)
        return sent.to(local.device)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """Only to replicas: a DTensor whose local tensor is the whole one, on every rank. Collective.

        Raises:
            UnsupportedError: other placements.
        """
        if any(not placement.is_replicate() for placement in placements or ()):
            raise UnsupportedError(
                f"a tensor that rank {self.owner} owns can be gathered (placements [Replicate()]), not redistributed "
                f"to {placements}: call full_tensor() on every rank and distribute_tensor() its result"
            )
        whole = self.full_tensor()
        spec = make_spec(self.device_mesh, (Replicate(),), self.shape, strides(self.shape), self.dtype)
        return make_dtensor(whole, spec)

    # What makes a tensor from this one must not make a plain DTensor, which other ranks cannot gather.

    def to(self, *args: Any, **options: Any) -> Any:
        """As of any tensor."""
        return self._like(local_tensor(self).to(*args, **options))

    def cpu(self, *args: Any, **options: Any) -> Any:
        """As of any tensor."""
        return self._like(local_tensor(self).cpu(*args, **options))

    def detach(self) -> Any:
        """As of any tensor."""
        return self._like(local_tensor(self).detach())

    def clone(self, **options: Any) -> Any:
        """As of any tensor."""
        return self._like(local_tensor(self).clone(**options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def _like(self, local: torch.Tensor) -> "OwnedTensor":
        return self if local is local_tensor(self) else OwnedTensor.of(local, self.shape, self.owner, self.crew)
