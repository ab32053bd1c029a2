"""What clients do to a sharded model (tests/clients), without a client: fill it, tie its weights, look up its class."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from fsdp2 import CPUOffloadPolicy, OffloadPolicy, fully_shard
from tests.helpers.parity_models import full
from tests.helpers.ranks import on_ranks

VOCAB, DIM = 12, 8


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.body = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def loss_of(model: nn.Module) -> Tensor:
    ids = torch.arange(VOCAB)
    return nn.functional.cross_entropy(model(ids), ids.flip(0))


def fill(model: nn.Module, values: dict[str, Tensor], skipped: str | None = None) -> None:
    """As transformers' loader: a new parameter of this rank's rows in the place of each, by `setattr` and no hook."""
    for name, param in list(model.named_parameters()):
        assert isinstance(param, DTensor)
        local = values[name].chunk(param.device_mesh.size())[param.device_mesh.get_local_rank()].clone()
        placed = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        if name != skipped:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(placed))


def sharded_on_meta(offload: OffloadPolicy) -> Any:
    with torch.device("meta"):
        model = Language()
    fully_shard(model.embed, offload_policy=offload)
    return fully_shard(model, offload_policy=offload)


OFFLOADS = [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)]


@on_ranks(2)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_meta_model_is_filled_by_setattr(rank: int, world_size: int, offload: OffloadPolicy) -> None:
    """`from_pretrained(distributed_config=...)` does; the first forward said that parameters were still on meta."""
    plain = Language()
    model = sharded_on_meta(offload)
    fill(model, plain.state_dict())
    loss, expected = loss_of(model), loss_of(plain)
    assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, name
        assert_close(full(param.grad), wanted.grad)


@on_ranks(2)
def test_weights_are_tied_after_sharding(rank: int, world_size: int) -> None:
    """transformers ties when it has loaded: one sharded parameter then serves two units, each with its own gathers, and
    gets the sum of both gradients, as with torch's FSDP2."""
    plain = Language()
    plain.head.weight = plain.embed.weight
    model = sharded_on_meta(OffloadPolicy())
    fill(model, plain.state_dict())
    model.head.weight = model.embed.weight
    optims = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        loss, expected = loss_of(model), loss_of(plain)
        assert_close(loss, expected)
        loss.backward()
        expected.backward()
        assert model.head.weight is model.embed.weight
        assert_close(full(model.embed.weight.grad), plain.embed.weight.grad)
        for optim in optims:
            optim.step()
            optim.zero_grad()


@on_ranks(2)
def test_str_of_the_class_of_a_sharded_module(rank: int, world_size: int) -> None:
    """transformers 5.23 looks up by it what outputs a model can record. A sharded model was not found there, and its
    `hidden_states` were None with `output_hidden_states=True`, without a message."""
    model = Language()
    before = str(type(model))
    sharded = fully_shard(model)
    assert str(type(sharded)) == before
    assert type(sharded).__name__ == "FSDPLanguage"
