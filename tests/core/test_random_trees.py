"""Random module trees with random settings train like one process and like torch's FSDP2. A failure prints the tree.

One more seed is one more line in the range below; to look at one, run with `-k seed17`.
"""

from __future__ import annotations

import pytest

from tests.helpers.random_trees import race
from tests.helpers.ranks import on_ranks


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
