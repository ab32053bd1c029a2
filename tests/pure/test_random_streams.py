"""How the random values of a part of a tensor are made: pure functions, called for every rank of simulated worlds."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.errors import UnsupportedError
from fsdp2.init import arithmetic, counter, sequential
from fsdp2.init.counter import fill_by_counter
from fsdp2.init.sequential import Target, fill_sequential, spans
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


def test_spans_do_not_end_in_a_short_piece() -> None:
    assert list(spans(100, 32, 16)) == [(0, 32), (32, 64), (64, 100)]
    assert list(spans(112, 32, 16)) == [(0, 32), (32, 64), (64, 96), (96, 112)]
    assert list(spans(5, 32, 16)) == [(0, 5)]
    assert list(spans(0, 32, 16)) == []


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
            both_ways(name, dtype, shape, stride, fsdp(shape, 1, 3, 8))


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


def test_tensor_parallel_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "SPAN_NUMEL", 64)
    both_ways("normal_", torch.float32, (13, 11), (11, 1), fsdp_tp((13, 11), (3, 2)))


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


# --- by counter -------------------------------------------------------------------------------------------------------

KEY = 0x1234_5678_9ABC_DEF0
SAMPLES = 1 << 18
DEFAULT = tuple[Any, ...]
DRAWS: dict[str, tuple[DEFAULT, list[torch.dtype]]] = {
    "normal_": ((0.5, 2.0), [*FLOATS, torch.complex64]),
    "uniform_": ((-1.0, 3.0), [*FLOATS, torch.complex64]),
    "exponential_": ((2.0,), FLOATS),
    "cauchy_": ((1.0, 0.5), FLOATS),
    "log_normal_": ((0.1, 0.5), FLOATS),
    "geometric_": ((0.3,), [*FLOATS, torch.int64]),
    "bernoulli_": ((0.3,), [*FLOATS, *INTS]),
    "random_": ((), [*FLOATS, *INTS]),
}


def by_counter(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, key: int = KEY, *args: Any
) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    fill_by_counter(whole, whole_box(shape), shape, name, args, key)
    return whole


@pytest.mark.sampled
@pytest.mark.parametrize("name", DRAWS)
def test_counter_parts_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, dtypes = DRAWS[name]
    for dtype, shape in product(dtypes, [(5,), (9, 7), (4, 3, 31), (), (0, 4)]):
        monkeypatch.setattr(counter, "SPAN_NUMEL", 1 << 16)
        whole = by_counter(name, shape, dtype, KEY, *args)
        monkeypatch.setattr(counter, "SPAN_NUMEL", 37)
        for box in fsdp(shape, 1, 3, 8) + fsdp_tp(shape, (3, 2)):
            local = torch.zeros(box.shape, dtype=dtype)
            fill_by_counter(local, box, shape, name, args, KEY)
            assert torch.equal(local, whole[box.slices()]), (dtype, shape, box)


def kolmogorov_smirnov(values: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """The statistic times the root of the number of values: above 1.95 by chance once in a thousand times."""
    expected = cdf(values.flatten().double().sort().values)
    steps = torch.arange(values.numel() + 1, dtype=torch.float64) / values.numel()
    distance = torch.maximum((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    return float(distance) * values.numel() ** 0.5


CDFS: dict[str, tuple[DEFAULT, Callable[[Tensor], Tensor]]] = {
    "normal_": ((0.5, 2.0), lambda x: torch.special.ndtr((x - 0.5) / 2)),
    "uniform_": ((-1.0, 3.0), lambda x: (x + 1) / 4),
    "exponential_": ((2.0,), lambda x: -torch.expm1(-2 * x)),
    "cauchy_": ((1.0, 0.5), lambda x: torch.atan((x - 1) / 0.5) / math.pi + 0.5),
    "log_normal_": ((0.1, 0.5), lambda x: torch.special.ndtr((x.log() - 0.1) / 0.5)),
}


@pytest.mark.parametrize("name", CDFS)
def test_counter_distributions(name: str) -> None:
    args, cdf = CDFS[name]
    for key in (0, 1, KEY, -KEY):
        assert kolmogorov_smirnov(by_counter(name, (SAMPLES,), torch.float64, key, *args), cdf) < 1.95
    assert kolmogorov_smirnov(by_counter(name, (SAMPLES,), torch.float32, 2, *args), cdf) < 1.95


def test_counter_frequencies_of_discrete_distributions() -> None:
    assert abs(by_counter("bernoulli_", (SAMPLES,), torch.float32, KEY, 0.3).mean() - 0.3) < 4 * (0.21 / SAMPLES) ** 0.5
    for low, high in ((0, 10), (-3, 4)):
        counts = (by_counter("random_", (SAMPLES,), torch.int64, KEY, low, high) - low).bincount(minlength=high - low)
        expected = SAMPLES / (high - low)
        assert len(counts) == high - low
        assert ((counts - expected).square() / expected).sum() < 30  # chi squared, of 9 and of 6 degrees of freedom
    counts = by_counter("geometric_", (SAMPLES,), torch.int64, KEY, 0.3).bincount()
    assert counts[0] == 0
    for k in (1, 2, 3, 8):
        assert abs(counts[k] / SAMPLES - 0.3 * 0.7 ** (k - 1)) < 0.005


def test_counter_values_are_not_correlated() -> None:
    """Neighbours in a row and in a column, two keys (also two that follow each other), and the bits of a word."""
    values = by_counter("normal_", (512, 512))
    others = [by_counter("normal_", (512, 512), key=key) for key in (KEY + 1, -KEY, KEY ^ (1 << 63))]
    pairs = [(values[:, 1:], values[:, :-1]), (values[1:], values[:-1]), *((values, other) for other in others)]
    for one, other in pairs:
        for power in (1, 2):
            correlation = torch.corrcoef(torch.stack([one.flatten() ** power, other.flatten() ** power]))[0, 1]
            assert abs(correlation) < 4.5 / 512
    words = counter.words(torch.arange(SAMPLES), 5)
    for bit in range(64):
        share = (words.bitwise_right_shift(bit) & 1).double().mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / SAMPLES**0.5, bit


def test_words_are_those_of_split_mix_64() -> None:
    """Known answers: the first outputs for the seed 1234567, which the published generator gives."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    words = counter.words(torch.arange(1, 6), 1234567)
    assert [word % 2**64 for word in words.tolist()] == expected


