"""How the random values of a part of a tensor are made: pure functions, called for every rank of simulated worlds."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.init import blocks, sequential
from fsdp2.init.blocks import fill_blocks
from fsdp2.init.sequential import Draw, Target, fill_sequential
from fsdp2.placement.box import Box
from fsdp2.placement.box import whole as whole_box
from fsdp2.placement.tiling import Grid, Tiling

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.uint8, torch.bool]

Shape = tuple[int, ...]


def boxes_of(shape: Shape, sizes: Shape, cuts: tuple[tuple[int, int], ...]) -> list[Box]:
    """Of all ranks of a mesh of these sizes."""
    tiling = Tiling(shape, Grid(sizes, tuple(range(math.prod(sizes)))), cuts)
    return [tiling.box_at(place) for place in product(*map(range, sizes))]


def fsdp(shape: Shape, *worlds: int) -> list[Box]:
    """Of all ranks of these worlds, along every dim; the whole tensor if it has none."""
    layouts = [boxes_of(shape, (world,), ((0, dim),)) for world in worlds for dim in range(len(shape))]
    return [box for boxes in layouts for box in boxes] or [whole_box(shape)]


def fsdp_tp(shape: Shape, sizes: Shape) -> list[Box]:
    """TP, which cuts first, and FSDP on top of it, along all pairs of dims."""
    pairs = product(range(len(shape)), repeat=2)
    return [box for dp, tp in pairs for box in boxes_of(shape, sizes, ((1, tp), (0, dp)))]


# --- the same as one process ------------------------------------------------------------------------------------------

OPS: dict[str, tuple[Callable[..., Any], list[torch.dtype]]] = {
    "normal_": (lambda t, p, g: t.normal_(0.5, 2.0, generator=g), [*FLOATS, torch.complex64]),
    "uniform_": (lambda t, p, g: t.uniform_(-1, 3, generator=g), [*FLOATS, torch.complex64]),
    "exponential_": (lambda t, p, g: t.exponential_(2.0, generator=g), FLOATS),
    "cauchy_": (lambda t, p, g: t.cauchy_(1.0, 0.5, generator=g), FLOATS),
    "log_normal_": (lambda t, p, g: t.log_normal_(0.1, 0.5, generator=g), FLOATS),
    "geometric_": (lambda t, p, g: t.geometric_(0.3, generator=g), [*FLOATS, torch.int64]),
    "bernoulli_": (lambda t, p, g: t.bernoulli_(0.3, generator=g), [*FLOATS, *INTS]),
    "bernoulli_tensor": (lambda t, p, g: t.bernoulli_(p, generator=g), [*FLOATS, *INTS]),
    "random_": (lambda t, p, g: t.random_(generator=g), [*FLOATS, *INTS]),
    "random_to": (lambda t, p, g: t.random_(100, generator=g), [*FLOATS, *INTS[:3]]),
    "random_from": (lambda t, p, g: t.random_(5, 120, generator=g), [*FLOATS, *INTS[:3]]),
    "random_wide": (lambda t, p, g: t.random_(0, 2**40, generator=g), [torch.int64]),
}


def both_ways(name: str, dtype: torch.dtype, shape: Shape, stride: Shape, boxes: list[Box]) -> None:
    """The whole by torch, then each rank's part by `fill_sequential`: equal, and so are the generators."""
    op, _ = OPS[name]
    probs = torch.rand(shape, generator=torch.Generator().manual_seed(3)) if name == "bernoulli_tensor" else None
    plain = torch.Generator().manual_seed(1)
    whole = op(torch.empty_strided(shape, stride, dtype=dtype), probs, plain)
    for box in boxes:
        ours = torch.Generator().manual_seed(1)
        local = torch.zeros(box.shape, dtype=dtype)
        operand = None if probs is None else probs[box.slices()]
        fill_sequential(Target(local, box, shape, stride, operand), op, ours)
        assert torch.equal(local, whole[box.slices()]), (name, dtype, shape, box)
        assert torch.equal(ours.get_state(), plain.get_state()), (name, dtype, shape, box)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPS)
