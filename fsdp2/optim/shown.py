"""`ShownState`: what an optimizer keeps for one matrix, as it is inside and as it looks from outside. Layer: optim.

Inside, on the owner alone, it is what the optimizer made: tensors of the matrix's shape, lists of others, numbers.
Outside, in ``optimizer.state[param]``, every rank has the same entries: an `OwnedTensor` for each value, whose local
tensor on the owner is the very tensor inside. So what reads an optimizer's state (checkpoints) needs to know nothing.

The outside is authoritative. What was replaced there, by `load_state_dict` or a user, is taken in before a step, also
if it is distributed in another way: then it is gathered, on all ranks alike.
"""

from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import full_tensor, local_tensor
from fsdp2.errors import MismatchError, UnsupportedError
from fsdp2.optim.forms import NUMBERS, SHOWN_AS, Leaf, built, form_of, leaves_of, values_in
from fsdp2.optim.matrices import Share
from fsdp2.optim.owned import Crew, OwnedTensor

__all__ = ["ShownState"]

State = dict[str, Any]


class ShownState:
    """The state of one matrix on this rank.

    Args:
        form: see `forms`; the same on all ranks.
        crew: the ranks that show it; None for a matrix of a plain parameter, which every rank steps and shows itself.
        rank: this one.
        device: where the parameter lives.

    Attributes:
        inside: what the optimizer sees; None before the first step, and on the ranks that do not own the matrix.
    """

    def __init__(self, share: Share, form: dict[str, Any], crew: Crew | None, rank: int, device: torch.device):
        self.inside: State | None = None
        self._share = share
        self._form = form
        infix = f"[{share.number}]" if share.num_matrices > 1 else ""
        self._leaves = list(leaves_of(form, infix))
        self._names = [name for name, _ in self._leaves]
        self._crew = crew
        self._owns = rank == share.owner
        self._device = device
        self._shown: list[Any] = []

    def lacks(self, outer: State | None) -> bool:
        """Whether nothing is shown yet of what the optimizer keeps. (It may keep nothing.)"""
        return bool(self._names) and (outer is None or not any(name in outer for name in self._names))

    def take_in(self, outer: State | None) -> None:
        """Take in what is outside, if it has been replaced. Collective over the crew if that is distributed otherwise.

        Raises:
            MismatchError: entries are missing, or have another shape.
        """
        if outer is None or self.lacks(outer):
            self.inside, self._shown = None, []
        elif len(self._shown) != len(self._names) or not all(map(is_, map(outer.get, self._names), self._shown)):
            self._check(outer)
            values = [self._whole(outer[name]) for name in self._names]
            if self._owns:
                leaves = zip(self._leaves, values, strict=True)
                self.inside = built(self._form, iter([self._inner(leaf, value) for (_, leaf), value in leaves]))
            self.show(outer)
        elif self._owns and self._crew is not None and self.inside is not None:
            self._take_in_numbers(self.inside)

    def _take_in_numbers(self, inside: State) -> None:
        """What is loaded in place reaches tensors at once, but not the numbers that other tensors show."""
        numbers = [index for index, (_, leaf) in enumerate(self._leaves) if leaf.kind in SHOWN_AS]
        if numbers:
            values = list(values_in(inside))
            for index in numbers:
                values[index] = self._inner(self._leaves[index][1], local_tensor(self._shown[index]))
            self.inside = built(self._form, iter(values))

    def _check(self, outer: State) -> None:
        """On all ranks, so that all of them raise."""
        missing = [name for name in self._names if name not in outer]
        wrong = [
            f"'{name}' of shape {tuple(torch.as_tensor(outer[name]).shape)} instead of {leaf.shape}"
            for name, leaf in self._leaves
            if name in outer and leaf.kind != "constant" and torch.as_tensor(outer[name]).shape != leaf.shape
        ]
        if missing or wrong:
            raise MismatchError(
                f"'{self._share.name}': its optimizer state lacks {missing}, and has {', '.join(wrong) or [*outer]}. "
                "Load the state of the same optimizer with the same `split`, or none."
            )

    def put_out(self, outer: State | None, inside: State) -> None:
        """Keep the state after a step, on the owner, and show it if there was one before. A first one is shown by all
        ranks together (`show`), so that entries have the same order everywhere: code that gathers them depends on it.

        Raises:
            UnsupportedError: it has another form than it had at first, which other ranks cannot know.
        """
        if form_of(inside) != self._form:
            raise UnsupportedError(
                f"'{self._share.name}': its optimizer state has changed from {self._form} to {form_of(inside)}. Only "
                "its owner knows this. Make all of the state in the first step."
            )
        self.inside = inside
        if outer is not None and not self.lacks(outer):
            self.show(outer)

    def show(self, outer: State) -> None:
        """Make the entries outside; on ranks that do not own the matrix, empty ones."""
        values = list(values_in(self.inside)) if self._owns and self.inside is not None else [None] * len(self._names)
        self._shown = [
            self._entry(leaf, value, outer.get(name)) for (name, leaf), value in zip(self._leaves, values, strict=True)
        ]
        outer.update(zip(self._names, self._shown, strict=True))

    def _entry(self, leaf: Leaf, value: Any, known: Any) -> Any:
        """What shows a value; `known` if it does already."""
        if leaf.kind == "constant":
            return leaf.constant
        if self._crew is None:
            return value
        is_ours = isinstance(known, OwnedTensor) and known.owner == self._share.owner and known.crew is self._crew
        if not self._owns:
            if is_ours and known.shape == leaf.shape and known.dtype == leaf.shown_dtype:
                return known
            local = torch.empty(0, dtype=leaf.shown_dtype, device=self._device)
        elif leaf.kind == "tensor":
            if is_ours and local_tensor(known) is value:
                return known
            local = value
        elif is_ours and known.dtype == leaf.shown_dtype and local_tensor(known).device.type == "cpu":
            local_tensor(known).fill_(value)
            return known
        else:
            local = torch.tensor(value, dtype=leaf.shown_dtype)
        return OwnedTensor.of(local, leaf.shape, self._share.owner, self._crew)

    def _whole(self, value: Any) -> Any:
        """The whole value on the owner. Collective if a DTensor is not the owner's."""
        if not isinstance(value, DTensor):
            return value
        if self._crew is not None and value.device_mesh == self._crew.mesh_of(self._share.owner):
            return local_tensor(value)
        return full_tensor(value)

    def _inner(self, leaf: Leaf, value: Any) -> Any:
        """The value as the optimizer had it: `load_state_dict` converts to the parameter's dtype."""
        if leaf.kind == "constant":
            return value
        if leaf.kind != "tensor":
            number = value.item() if isinstance(value, torch.Tensor) else value
            return next(kind for kind in NUMBERS if kind.__name__ == leaf.kind)(number)
        return torch.as_tensor(value).to(leaf.dtype)
