"""`parallelize` trains as one process does with the same global batch, for every combination of degrees."""

import pytest
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule
from tests.helpers.parallel_models import COMBINATIONS, compiling, config_of, name_of, race
from tests.helpers.ranks import on_ranks


def combinations(ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("degrees", COMBINATIONS[ranks], ids=name_of)


@on_ranks(2)
@combinations(2)
@pytest.mark.parametrize("how", ["full", "none"])
def test_two_ranks(rank: int, world_size: int, degrees: dict[str, int], how: str) -> None:
    race(config_of(degrees, activation_checkpointing=how))


@on_ranks(4)
@combinations(4)
def test_four_ranks(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    model = race(config_of(degrees, activation_checkpointing="full"))
    assert all(isinstance(each, FSDPModule) for each in (model, *model.blocks))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.exhaustive
@on_ranks(2)
@combinations(2)
def test_compile(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    with compiling():
        race(config_of(degrees, activation_checkpointing="full", compile="aot_eager"), steps=2)