def test_uniform_values_stay_below_their_upper_bound() -> None:
    """Rounding to a narrow dtype would reach it: 2 - 2 ** -9 is 2 in bfloat16."""
    for dtype, (low, high) in product(FLOATS, [(1.0, 2.0), (-1.0, 1.0), (0.0, 1.0), (3.0, 3.0)]):
        values = by_counter("uniform_", (SAMPLES,), dtype, KEY, low, high)
        assert values.min() >= low
        assert values.max() < high or low == high
        assert (values.max() - low) >= 0.98 * (high - low)


def test_random_integers_span_what_torchs_do() -> None:
    for dtype in (*FLOATS[1:], torch.uint8, torch.int8, torch.bool, torch.int32):
        ours, theirs = by_counter("random_", (SAMPLES,), dtype), torch.empty(SAMPLES, dtype=dtype).random_()
        assert ours.double().min() >= 0
        assert 0.99 < ours.double().max() / theirs.double().max() < 1.01
    every = by_counter("random_", (SAMPLES,), torch.int64, KEY, -(2**63), None)
    assert 0.49 < (every < 0).double().mean() < 0.51
    with pytest.raises(UnsupportedError, match="sequential"):
        by_counter("random_", (4,), torch.int64, KEY, -5, None)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_square_roots_are_rounded_correctly() -> None:
    """MKL's, which `torch.sqrt` calls on the CPU, are not, so that values in float64 differed from those of a GPU."""
    x = by_counter("uniform_", (50_000,), torch.float64, 7, 1e-3, 40.0)
    x = torch.cat([x, x * 1e-200, x * 1e190])
    expected = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=torch.float64)
    assert torch.equal(arithmetic.sqrt(x), expected)


def test_functions_are_accurate_and_do_not_depend_on_the_position() -> None:
    x = by_counter("uniform_", (5003,), torch.float64, 7, 1e-12, 1.0)
    inputs_and_references: list[tuple[Callable[[Tensor], Tensor], Tensor, Callable[[float], float]]] = [
        (arithmetic.log, torch.cat([x, x * 1e-300, x * 1e300, 1 + x * 1e-9]), math.log),
        (arithmetic.exp, x * 200 - 100, math.exp),
        (arithmetic.normal_quantile, torch.cat([x, x**40, 1 - x**10 / 2 - 1e-12]), NormalDist().inv_cdf),
        (lambda t: arithmetic.sin_cos_half_pi(t)[0], x * 2 - 1, lambda v: math.sin(v * math.pi / 2)),
        (lambda t: arithmetic.sin_cos_half_pi(t)[1], x * 2 - 1, lambda v: math.cos(v * math.pi / 2)),
    ]
    for function, values, reference in inputs_and_references:
        values = values[(values > 1e-306) | (values < 0)]
        whole = function(values)
        expected = torch.tensor([reference(value) for value in values.tolist()], dtype=torch.float64)
        assert ((whole - expected).abs() <= 4e-15 * expected.abs().clamp(min=0.1)).all()
        assert torch.equal(torch.cat([function(piece) for piece in values.split(7)]), whole)
