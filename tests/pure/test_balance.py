"""`balance` cuts a global batch so that ranks need as long as each other, as long as can be told from costs."""

import random
from itertools import zip_longest

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import ArgumentError, UnsupportedError, balance, fully_shard
from fsdp2.plan import SequenceCost, sequence_cost
from tests.helpers.ranks import on_ranks
from tests.pure.lengths import DISTRIBUTIONS

# Of models with 8 and with 0.5 billion parameters, 32 layers of 4,096 and 24 of 896.
COSTS = {"8b": SequenceCost(6 * 8.0e9, 6 * 32 * 4096), "0.5b": SequenceCost(6 * 0.5e9, 6 * 24 * 896)}


def makespan(ranks: list[list[list[int]]], costs: list[float]) -> float:
    """Of turns that each take as long as their largest microbatch."""
    turns = zip_longest(*ranks, fillvalue=())
    return sum(max(sum(costs[index] for index in indices) for indices in turn) for turn in turns)


@pytest.mark.parametrize(("num_ranks", "per_rank"), [(2, 64), (8, 64), (64, 32)])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_within_3_percent_of_the_bound(name: str, cost: SequenceCost, num_ranks: int, per_rank: int) -> None:
    """Of what no schedule can beat: the mean of the ranks; or the longest sequence, and what has no room in its turn,
    which takes at best the sequences with the most work for each token: the longest."""
    for seed in range(5):
        draw = random.Random(seed)
        lengths = [DISTRIBUTIONS[name](draw) for _ in range(num_ranks * per_rank)]
        max_tokens = max(16384, *lengths)
        costs = [cost(length) for length in lengths]
        tokens, later = 0, 0.0
        for length in sorted(lengths, reverse=True):
            tokens += length
            later += cost(length) if tokens > num_ranks * max_tokens else 0.0
        bound = max(sum(costs) / num_ranks, max(costs) + later / num_ranks)
        assert makespan(balance(lengths, num_ranks, max_tokens, cost), costs) <= 1.03 * bound


@pytest.mark.parametrize("seed", range(30))
def test_each_sequence_once(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, max_tokens = draw.randint(1, 8), draw.randint(100, 400)
    lengths = [draw.randint(1, 100) for _ in range(draw.choice([0, 1, 5, 60]))]
    ranks = balance(lengths, num_ranks, max_tokens, lambda length: length**2)
    microbatches = [indices for each in ranks for indices in each]
    assert sorted(index for indices in microbatches for index in indices) == list(range(len(lengths)))
    assert all(indices and sum(lengths[index] for index in indices) <= max_tokens for indices in microbatches)
    # Empty places are in the last turn only.
    assert len(ranks) == num_ranks and max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_what_is_too_long_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"sequence 1 has 101 tokens, expected 1 to max_tokens=100"):
        balance([5, 101], 2, 100)
    with pytest.raises(ArgumentError, match=r"sequence 0 has 0 tokens"):
        balance([0], 2, 100)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def test_costs_are_counted() -> None:
    """A multiplication and an addition for each parameter and token, once in forward and twice in backward."""
    linear = sequence_cost(lambda: nn.Linear(32, 64, bias=False), lambda length: torch.zeros(length, 32))
    assert (linear.token, linear.pair) == (2 * 2 * 32 * 64, 0)  # the input needs no gradient
    cost = sequence_cost(Attention, lambda length: torch.zeros(1, length, 32, requires_grad=True))
    assert cost.token == 3 * 2 * (32 * 96 + 32 * 32)
    # Two products of [length, 32] and [32, length] in forward; five in backward, which computes one of them again.
    assert cost.pair == 7 * 2 * 32
    assert cost(100) == 100 * cost.token + 10_000 * cost.pair


@on_ranks(1)
def test_what_cannot_be_counted_is_an_error(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="matrix products"):
        sequence_cost(lambda: nn.LayerNorm(8), lambda length: torch.zeros(length, 8))
    model = nn.Linear(8, 8)
    weight = model.weight
    with pytest.raises(UnsupportedError, match="without the values"):
        sequence_cost(
            lambda: model,
            lambda length: torch.zeros(length, 8),
            lambda model, batch: model(batch).sum() * model(batch).sum().item(),
        )
    assert model.weight is weight  # also after a failure
    fully_shard(model)
    with pytest.raises(ArgumentError, match="not sharded"):
        sequence_cost(lambda: model, torch.ones)
