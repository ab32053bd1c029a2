"""How the random values of a part of a tensor are made: pure functions, called for every rank of simulated worlds."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from fsdp2.init import blocks, sequential
from fsdp2.init.blocks import fill_blocks
from fsdp2.init.sequential import Draw, Target, fill_sequential
from fsdp2.placement.box import Box
from fsdp2.placement.box import whole as whole_box
from fsdp2.placement.tiling import Grid, Tiling

Shape = tuple[int, ...]


def boxes_of(shape: Shape, sizes: Shape, cuts: tuple[tuple[int, int], ...]) -> list[Box]:
    """Of all ranks of a mesh of these sizes."""
    tiling = Tiling(shape, Grid(sizes, tuple(range(math.prod(sizes)))), cuts)
    return [tiling.box_at(place) for place in product(*map(range, sizes))]


def test_what_cannot_be_split_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that seeds a stream of its own at each call, as MKL's are used by torch on some processors."""
    monkeypatch.setattr(sequential, "SPAN_NUMEL", 64)
    sizes = []

    def with_own_stream(values: Tensor, _: Tensor | None, generator: torch.Generator | None) -> Tensor:
        sizes.append(values.numel())
        seed = int(torch.randint(2**31, (), generator=generator))
        return values.uniform_(generator=torch.Generator().manual_seed(seed))

    whole = with_own_stream(torch.empty(300), None, torch.Generator().manual_seed(1))
    local = torch.empty(75)
    target = Target(local, Box((150,), (75,)), (300,), (1,))
    fill_sequential(target, with_own_stream, torch.Generator().manual_seed(1))
    assert torch.equal(local, whole[150:225])
    assert sizes[-1] == 300


def test_splitting_is_only_asked_for_above_a_span() -> None:
    """Memory: no buffer is longer than a span and a block, whatever the tensor."""
    sizes = []

    def draw(values: Tensor, _: Tensor | None, generator: torch.Generator | None) -> Tensor:
        sizes.append(values.numel())
        return values.normal_(generator=generator)

    shape = (3 * sequential.SPAN_NUMEL,)
    fill_sequential(Target(torch.empty(10), Box((0,), (10,)), shape, (1,)), draw, torch.Generator())
    assert max(sizes) <= sequential.SPAN_NUMEL + sequential.BLOCK_NUMEL
    assert sum(sizes[-3:]) == shape[0]


KEY = 0x9234_5678_9ABC_DEF0


def in_blocks(box: Box, shape: Shape, draw: Draw, dtype: torch.dtype = torch.float32, key: int = KEY) -> Tensor:
    local = torch.zeros(box.shape, dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    fill_blocks(Target(local, box, shape, stride), draw, key)
    return local


def normal(values: Tensor, _: Tensor | None, generator: torch.Generator | None) -> Tensor:
    return values.normal_(generator=generator)


@pytest.mark.parametrize("world", [4, 64, 4096])
def test_a_rank_draws_the_blocks_that_it_touches(world: int) -> None:
    """What it owns and less than two blocks more, on any number of ranks; in "sequential" it draws everything."""
    shape, drawn = (8192, 515), []

    def count(values: Tensor, _: Tensor | None, generator: torch.Generator | None) -> None:
        drawn.append(values.numel())

    for rank in (0, 1, world // 2 + 1, world - 1):
        box = boxes_of(shape, (world,), ((0, 0),))[rank]
        drawn.clear()
        in_blocks(box, shape, count)
        assert box.numel <= sum(drawn) < box.numel + 2 * blocks.BLOCK_NUMEL


def test_distribution_of_blocks() -> None:
    """Mean and variance; no block is that of another number or key; neighbours are not correlated."""
    count, size = 64, blocks.BLOCK_NUMEL
    shape = (count, size)
    values = in_blocks(whole_box(shape), shape, normal)
    assert abs(values.mean()) < 4.5 / values.numel() ** 0.5
    assert abs(values.var() - 1) < 4.5 * (2 / values.numel()) ** 0.5
    uniform = in_blocks(whole_box(shape), shape, lambda t, p, g: t.uniform_(-1, 3, generator=g))
    assert abs(uniform.mean() - 1) < 4.5 * (4 / 3 / values.numel()) ** 0.5 and -1 <= uniform.min() < uniform.max() < 3
    others = in_blocks(whole_box(shape), shape, normal, key=KEY ^ (1 << 20))
    every = torch.cat([values, others])
    assert len(every[:, :4].unique(dim=0)) == 2 * count
    correlations = torch.corrcoef(every.double()).fill_diagonal_(0)
    assert correlations.abs().max() < 6 / size**0.5  # of 8128 pairs
    assert torch.corrcoef(torch.stack([values.flatten()[1:], values.flatten()[:-1]]))[0, 1].abs() < 4.5 / 1448
