"""What of a model goes into a checkpoint: extra state, tied weights, tensors that are not dense or not the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import CheckpointError, MismatchError, checkpoint, fully_shard
from tests.helpers.ranks import on_ranks


class Counting(nn.Module):
    """Its extra state is a tensor, and may grow."""

    def __init__(self, *counts: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.counts = torch.tensor(counts)

    def get_extra_state(self) -> Tensor:
        return self.counts.double()

    def set_extra_state(self, state: Tensor) -> None:
        self.counts = state.float()


class Head(nn.Module):
    """Two weights, or one with two names, in either order."""

    def __init__(self, tied: bool, reverse: bool = False) -> None:
        super().__init__()
        made = {"embedding": nn.Embedding(4, 3), "out": nn.Linear(3, 4, bias=False)}
        for name in sorted(made, reverse=reverse):
            setattr(self, name, made[name])
        if tied:
            self.out.weight = self.embedding.weight


class Halved(nn.Module):
    """What it stores is made for the state dict."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "half"] = self.weight.detach() / 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if prefix + "half" in state_dict:
            self.weight.data.copy_(state_dict[prefix + "half"] * 2)


@on_ranks(2)
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("before", [(0.0, 0.0, 0.0), (7.0,)], ids=["same_shape", "another_shape"])
def test_an_extra_state_that_is_a_tensor(
    rank: int, world_size: int, before: tuple[float, ...], consolidated: bool, tmp_path: Path
) -> None:
    """It was read into a tensor that nobody looked at again."""
    model = nn.Sequential(fully_shard(Counting(1.0, 2.0, 3.0)), Halved(4.0).requires_grad_(False))
    checkpoint.save(tmp_path / "a", model=model, consolidated=consolidated)
    other: Any = nn.Sequential(fully_shard(Counting(*before)), Halved(0.0))
    checkpoint.load(tmp_path / "a", model=other)
    assert torch.equal(other[0].counts, torch.tensor([1.0, 2.0, 3.0]))
    assert other[1].weight.eq(4).all()


def test_an_extra_state_of_a_model_that_has_no_memory_yet(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=Counting(1.0, 2.0))
    with torch.device("meta"):
        other = Counting(0.0)
    checkpoint.load(tmp_path / "a", model=other)
    assert torch.equal(other.counts, torch.tensor([1.0, 2.0])) and not other.weight.is_meta


def test_the_optimizer_of_a_weight_whose_names_come_in_another_order(tmp_path: Path) -> None:
    """Its state was called missing under the one name, and unexpected under the other."""
    models = [Head(tied=True), Head(tied=True, reverse=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        assert isinstance(model.embedding, nn.Embedding)
        model.embedding.weight.grad = torch.full((4, 3), 1.0 + number)
        optimizer.step()
    checkpoint.save(tmp_path / "a", model=models[0], optimizer=optimizers[0])
    checkpoint.load(tmp_path / "a", model=models[1], optimizer=optimizers[1])
    assert [state["momentum_buffer"].unique().item() for state in optimizers[1].state.values()] == [1.0]


@on_ranks(4)
def test_copies_that_are_none(rank: int, world_size: int, tmp_path: Path) -> None:
    """Experts of each half of the ranks, under one name: only those of the first half were stored."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    everywhere = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()], run_check=False)
    same = DTensor.from_local(torch.ones(2), mesh["dp"], [Shard(0)], run_check=False)
    checkpoint.save(tmp_path / "same", model={"dense": everywhere, "expert": same})
    own = DTensor.from_local(torch.full((2,), 1.0 + rank // 2), mesh["dp"], [Shard(0)], run_check=False)
    with pytest.raises(CheckpointError, match=r"ranks \d and \d hold model 'expert' on parts of one mesh"):
        checkpoint.save(tmp_path / "own", model={"dense": everywhere, "expert": own})


def test_an_expanded_tensor(tmp_path: Path) -> None:
    """It could be saved, and a load failed in the middle, without its name."""
    checkpoint.save(tmp_path / "a", model={"a": torch.ones(2), "b": torch.full((1,), 3.0).expand(4)})
    into = {"a": torch.zeros(2), "b": torch.zeros(1).expand(4)}
    with pytest.raises(MismatchError, match=r"model 'b': is expanded here, .* make it contiguous"):
        checkpoint.load(tmp_path / "a", model=into)
    assert into["a"].tolist() == [0.0, 0.0]
    into["b"] = into["b"].contiguous()
    checkpoint.load(tmp_path / "a", model=into)
    assert into["b"].tolist() == [3.0] * 4
