"""The form of what an optimizer keeps for one parameter: which tensors and numbers, and where. Pure. Layer: optim.

Only the owner of a matrix has its state, but all ranks must show the same state. So its *form* is what ranks tell each
other: the containers as they are, with a `Leaf` in the place of each value::

    {"step": 3, "GG": [tensor, tensor]}    {"step": Leaf(kind="int"), "GG": [Leaf("tensor", shape, dtype), ...]}
                                           names of the leaves: "step", "GG[0]", "GG[1]"

Numbers are shown as 0-dim tensors, because what a rank shows of another's number cannot be a number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NUMBERS", "SHOWN_AS", "Leaf", "built", "form_of", "leaves_of", "values_in"]

NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
SHOWN_AS = {kind.__name__: dtype for kind, dtype in NUMBERS.items()}


@dataclass(frozen=True)
class Leaf:
    """One value.

    Attributes:
        kind: "tensor", "bool", "int", "float", or "constant" for anything else.
        shape, dtype: of a tensor.
        constant: the value, if it is anything else.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    constant: Any = None

    @property
    def shown_dtype(self) -> torch.dtype:
        """The dtype of the tensor that shows it."""
        return self.dtype if self.dtype is not None else SHOWN_AS[self.kind]


def form_of(value: Any) -> Any:
    """The form of a state."""
    if isinstance(value, dict):
        return {key: form_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [form_of(each) for each in value]
    if isinstance(value, torch.Tensor):
        return Leaf("tensor", tuple(value.shape), value.dtype)
    if type(value) in NUMBERS:
        return Leaf(type(value).__name__)
    return Leaf("constant", constant=value)


def leaves_of(form: dict[str, Any], infix: str = "") -> Iterator[tuple[str, Leaf]]:
    """The leaves of a form by name.

    Args:
        infix: put behind the first part of each name; it tells the matrices of one parameter apart.

    >>> [name for name, _ in leaves_of(form_of({"GG": [1, 2.0]}), "[7]")]
    ['GG[7][0]', 'GG[7][1]']
    """
    for key, inner in form.items():
        yield from _leaves(inner, f"{key}{infix}")


def _leaves(form: Any, name: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(form, Leaf):
        yield name, form
    else:
        for key, inner in form.items() if isinstance(form, dict) else enumerate(form):
            yield from _leaves(inner, f"{name}[{key}]")


def values_in(value: Any) -> Iterator[Any]:
    """The values of a state, in the order of the leaves of its form."""
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from values_in(inner)
    else:
        yield value


def built(form: Any, values: Iterator[Any]) -> Any:
    """The state of this form with these values. Sequences become lists."""
    if isinstance(form, Leaf):
        return next(values)
    if isinstance(form, dict):
        return {key: built(inner, values) for key, inner in form.items()}
    return [built(inner, values) for inner in form]
