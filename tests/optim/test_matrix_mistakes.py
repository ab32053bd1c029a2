"""`matrix_optimizer`: gradients that are missing on some ranks; ranks, optimizers and states that do not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.errors import ArgumentError, MismatchError, MisuseError, UnsupportedError
from fsdp2.optim import matrix_optimizer
from tests.helpers.matrix_optimizers import (
    SHAPES,
    Shampoo,
    assert_same,
    muon_pair,
    set_grads,
    sharded,
    train,
    value,
    values_of,
)
from tests.helpers.optimizers import params_in
from tests.helpers.ranks import on_ranks


@on_ranks(3, 2, 4)
def test_gradients_missing_on_some_ranks(rank: int, world_size: int) -> None:
    """They count as zeros there, also before the first step; nobody waits for a message that is not sent."""
    plain, optimizer = muon_pair()
    for step in range(3):
        for each in (plain, optimizer):
            set_grads(each, step)
        for index, (param, other) in enumerate(zip(params_in(optimizer), params_in(plain), strict=True)):
            missing = (step + index) % (world_size + 1)  # this rank has none, or all have one
            assert other.grad is not None
            rows = -(-other.shape[0] // world_size)
            other.grad[missing * rows : (missing + 1) * rows] = 0
            if rank == missing:
                param.grad = None
        for each in (plain, optimizer):
            each.step()
    assert_same(optimizer, plain)


@on_ranks(2, 3)
@pytest.mark.parametrize("what", ["shape", "missing", "group"])
def test_ranks_that_differ(rank: int, world_size: int, what: str) -> None:
    """An error on all ranks in the first step. Without it, they would wait for each other, or step the wrong matrix."""
    params = sharded(values_of())
    last = rank == world_size - 1
    if what == "shape":
        params[2] = sharded([value(2, (2, 4) if last else SHAPES[2], 0)])[0]
    elif what == "missing" and last:
        del params[1]
    groups = [{"params": params[:3]}, {"params": params[3:], "split": 1 if what == "group" and last else None}]
    optimizer = matrix_optimizer(torch.optim.Muon, params if what != "group" else groups[:: -1 if last else 1], lr=0.1)
    with pytest.raises(
        MisuseError, match=r"the optimizers of ranks 0 and \d differ: rank 0 has Muon of group"
    ) as error:
        optimizer.step()
    assert "Give all ranks the same parameters" in str(error.value)


@on_ranks(2)
def test_what_is_no_matrix(rank: int, world_size: int) -> None:
    """An error, where others fall back to AdamW without a word (NVIDIA/Megatron-LM issue 5961)."""
    vector = sharded([value(0, (6,), 0)])
    with pytest.raises(ArgumentError, match=r"Muon refuses parameter 0 of group 0.*another kind") as error:
        matrix_optimizer(torch.optim.Muon, vector)
    assert isinstance(error.value.__cause__, ValueError)
    with pytest.raises(ArgumentError, match=r"'norm\.weight': split=2 divides the rows of matrices"):
        matrix_optimizer(torch.optim.Muon, [{"params": [("norm.weight", vector[0])], "split": 2}])
    with pytest.raises(ArgumentError, match="split= is for whole matrices, and AdamW has none"):
        matrix_optimizer(torch.optim.AdamW, [{"params": vector, "split": 2}])
    optimizer = matrix_optimizer(torch.optim.Muon, sharded(values_of()[:1]))
    with pytest.raises(ArgumentError, match="Muon refuses"):
        optimizer.add_param_group({"params": vector})
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_not_within_backward(rank: int, world_size: int) -> None:
    """Units would be stepped with plans of their own, and so by other owners than the one that has the state."""
    model = fsdp2.fully_shard(nn.Linear(6, 5, bias=False))
    with pytest.raises(ArgumentError, match="travel in buckets of many units; step it after backward"):
        fsdp2.step_in_backward(matrix_optimizer(torch.optim.Muon, model.parameters()))


class Measuring(Shampoo):
    """Keeps a sum over all parameters in its group."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["numel"] = group.get("numel", 0) + sum(param.numel() for param in group["params"])


class Counting(Shampoo):
    """Keeps a number, which other ranks could not see change."""

    def _step(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._step(param, grad, state, group)
        state["count"] = state.get("count", 0) + 1


@on_ranks(1)
def test_optimizers_that_do_not_step_one_matrix(rank: int, world_size: int) -> None:
    for kind, expected in (
        (Measuring, r"a step of Measuring changes \['numel'\] in its param group"),
        (Counting, r"its optimizer keeps .*'count': <class 'int'>}: expected tensors, a count of steps as a 0-dim one"),
    ):
        optimizer = matrix_optimizer(kind, sharded(values_of()[:1]), lr=0.1)
        with pytest.raises(UnsupportedError, match=expected):
            train(optimizer, range(2))


@on_ranks(2)
def test_states_of_others(rank: int, world_size: int) -> None:
    """Of another optimizer, of other shapes, with another split: errors before a step."""
    optimizer = matrix_optimizer(Shampoo, [{"params": sharded(values_of()[:1]), "split": 2}], lr=0.1)
    train(optimizer, range(1))
    param = params_in(optimizer)[0]
    saved = dict(optimizer.state[param])
    optimizer.state[param] = {key: each for key, each in saved.items() if key != "left[1]"}
    with pytest.raises(MismatchError, match=r"for matrix 1 of 2 .*expected .*'left': \(4, 4\)"):
        optimizer.step()
    optimizer.state[param] = saved
    optimizer.param_groups[0]["split"] = (4, 4)
    with pytest.raises(MismatchError, match=r"param group 0 is of Shampoo with split=2, .* with split=\(4, 4\)"):
        optimizer.step()
