"""What steps one param group of a `MatrixOptimizer`: an optimizer of its own. Layer: optim, below matrix.

It sees the group only in a step. An elementwise one sees it as it is, and steps on local shards. Any other is created
with stand-ins on the meta device, and sees plain tensors: some of the group's matrices at a time.
"""

import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.optim.local import ELEMENTWISE, local_optimizer, without_hooks
from fsdp2.optim.matrices import Split, boxes_of_matrices, shape_of_matrix

__all__ = ["Kind", "Stepper", "as_param", "names_of", "options_of"]

Kind = type[torch.optim.Optimizer]

# Keys of a param group that are not the optimizer's own options.
NOT_OPTIONS = frozenset({"params", "param_names", "kind", "split"})


@dataclass(frozen=True)
class Stepper:
    """See the module docstring.

    Attributes:
        kind: the class of `inner`.
        split: of a group of whole matrices.
    """

    kind: Kind
    inner: torch.optim.Optimizer
    split: Split

    @staticmethod
    def of(kind: Kind, group: dict[str, Any], index: int, options: dict[str, Any]) -> "Stepper":
        """The stepper of a param group, whose options take precedence over `options`.

        Raises:
            ArgumentError: `kind` refuses the parameters, or makes state at once; `split` does not fit.
        """
        own = options_of(group)
        accepted = inspect.signature(kind).parameters
        options = {**options, **{key: value for key, value in own.items() if key in accepted}}
        params, split = group["params"], group.get("split")
        if kind in ELEMENTWISE:
            if split is not None:
                raise ArgumentError(f"matrix_optimizer: split= is for whole matrices, and {kind.__name__} has none")
            return Stepper(kind, local_optimizer(kind, [{**own, "params": params}], **options), None)
        names = names_of(group, index)
        shapes = [
            shape_of_matrix(box)
            for name, param in zip(names, params, strict=True)
            for box in boxes_of_matrices(name, param.shape, split)
        ]
        stand_ins = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        try:
            inner = kind([{**own, "params": stand_ins}], **options)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"matrix_optimizer: {kind.__name__} refuses {names[0]} and the others of param group {index}: {error}. "
                "Put embeddings, norms, biases and heads into a group with another kind, such as {'params': [...], "
                "'kind': torch.optim.AdamW, 'lr': 3e-4}."
            ) from error
        if inner.state:
            raise ArgumentError(
                f"matrix_optimizer: {kind.__name__} makes state when it is created, for parameters that are not there "
                "yet: expected one that makes it in its first step"
            )
        return Stepper(kind, inner, split)

    @property
    def steps_shards(self) -> bool:
        """Whether it steps local shards instead of whole matrices."""
        return self.kind in ELEMENTWISE

    def step(self, group: dict[str, Any], state: Any) -> None:
        """The inner optimizer's own step. torch's wrapper would run the hooks of steps again.

        Raises:
            UnsupportedError: it changes options of its param group.
        """
        before = dict(group)
        self.inner.param_groups, self.inner.state = [group], state
        try:
            without_hooks(self.inner.step)(self.inner)
        finally:
            self.inner.param_groups, self.inner.state = [], defaultdict(dict)
        changed = [key for key, value in group.items() if key not in before or before[key] is not value]
        if changed and not self.steps_shards:
            raise UnsupportedError(
                f"matrix_optimizer: a step of {self.kind.__name__} changes {changed} in its param group. It steps the "
                "matrices of a group in portions and on several ranks, so what it keeps must be in self.state[param]."
            )


def as_param(values: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of `values` that an optimizer takes for a parameter."""
    param = values.detach().requires_grad_()
    if grad.dtype != values.dtype:
        param.grad_dtype = grad.dtype
    param.grad = grad
    return param


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of the optimizer in a param group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def names_of(group: dict[str, Any], index: int) -> list[str]:
    """The names of the parameters of a group, for messages."""
    names = group.get("param_names")
    return list(names) if names else [f"parameter {at} of group {index}" for at in range(len(group["params"]))]
