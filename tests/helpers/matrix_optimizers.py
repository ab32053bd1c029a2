"""Optimizers of whole matrices: one as a user may write it, parameters with given gradients, and comparisons."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2.optim import MatrixOptimizer, matrix_optimizer
from tests.helpers.optimizers import params_in
from tests.helpers.parity_models import full
from tests.helpers.tp_models import mesh_of

Layout = tuple[tuple[int, ...], Sequence[Placement]]

SHAPES = [(8, 6), (5, 7), (1, 4), (3, 3), (16, 2), (7, 12)]  # even, uneven and empty shards of 2, 3 and 4 ranks


class Shampoo(torch.optim.Optimizer):
    """Two preconditioners for each matrix and a count of steps, all made in the first step.

    Source: https://arxiv.org/abs/1802.09568
    """

    def __init__(self, params: Iterable[Any], lr: float, eps: float = 1e-3):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, self.state[param], group)

    def _step(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0)
            state["left"], state["right"] = (group["eps"] * torch.eye(size) for size in param.shape)
        state["step"] += 1
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        param -= group["lr"] * (_inverse_root(state["left"]) @ grad @ _inverse_root(state["right"]))


def _inverse_root(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


def value(index: int, shape: Sequence[int], seed: int) -> Tensor:
    """Of a parameter (seed 0), or of its gradient in a step."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1000 * seed + index))


def values_of(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """The first values of parameters of these shapes."""
    return [value(index, shape, 0) for index, shape in enumerate(shapes)]


def layouts(world_size: int) -> list[Layout]:
    """Meshes and placements of that many ranks: FSDP on either dim, replicas, HSDP, two axes on one dim and on two."""
    found: list[Layout] = [((world_size,), [Shard(0)]), ((world_size,), [Shard(1)]), ((world_size,), [Replicate()])]
    if world_size == 4:
        found += [((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(0), Shard(1)])]
    return found


def sharded(values: Sequence[Tensor], layout: Layout | None = None) -> list[nn.Parameter]:
    """Parameters with these values; without a layout FSDP's."""
    shape, placements = layout or ((torch.distributed.get_world_size(),), [Shard(0)])
    mesh = mesh_of(shape, ("a", "b")[: len(shape)])
    return [nn.Parameter(distribute_tensor(each.clone(), mesh, placements)) for each in values]


def muon_pair(values: Sequence[Tensor] | None = None, **options: Any) -> tuple[torch.optim.Optimizer, MatrixOptimizer]:
    """In one process, and on all ranks."""
    values, options = values or values_of(), {"lr": 0.1, **options}
    plain = torch.optim.Muon([nn.Parameter(each.clone()) for each in values], **options)
    return plain, matrix_optimizer(torch.optim.Muon, sharded(values), **options)


def train(optimizer: torch.optim.Optimizer, steps: range, missing: Collection[tuple[int, int]] = ()) -> None:
    """Steps with the same gradients on any number of ranks. `missing`: (step, index) that have none."""
    for step in steps:
        set_grads(optimizer, step, missing)
        optimizer.step()


def set_grads(optimizer: torch.optim.Optimizer, step: int, missing: Collection[tuple[int, int]] = ()) -> None:
    for index, param in enumerate(params_in(optimizer)):
        grad = value(index, param.shape, step + 1).to(param.grad_dtype or param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = None if (step, index) in missing else grad


def assert_same(ours: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> None:
    """Parameters and states of an optimizer on several ranks and of one in one process, bit by bit. Collective."""
    for param, other in zip(params_in(ours), params_in(reference), strict=True):
        assert torch.equal(full(param), other)
        known = reference.state.get(other, {})
        assert [*ours.state.get(param, {})] == [*known]
        for name, whole in known.items():
            shown = ours.state[param][name]
            assert isinstance(shown, DTensor) == (isinstance(param, DTensor) and param.ndim > 1) or name == "step"
            assert shown.shape == whole.shape
            assert torch.equal(full(shown).to(whole.dtype), whole)