def test_parts_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation and dtype, in spans of 64 values, for every rank: sizes around the blocks of 16 of `normal_`."""
    monkeypatch.setattr(sequential, "SPAN_NUMEL", 64)
    for dtype in OPS[name][1]:
        for shape in [(5,), (16,), (17, 1), (9, 7), (13, 11), (3, 50), (4, 3, 31), (257,), (), (0, 4)]:
            stride = torch.empty(shape, device="meta").stride()
            both_ways(name, dtype, shape, stride, fsdp(shape, 1, 3, 8) + fsdp_tp(shape, (3, 2)))


@pytest.mark.parametrize("name", ["normal_", "uniform_", "bernoulli_tensor"])
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "with gaps"])
def test_parts_of_tensors_that_are_not_contiguous(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch draws in the order of memory, and normal values in another way."""
    monkeypatch.setattr(sequential, "SPAN_NUMEL", 64)
    like = {
        "transposed": torch.empty(13, 11, device="meta").t(),
        "channels_last": torch.empty(3, 5, 4, 6, device="meta").to(memory_format=torch.channels_last),
        "with gaps": torch.empty(12, 20, device="meta")[:, :13],
    }[layout]
    if layout == "with gaps" and name == "normal_":
        assert not like.is_contiguous()
    shape, stride = tuple(like.shape), like.stride()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        both_ways(name, dtype, shape, stride, fsdp(shape, 1, 2, 3))


def test_spans_of_the_usual_size() -> None:
    """With nothing patched: more values than a span has, and a last piece that is not whole."""
    numel = 2 * sequential.SPAN_NUMEL + 9
    both_ways("normal_", torch.float32, (numel,), (1,), fsdp((numel,), 3))


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


# --- in blocks --------------------------------------------------------------------------------------------------------

KEY = 0x9234_5678_9ABC_DEF0


def in_blocks(box: Box, shape: Shape, draw: Draw, dtype: torch.dtype = torch.float32, key: int = KEY) -> Tensor:
    local = torch.zeros(box.shape, dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    fill_blocks(Target(local, box, shape, stride), draw, key)
    return local


def normal(values: Tensor, _: Tensor | None, generator: torch.Generator | None) -> Tensor:
    return values.normal_(generator=generator)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPS)
def test_parts_of_blocks_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation and dtype, for every rank: even and uneven rows, other dims, tensor parallelism below."""
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 37)
    op, dtypes = OPS[name]
    for dtype, shape in product(dtypes, [(5,), (9, 7), (4, 3, 31), (), (0, 4)]):
        probs = torch.rand(shape, generator=torch.Generator().manual_seed(3))

        def fill(box: Box, dtype: torch.dtype = dtype, shape: Shape = shape, probs: Tensor = probs) -> Tensor:
            local = torch.zeros(box.shape, dtype=dtype)
            operand = probs[box.slices()] if name == "bernoulli_tensor" else None
            fill_blocks(Target(local, box, shape, (), operand), op, KEY)
            return local

        whole = fill(whole_box(shape))
        for box in fsdp(shape, 3, 8) + fsdp_tp(shape, (3, 2)):
            assert torch.equal(fill(box), whole[box.slices()]), (dtype, shape, box)


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
    uniform = in_blocks(whole_box(shape), shape, OPS["uniform_"][0])
    assert abs(uniform.mean() - 1) < 4.5 * (4 / 3 / values.numel()) ** 0.5 and -1 <= uniform.min() < uniform.max() < 3
    others = in_blocks(whole_box(shape), shape, normal, key=KEY ^ (1 << 20))
    every = torch.cat([values, others])
    assert len(every[:, :4].unique(dim=0)) == 2 * count
    correlations = torch.corrcoef(every.double()).fill_diagonal_(0)
    assert correlations.abs().max() < 6 / size**0.5  # of 8128 pairs
    assert torch.corrcoef(torch.stack([values.flatten()[1:], values.flatten()[:-1]]))[0, 1].abs() < 4.5 / 1448
