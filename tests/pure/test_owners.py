"""Which rank owns which matrix, what is a matrix, and what travels together: no process group."""

import random

import pytest

from fsdp2.errors import ArgumentError
from fsdp2.optim.matrices import boxes_of_matrices, buckets_of, choose_owners, cost_of, shape_of_matrix
from fsdp2.placement.box import Box


def cost(*shape: int) -> int:
    return cost_of(Box((0,) * len(shape), shape))


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_balance_over_all_layers(num_ranks: int) -> None:
    """Over the whole model: layer by layer, ranks without a matrix of the layer would wait, here 3 of 8 in each."""
    layer = [cost(4096, 4096)] * 2 + [cost(1024, 4096)] * 2 + [cost(14336, 4096)]
    costs = layer * 32
    owners = choose_owners(costs, range(num_ranks))
    loads = [sum(each for each, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= max(sum(costs) / num_ranks + max(costs) * (1 - 1 / num_ranks), max(costs))
    assert num_ranks > 8 or max(loads) <= 1.02 * sum(costs) / num_ranks


def test_fewer_matrices_than_ranks() -> None:
    assert choose_owners([1, 2], range(4)) == [1, 0]
    assert choose_owners([], range(4)) == []


def test_buckets_hold_every_matrix_once_and_have_work_for_all() -> None:
    random_ = random.Random(0)
    for num_ranks in (1, 2, 3, 8):
        sizes = [random_.randrange(1, 100) for _ in range(50)]
        buckets = buckets_of(sizes, num_ranks, 60)
        assert [index for bucket in buckets for index in bucket] == list(range(50))
        assert all(len(bucket) >= num_ranks for bucket in buckets[:-1])
        for bucket in buckets:
            assert len(bucket) <= num_ranks or sum(sizes[index] for index in bucket) <= 60 * num_ranks
    assert buckets_of([], 2, 60) == []


@pytest.mark.parametrize(
    ("shape", "split", "expected"),
    [
        ((6, 4), None, [(6, 4)]),
        ((6, 4), 3, [(2, 4)] * 3),
        ((6, 4), (1, 5), [(1, 4), (5, 4)]),
        ((2, 6, 4), None, [(6, 4)] * 2),
        ((2, 6, 4), [4, 2], [(4, 4), (2, 4)] * 2),
        ((5,), None, [(5,)]),
        ((2, 3, 1, 1), None, [(2, 3, 1, 1)]),
        ((), None, [()]),
    ],
)
def test_matrices_of_a_parameter(shape: tuple[int, ...], split: object, expected: list[tuple[int, ...]]) -> None:
    boxes = boxes_of_matrices("weight", shape, split)  # type: ignore[arg-type]
    assert [shape_of_matrix(box) for box in boxes] == expected
    assert sum(box.numel for box in boxes) == Box((0,) * len(shape), shape).numel


@pytest.mark.parametrize("split", [4, 0, -2, (2, 2), (7, -1), ()])
def test_split_that_does_not_fit(split: object) -> None:
    with pytest.raises(ArgumentError, match=r"'wqkv': split=.* does not divide its 6 rows"):
        boxes_of_matrices("wqkv", (6, 4), split)  # type: ignore[arg-type]


def test_split_of_what_has_no_rows() -> None:
    with pytest.raises(
        ArgumentError, match=r"'bias': split=2 divides the rows of matrices, but it has the shape \(6,\)"
    ):
        boxes_of_matrices("bias", (6,), 2)
