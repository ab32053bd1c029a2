"""`Matrix`: its parts on the ranks, its owner and its state; `OwnedTensor`: that state. Layer: optim.

On the owner the state (inside) is what the optimizer made: tensors by name. In ``optimizer.state[param]`` (outside)
every rank has the same entries: an `OwnedTensor` for each, whose local tensor on the owner is the tensor inside. So
code that reads an optimizer's state (checkpoints) needs no special handling. If a parameter has several matrices, the
number of the matrix follows the name: ``momentum_buffer[2]``.

The outside is authoritative. Tensors that were replaced there, by `load_state_dict` or the user, are taken in before a
step. If they are distributed differently, all ranks gather them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2._torch.optim import mesh_of_one
from fsdp2._torch.shared import full_tensor
from fsdp2.errors import MismatchError, UnsupportedError
from fsdp2.layout import strides
from fsdp2.placement.box import Box
from fsdp2.placement.tiling import Tiling

__all__ = ["Crew", "Matrix", "OwnedTensor", "form_of"]

State = dict[str, Any]
Form = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor of a state


@dataclass(frozen=True, eq=False)
class Crew:
    """The ranks among which matrices have owners.

    Attributes:
        ranks: global ranks, in the order of the group.
        group: their process group; None for this rank alone, with plain parameters.
        device_type: the device type of the meshes.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    device_type: str

    @property
    def rank(self) -> int:
        """The index of this rank in `ranks`."""
        return self.ranks[0] if self.group is None else dist.get_rank()

    def said_by_all(self, what: Any) -> list[Any]:
        """All-gather an object from each rank, in the order of the ranks. Collective."""
        said: list[Any] = [what] * len(self.ranks)
        if self.group is not None:
            dist.all_gather_object(said, what, group=self.group)
        return said


