"""What `tests/instruments/device/` trains on the lagging device, on a GPU. Two or four ranks share it, over gloo."""

from __future__ import annotations

import pytest

from tests.gpu import ranks
from tests.gpu.training import check
from tests.helpers.ranks import on_ranks
from tests.instruments.device.scenarios import SCENARIOS
from tests.instruments.device.training import FEATURES, ON_FOUR

pytestmark = pytest.mark.gpu

# Their values on the CPU are not those on a GPU (tests/gpu/test_init.py compares with the same device), or gloo has not
# got what they need for CUDA: messages between two ranks ("Bad address"), and torch's functional all-gather (SIGSEGV).
LEFT_OUT = ("materialized", "materialized, offloaded", "seeded", "context parallel", "gathered")


@on_ranks(2, timeout_s=120, device=ranks.__name__)
@pytest.mark.parametrize("name", [name for name in FEATURES if not FEATURES[name].coalesced])  # gloo cannot
def test_features(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size)


@on_ranks(4, timeout_s=120, device=ranks.__name__)
@pytest.mark.parametrize("name", ["plain", *ON_FOUR])
def test_features_on_four(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size)


@on_ranks(2, timeout_s=120, device=ranks.__name__)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in LEFT_OUT])
def test_scenarios(rank: int, world_size: int, name: str) -> None:
    for seed in range(2):
        SCENARIOS[name](rank, world_size, seed)
