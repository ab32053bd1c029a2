"""The state of `matrix_optimizer`: the same on all ranks, and in checkpoints of any number of ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2.checkpoint as fc
from fsdp2 import adopt_optimizer, fully_shard
from fsdp2._torch import local_tensor
from fsdp2.optim import MatrixOptimizer, OwnedTensor, matrix_optimizer
from tests.helpers.matrix_optimizers import (
    SHAPES,
    Layout,
    Shampoo,
    assert_same,
    muon_pair,
    sharded,
    train,
    value,
    values_of,
)
from tests.helpers.optimizers import params_in
from tests.helpers.parity_models import full
from tests.helpers.ranks import on_ranks, run_on_ranks

KINDS = {"Muon": torch.optim.Muon, "Shampoo": Shampoo}


class ExactShampoo(Shampoo):
    """In fp32 also for matrices in bf16."""

    def _step(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._step(param, grad.float(), state, group)


class Weights(nn.Module):
    """Parameters under names, for checkpoints."""

    def __init__(self, params: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)

    def forward(self) -> nn.ParameterList:
        """What a unit needs to have."""
        return self.weights


def made(kind: str, seed: int = 0, options: Any = None) -> tuple[nn.Module, MatrixOptimizer]:
    """On this number of ranks, with other values for another seed."""
    values = [value(index, shape, seed) for index, shape in enumerate(SHAPES)]
    hsdp: Layout = ((2, 2), [Replicate(), Shard(0)])
    model = Weights(sharded(values, hsdp if dist.get_world_size() == 4 else None))
    stack = nn.Parameter(value(9, (2, 4, 3), seed))
    bias = nn.Parameter(value(8, (5,), seed))
    model.more = Weights([stack, bias])
    if options != "plain":
        fully_shard(model.more)
    last: dict[str, Any] = {"params": [model.more.weights[1]], "kind": torch.optim.AdamW, "lr": 0.1, "fused": True}
    groups = [{"params": [*model.weights]}, {"params": [model.more.weights[0]], "split": 2}, last]
    return model, matrix_optimizer(KINDS[kind], groups, lr=0.1)


def snapshot(optimizer: MatrixOptimizer) -> list[Tensor]:
    """All values, whole. Collective."""
    found = [full(param).detach().clone() for param in params_in(optimizer)]
    for param in params_in(optimizer):
        found += [full(shown).clone() for shown in optimizer.state[param].values()]
    return found


def uninterrupted(rank: int, world_size: int, kind: str) -> list[Tensor]:
    _, optimizer = made(kind)
    train(optimizer, range(4))
    return snapshot(optimizer)


def save(rank: int, world_size: int, kind: str, folder: str, how: str) -> None:
    model, optimizer = made(kind)
    train(optimizer, range(2))
    if how == "dcp":
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    else:
        fc.save(folder, model=model, optimizer=optimizer)


def resume(rank: int, world_size: int, kind: str, folder: str, how: str) -> list[Tensor]:
    model, optimizer = made(kind, seed=77)
    if how == "dcp":
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        fc.load(folder, model=model, optimizer=optimizer)
        shown = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, DTensor)]
        sizes = [local_tensor(each).numel() for each in shown if isinstance(each, OwnedTensor)]
        assert world_size == 1 or 0 < sum(map(bool, sizes)) < len(sizes)  # not the whole state on every rank
    train(optimizer, range(2, 4))
    return snapshot(optimizer)


def together(*snapshots: list[Tensor]) -> bool:
    first, *others = snapshots
    return all(len(first) == len(each) and all(map(torch.equal, first, each)) for each in others)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("Muon", "fsdp2"),
        ("Shampoo", "dcp"),
        pytest.param("Muon", "dcp", marks=pytest.mark.exhaustive),
        pytest.param("Shampoo", "fsdp2", marks=pytest.mark.exhaustive),
    ],
)
def test_resume_with_other_numbers_of_ranks(kind: str, how: str, tmp_path: Path) -> None:
    """Saved on three ranks, taken up by one, two and four (HSDP): bit for bit what an uninterrupted run gives."""
    folder = str(tmp_path / "saved")
    run_on_ranks(save, 3, kind=kind, folder=folder, how=how)
    known = run_on_ranks(uninterrupted, 2, kind=kind)
    assert together(*known)
    for ranks in (2, 1, 4):
        assert together(known[0], *run_on_ranks(resume, ranks, kind=kind, folder=folder, how=how)), ranks


@on_ranks(2, 3)
def test_full_state_dict(rank: int, world_size: int) -> None:
    """As DCP gathers it. With plain tensors rank 0 would get empty ones for the matrices of other ranks, silently."""
    model, optimizer = made("Muon")
    train(optimizer, range(1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_optimizer_state_dict(model, optimizer, options=options)
    sharded_ones = get_optimizer_state_dict(model, optimizer)["state"]
    for name, state in sharded_ones.items():
        for key, each in state.items():
            whole = full(each)
            if rank == 0:
                assert torch.equal(gathered["state"][name][key], whole), (name, key)


@on_ranks(2)
def test_state_dict_of_its_own_and_of_one_process(rank: int, world_size: int) -> None:
    """It goes by position, the same on all ranks (microsoft/dion issue 109)."""
    plain, first = muon_pair()
    for each in (plain, first):
        train(each, range(2))
    for saved in (first.state_dict(), plain.state_dict()):
        later = matrix_optimizer(torch.optim.Muon, sharded(values_of()), lr=0.5)
        train(later, range(5, 6))
        later.load_state_dict({**copy.deepcopy(saved), "param_groups": first.state_dict()["param_groups"]})
        for param, other in zip(params_in(later), params_in(first), strict=True):
            local_tensor(param).copy_(local_tensor(other).detach())
        reference = copy.deepcopy(plain)
        for each in (reference, later):
            train(each, range(2, 4))
        assert_same(later, reference)


@on_ranks(2)
@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_loaded_states_keep_their_dtypes(rank: int, world_size: int, how: str) -> None:
    """fp32 preconditioners and counters of bf16 matrices; torch's `load_state_dict` rounds them to bf16."""
    models, optimizers = [], []
    for _ in range(2):
        params = sharded([value(0, (6, 4), 0).bfloat16()])
        models.append(Weights(params))
        optimizers.append(matrix_optimizer(ExactShampoo, params, lr=0.1))
    first, later = optimizers
    train(first, range(2))
    first.state[params_in(first)[0]]["step"].fill_(301)
    if how == "dcp":
        set_optimizer_state_dict(models[1], later, get_optimizer_state_dict(models[0], first))
    else:
        later.load_state_dict(copy.deepcopy(first.state_dict()))
    for ours, theirs in zip(params_in(first), params_in(later), strict=True):
        dtypes = [
            {name: each.dtype for name, each in each.state[param].items()}
            for each, param in ((first, ours), (later, theirs))
        ]
        assert dtypes[0] == dtypes[1]
        local_tensor(theirs).copy_(local_tensor(ours).detach())
    for each in optimizers:
        train(each, range(2, 4))
    for one, other in zip(snapshot(first), snapshot(later), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@on_ranks(2)
def test_training_that_began_unsharded(rank: int, world_size: int) -> None:
    """`adopt_optimizer` cuts the state like the parameters; the owners gather it in the next step."""
    reference = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    for index, param in enumerate(reference.parameters()):
        param.data.copy_(value(index, param.shape, 0))
    model = copy.deepcopy(reference)
    plain = torch.optim.Muon(reference.parameters(), lr=0.1)
    optimizer = matrix_optimizer(torch.optim.Muon, model.parameters(), lr=0.1)
    for each in (plain, optimizer):
        train(each, range(2))
    assert_same(optimizer, plain)
    optimizer.zero_grad()
    fully_shard(model)
    adopt_optimizer(optimizer)
    for each in (plain, optimizer):
        train(each, range(2, 4))
    assert_same(optimizer, plain)
    assert all(isinstance(optimizer.state[param]["momentum_buffer"], OwnedTensor) for param in model.parameters())