class OwnedTensor(DTensor):
    """Optimizer state of `matrix_optimizer`, a DTensor: `owner` has the whole tensor, others have an empty local one.

    Its mesh consists of its owner only, so code that reads DTensors knows where it is. Unlike a plain DTensor it can be
    gathered by all ranks of the matrix's group (`full_tensor`), as `get_optimizer_state_dict(full_state_dict=True)`
    does. That is collective over the group.

    Attributes:
        owner: the owner's global rank.
        crew: the ranks that can gather it.
    """

    owner: int
    crew: Crew

    @staticmethod
    def of(local: torch.Tensor, shape: Sequence[int], owner: int, crew: Crew) -> "OwnedTensor":
        """An owned tensor of `shape`.

        Args:
            local: the whole tensor on the owner, an empty one of the same dtype on other ranks.
        """
        spec = make_spec(mesh_of_one(crew.device_type, owner), (Replicate(),), shape, strides(shape), local.dtype)
        tensor = make_dtensor(local, spec, kind=OwnedTensor)
        assert isinstance(tensor, OwnedTensor)
        tensor.owner, tensor.crew = owner, crew
        return tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective: every rank of the crew must call it."""
        local = local_tensor(self)
        if len(self.crew.ranks) == 1:
            return local
        sent = local if dist.get_rank() == self.owner else local.new_empty(self.shape)
        sent = sent.to(self.crew.device_type).contiguous()
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
        spec = make_spec(self.device_mesh, (Replicate(),), self.shape, strides(self.shape), self.dtype)
        return make_dtensor(self.full_tensor(), spec)

    # Operations that copy this tensor must not return a plain DTensor, which other ranks cannot gather.

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


@dataclass(eq=False)
class Matrix:
    """One matrix of a parameter on this rank.

    Attributes:
        name: the parameter's name, for messages.
        group: the index of its param group.
        number, box: the index of the matrix among the parameter's `num_matrices`, and its box.
        tiling: the parameter's tiling.
        crew: the ranks that hold the parameter; this rank alone for a plain one.
        owner: the global rank that steps it.
        inside: the state that the optimizer sees; None before the first step, and on ranks that do not own the matrix.
    """

    param: torch.Tensor
    name: str
    group: int
    number: int
    num_matrices: int
    box: Box
    tiling: Tiling
    crew: Crew
    owner: int = -1
    inside: State | None = None
    _shown: State | None = None  # by the optimizer's own names

    @property
    def suffix(self) -> str:
        """The suffix of the names under which its state is shown."""
        return f"[{self.number}]" if self.num_matrices > 1 else ""

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of its gradient."""
        return self.param.grad_dtype or self.param.dtype

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter. With CPU offload it is not on the mesh's device."""
        return local_tensor(self.param) if isinstance(self.param, DTensor) else self.param.detach()

    def piece_of(self, rank: int) -> Box | None:
        """The part of the matrix that `rank` holds, in coordinates of the parameter; None if it holds none."""
        box = self.tiling.box_of(rank)
        return None if box is None else box.intersect(self.box)

    def within_local(self, piece: Box) -> tuple[slice, ...]:
        """The index of this rank's piece in its local tensor."""
        box = self.tiling.box_of(self.crew.rank)
        assert box is not None
        return piece.within(box).slices()

    def sends(self, rank: int) -> bool:
        """Whether the owner uses the piece of `rank`: with several replicas, only pieces of its own."""
        grid = self.tiling.grid
        at, home = grid.coordinates(rank), grid.coordinates(self.owner)
        assert at is not None and home is not None
        return all(at[axis] == home[axis] for axis in self.tiling.free_axes)

    @property
    def is_new(self) -> bool:
        """Whether none of its state is shown yet. (The optimizer may keep none.)"""
        return self._shown is None

    def take_in(self, outer: State | None) -> None:
        """Take in the state outside, if it was replaced. Collective over the crew if it is distributed differently.

        Raises:
            MismatchError: it has no state for this matrix, or has values that are not tensors.
        """
        shown = self._shown or {}
        if not outer:
            if shown:
                self.inside = self._shown = None
            return
        suffix = self.suffix
        found = {name.removesuffix(suffix): value for name, value in outer.items() if name.endswith(suffix)}
        if shown and found.keys() == shown.keys() and all(found[name] is shown[name] for name in found):
            return
        got = {name: tuple(torch.as_tensor(value).shape) for name, value in found.items()}
        expected = {name: tuple(value.shape) for name, value in shown.items()} or "some tensors"
        is_of_one = bool(found) and not any("[" in name for name in found) and all(map(torch.is_tensor, found.values()))
        if not is_of_one or (shown and expected != got):
            raise MismatchError(
                f"'{self.name}': its optimizer state {[*outer]} has for matrix {self.number} of {self.num_matrices} "
                f"{got}, expected {expected}. Load the state of the same optimizer with the same `split`, or none."
            )
        whole = {name: self._whole(value) for name, value in found.items()}
        self.inside, self._shown = whole if self.owner == self.crew.rank else None, None
        self.show(outer, form_of(found))

    def put_out(self, outer: State | None, inside: State) -> None:
        """On the owner, keep the state after a step, and show it if state was shown before. New state is shown by all
        ranks together (`show`), so that entries have the same order everywhere: code that gathers them depends on it.

        Raises:
            UnsupportedError: it has values that are not tensors, or its form has changed, which other ranks cannot
                know.
        """
        found = {name: getattr(value, "shape", type(value)) for name, value in inside.items()}
        can_be_shown = all(isinstance(value, torch.Tensor) and "[" not in name for name, value in inside.items())
        if not can_be_shown or (self._shown is not None and form_of(self._shown) != form_of(inside)):
            raise UnsupportedError(
                f"'{self.name}': its optimizer keeps {found}: expected tensors, a count of steps as a 0-dim one, all "
                "made in the first step: its owner cannot tell other ranks of anything else"
            )
        self.inside = inside
        if outer is not None and self._shown is not None:
            self.show(outer, form_of(inside))

    def show(self, outer: State, form: Form) -> None:
        """Create the entries outside, empty ones on ranks that do not own the matrix."""
        known, self._shown = self._shown or {}, {}
        for name, (shape, dtype) in form.items():
            local = None if self.inside is None else self.inside[name]
            entry = known.get(name)
            if self.crew.group is None:
                entry = local
            elif entry is None or (local is not None and local_tensor(entry) is not local):
                entry = self.owned(local, shape, dtype)
            self._shown[name] = outer[f"{name}{self.suffix}"] = entry

    def owned(self, local: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> OwnedTensor:
        """A part of its state, for outside. `local`: the owner's tensor; None for a new, unfilled one."""
        if local is None:
            size = tuple(shape) if self.owner == self.crew.rank else 0
            local = torch.empty(size, dtype=dtype, device=self.local.device)
        return OwnedTensor.of(local, shape, self.owner, self.crew)

    def _whole(self, value: Any) -> Any:
        """The whole value, on the owner. Collective for a DTensor that is not on the owner's mesh."""
        if not isinstance(value, DTensor):
            return value
        return local_tensor(value) if value.device_mesh.mesh.tolist() == [self.owner] else full_tensor(value)


def form_of(state: State) -> Form:
    """What other ranks must know about a state."""
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
