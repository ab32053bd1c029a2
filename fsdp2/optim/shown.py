"""`ShownState`: what an optimizer keeps for one matrix, as it is inside and as it looks from outside. Layer: optim.

Inside, on the owner alone, it is what the optimizer made: tensors by name. Outside, in ``optimizer.state[param]``,
every rank has the same entries: an `OwnedTensor` for each, whose local tensor on the owner is the very tensor inside.
So what reads an optimizer's state (checkpoints) needs to know nothing. With several matrices to a parameter the number
of the matrix follows the name: ``momentum_buffer[2]``.

The outside is authoritative. What was replaced there, by `load_state_dict` or a user, is taken in before a step, also
if it is distributed in another way: then it is gathered, on all ranks alike.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import full_tensor, local_tensor
from fsdp2.errors import MismatchError, UnsupportedError
from fsdp2.optim.matrices import Share
from fsdp2.optim.owned import Crew, OwnedTensor

__all__ = ["Form", "ShownState", "form_of"]

State = dict[str, Any]
Form = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor of a state


class ShownState:
    """The state of one matrix on this rank.

    Args:
        crew: the ranks that show it; None for a matrix of a plain parameter, which every rank steps and shows itself.
        rank: this one.
        device: where the parameter lives.

    Attributes:
        inside: what the optimizer sees; None before the first step, and on the ranks that do not own the matrix.
    """

    def __init__(self, share: Share, crew: Crew | None, rank: int, device: torch.device):
        self.inside: State | None = None
        self._share, self._crew, self._device = share, crew, device
        self._owns = rank == share.owner
        self._suffix = f"[{share.number}]" if share.num_matrices > 1 else ""
        self._form: Form | None = None  # None before the first step
        self._shown: State = {}  # by the optimizer's own names

    @property
    def is_new(self) -> bool:
        """Whether nothing is shown yet of what the optimizer keeps. (It may keep nothing.)"""
        return self._form is None

    def take_in(self, outer: State | None) -> None:
        """Take in what is outside, if it has been replaced. Collective over the crew if that is distributed otherwise.

        Raises:
            MismatchError: it has no state for this matrix, or other things than tensors.
        """
        if not outer:
            if self._form:
                self.inside, self._form, self._shown = None, None, {}
            return
        names = [name for name in outer if name.endswith(self._suffix)]
        found = {name.removesuffix(self._suffix): outer[name] for name in names}
        if found.keys() == self._shown.keys() and all(found[name] is self._shown[name] for name in found):
            return
        got = {name: tuple(torch.as_tensor(value).shape) for name, value in found.items()}
        expected = None if self._form is None else {name: shape for name, (shape, _) in self._form.items()}
        is_of_one = bool(found) and not any("[" in name for name in found) and all(map(torch.is_tensor, found.values()))
        if not is_of_one or expected not in (None, got):
            raise MismatchError(
                f"'{self._share.name}': its optimizer state {[*outer]} has for matrix {self._share.number} of "
                f"{self._share.num_matrices} {got}, expected {expected or 'some tensors'}. Load the state of the same "
                "optimizer with the same `split`, or none."
            )
        whole = {name: self._whole(value) for name, value in found.items()}
        self.inside, self._shown = whole if self._owns else None, {}
        self.show(outer, form_of(found))

    def put_out(self, outer: State | None, inside: State) -> None:
        """Keep the state after a step, on the owner, and show it if there was one before. A first one is shown by all
        ranks together (`show`), so that entries have the same order everywhere: code that gathers them depends on it.

        Raises:
            UnsupportedError: it has other things than tensors, or another form than it had at first, which other ranks
                cannot know.
        """
        if not all(isinstance(value, torch.Tensor) and "[" not in name for name, value in inside.items()):
            kept = ", ".join(f"'{name}' ({type(value).__name__})" for name, value in inside.items())
            raise UnsupportedError(
                f"'{self._share.name}': its optimizer keeps {kept}: expected tensors, a count of steps as a 0-dim one, "
                "which other ranks and checkpoints can have"
            )
        if self._form is not None and self._form != form_of(inside):
            raise UnsupportedError(
                f"'{self._share.name}': its optimizer state has changed from {self._form} to {form_of(inside)}. Only "
                "its owner knows this. Make all of the state in the first step."
            )
        self.inside = inside
        if outer is not None and self._form is not None:
            self.show(outer, self._form)

    def show(self, outer: State, form: Form) -> None:
        """Make the entries outside; on ranks that do not own the matrix, empty ones."""
        known, self._shown, self._form = self._shown, {}, form
        for name, (shape, dtype) in form.items():
            local = self.inside[name] if self.inside is not None else None
            entry = known.get(name)
            if self._crew is None:
                entry = local
            elif not isinstance(entry, OwnedTensor) or (local is not None and local_tensor(entry) is not local):
                if local is None:
                    local = torch.empty(0, dtype=dtype, device=self._device)
                entry = OwnedTensor.of(local, shape, self._share.owner, self._crew)
            self._shown[name] = outer[f"{name}{self._suffix}"] = entry

    def _whole(self, value: Any) -> Any:
        """The whole value on the owner. Collective if a DTensor is not the owner's."""
        if not isinstance(value, DTensor):
            return value
        if self._crew is not None and value.device_mesh == self._crew.mesh_of(self._share.owner):
            return local_tensor(value)
        return full_tensor(value)


def form_of(state: State) -> Form:
    """What other ranks must know of a state."""
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
