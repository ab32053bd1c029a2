"""Sharded training on the lagging device gives, bit for bit, what it gives on the CPU, whichever streams are late."""

import pytest

from tests.instruments.device.ranks import SEEDS, on_device_ranks
from tests.instruments.device.scenarios import SCENARIOS, SCENARIOS_ON_FOUR
from tests.instruments.device.training import FEATURES, ON_FOUR, check

FEW = range(SEEDS // 3)  # a missing wait shows in every fifth seed or more often, and in many features


@on_device_ranks(2)
@pytest.mark.parametrize("name", FEATURES)
def test_features(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size, FEW)


@on_device_ranks(4)
@pytest.mark.parametrize("name", ["coalesced", *ON_FOUR])
def test_features_on_four(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size, FEW)


@on_device_ranks(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(rank: int, world_size: int, name: str) -> None:
    for seed in FEW:
        SCENARIOS[name](rank, world_size, seed)


@on_device_ranks(4)
@pytest.mark.parametrize("name", SCENARIOS_ON_FOUR)
def test_scenarios_on_four(rank: int, world_size: int, name: str) -> None:
    for seed in FEW:
        SCENARIOS_ON_FOUR[name](rank, world_size, seed)
