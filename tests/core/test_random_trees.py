"""Random module trees with random settings train like one process and like torch's FSDP2. A failure prints the tree.

One more seed is one more line in the range below; to look at one, run with `-k seed17`.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.parity_models import Race
from tests.helpers.random_trees import Root, random_settings, random_tree
from tests.helpers.ranks import on_ranks


def race(rank: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, depth=4)
    settings = random_settings(rng, Root(tree), world_size)

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        return settings.prepare(Root(tree))

    coarse = bool(settings.policy)
    # Several gradients of one parameter, in one backward or in unsynced ones: fsdp2 adds them up in the reduce dtype,
    # torch 2.13 in part in the compute dtype.
    same_sums = not coarse or not (tree.has("repeat", "tied") or any(settings.unsynced))
    try:
        Race(
            rank,
            world_size,
            build,
            settings.shard,
            settings.backward,
            lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
            exact=same_sums and (world_size == 2 or settings.hsdp),
            plain=not coarse,
            by_norm=coarse,
            rtol=5e-2 if coarse else 1e-4,
            atol=1e-3 if coarse else 1e-5,
        ).run(3)
    except Exception as error:
        raise AssertionError(f"seed {seed} on {world_size} ranks: {error}\n{tree}\n{settings}") from error


@on_ranks(2)
@pytest.mark.parametrize("seed", range(28), ids=lambda seed: f"seed{seed}")
def test_on_two_ranks(rank: int, world_size: int, seed: int) -> None:
    """Behaviour 11-13, 19, 43, 48, 55, 56, 68, 72, 89-91, 95-99, 114, 175: equal to torch bit by bit, and to one
    process."""
    race(rank, world_size, seed)


@on_ranks(4)
@pytest.mark.parametrize("seed", range(100, 112), ids=lambda seed: f"seed{seed}")
def test_on_four_ranks(rank: int, world_size: int, seed: int) -> None:
    """Behaviour 21, 72, 106-108: on four ranks uneven rows leave ranks empty, an int reshards to a smaller mesh, and
    half of the trees are HSDP."""
    race(rank, world_size, seed)
