"""What a model is to a checkpoint: names, dtypes, ties, buffers, strictness, meta models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp2.checkpoint as fc
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.errors import MismatchError
from tests.helpers.checkpoint_cases import (
    BF16,
    DIM,
    Awkward,
    Block,
    assert_bits,
    assert_part,
    by_form,
    check,
    column,
    fill,
    filled,
    shard,
    spoil,
    state_of,
    tensors_of,
    value_of,
    with_state,
)
from tests.helpers.parity_models import batch, local, shard_like
from tests.helpers.ranks import on_ranks

# --- names ------------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Embedding and head, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, DIM)
        self.head = nn.Linear(DIM, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@on_ranks(2)
@by_form
@pytest.mark.parametrize("tied", [True, False], ids=["into_tied", "into_untied"])
def test_tied_weights(rank: int, world_size: int, tied: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Stored once; found under both names."""
    saved = filled(fully_shard(Head(tied=True)))
    fc.save(tmp_path / "a", model=saved, **options)
    stored = sum(name.endswith("weight") for file in tmp_path.glob("a/model*") for name in names_in(file))
    assert stored == (1 if options else world_size)
    model = fully_shard(Head(tied=tied))
    spoil(model.embed.weight)
    spoil(model.head.weight)
    fc.load(tmp_path / "a", model=model)
    for weight in (model.embed.weight, model.head.weight):
        assert_bits("embed.weight", weight, shard_like(value_of("embed.weight", (7, DIM)), weight))
    assert (model.head.weight is model.embed.weight) is tied


def names_in(file: Path) -> list[str]:
    return list(load_file(file)) if file.suffix == ".safetensors" else []


@on_ranks(2)
@pytest.mark.parametrize(
    "kind",
    ["checkpoint_wrapper", "compile", pytest.param("compiled_root", marks=pytest.mark.exhaustive)],
)
def test_names_without_wrappers(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    """A wrapper's part of a name is not stored, so a model loads with and without it."""

    def wrapped() -> Any:
        model = nn.Sequential(Block(), Block())
        if kind == "checkpoint_wrapper":
            model[0] = checkpoint_wrapper(model[0])
        elif kind == "compile":
            model[0] = torch.compile(model[0])
        fully_shard(model)
        return torch.compile(model) if kind == "compiled_root" else model

    def plain() -> nn.Module:
        return fully_shard(nn.Sequential(Block(), Block()))

    names = [name for name, _ in nn.Sequential(Block(), Block()).named_parameters()]
    for number, (of_save, of_load) in enumerate([(wrapped, plain), (plain, wrapped)]):
        model, other = of_save(), of_load()
        for name, param in zip(names, model.parameters(), strict=True):
            fill(name, param)
        fc.save(tmp_path / str(number), model=model)
        assert sorted(names_in(*(tmp_path / str(number)).glob(f"model-rank-{rank:05d}*"))) == sorted(names)
        fc.load(tmp_path / str(number), model=other)
        for name, param, source in zip(names, other.parameters(), model.parameters(), strict=True):
            assert_bits(name, param, source)


# --- what does not fit ------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(value_of(name, shape)))


@on_ranks(1, 2)
@by_form
def test_strict_reports_everything(rank: int, world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    """All problems in one message, and nothing changed."""
    fc.save(tmp_path / "a", model=fully_shard(Pair(same=(4,), longer=(4, 2), gone=(3,), also_gone=(2,))), **options)
    model = Pair(same=(4,), longer=(5, 2), new=(3,), also_new=(2,))
    model.register_parameter("wrong", None)
    fully_shard(model)
    spoil(model.same)
    before = {name: local(value).clone() for name, value in tensors_of(model)}
    with pytest.raises(MismatchError) as caught:
        fc.load(tmp_path / "a", model=model)
    for word in ["gone", "also_gone", "new", "also_new", "longer", r"4, 2", r"5, 2"]:
        assert re.search(rf"(?<![a-z_]){word}", str(caught.value)), (word, str(caught.value))
    assert "same" not in str(caught.value)
    for name, value in tensors_of(model):
        assert_bits(name, value, before[name])


# --- meta models ------------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Tensor:
    losses = []
    for step in range(2):
        loss = model(batch(step, rank, DIM)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["plain", "fsdp", "dim1", "bf16"])
def test_meta_model_is_allocated_by_load(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    """Made on the meta device, sharded, loaded: never initialised, and trains like the one that was saved."""
    build = {
        "plain": lambda model: model,
        "fsdp": shard,
        "dim1": lambda model: shard(model, shard_placement_fn=column),
        "bf16": lambda model: shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16)),
    }[name]
    model = build(Awkward())
    optimizer = with_state(model, lr=0.01)
    filled(model)
    fc.save(tmp_path / "a", model=model, optimizer=optimizer, consolidated=name == "dim1")
    with torch.device("meta"):
        other = build(Awkward())
    other.scratch = torch.zeros(4)  # not saved, so nothing to load
    other_optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.5)
    fc.load(tmp_path / "a", model=other, optimizer=other_optimizer)
    assert other.head.weight is other.embed.weight
    assert all(param.device.type == "cpu" for param in other.parameters())
    check(other)
    assert other_optimizer.state.keys() == {p for p in other.parameters() if p.requires_grad}
    for key, value in state_of(other, other_optimizer):
        assert_part(key, value)
    assert torch.equal(train(other, other_optimizer, rank), train(model, optimizer, rank))
