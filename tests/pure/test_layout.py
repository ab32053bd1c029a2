"""The pure geometry (Behaviour 21-23, 27, 28), and the order of units (Behaviour 49, 56, 66, 67)."""

import itertools
from itertools import pairwise

import pytest
import torch

from fsdp2.extras.tiles import part_of
from fsdp2.layout import Lane, ShardLayout, choose_lane, pack
from fsdp2.runtime.gather import interleave
from fsdp2.runtime.step import Pass

SIZES = range(10)
PARTS = range(1, 7)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("size", SIZES)
def test_chunks_are_those_of_torch_chunk(size: int, parts: int) -> None:
    """Behaviour 21: the shard is chunk `rank` of torch.chunk; ranks past the last chunk hold nothing."""
    whole = torch.arange(size)
    expected = [chunk.tolist() for chunk in torch.chunk(whole, parts)] if size else []
    expected += [[] for _ in range(parts - len(expected))]
    bounds = ShardLayout((size,), 0, parts).bounds
    assert [whole[bounds[r] : bounds[r + 1]].tolist() for r in range(parts)] == expected


@pytest.mark.parametrize("parts", PARTS)
def test_interleaved_views_hold_the_same_elements(parts: int) -> None:
    """A rank's segment of a packed buffer is the same on the way in and out, and takes at most two copies."""
    for shape in itertools.product(range(6), range(1, 4), range(3)):
        for dim in range(3):
            layout = ShardLayout(shape, dim, parts)
            full = torch.arange(layout.numel, dtype=torch.float32).view(shape)
            packed = torch.full((parts, layout.padded_numel + 2), -1.0)
            for rank in range(parts):
                start, size = layout.bounds[rank], layout.local_size(rank)
                packed[rank, 1 : 1 + layout.local_numel(rank)] = full.narrow(dim, start, size).reshape(-1)
            result = torch.full(shape, -2.0)
            pairs = interleave(packed, 1, result, layout)
            assert len(pairs) <= 2
            for source, destination in pairs:
                assert source.shape == destination.shape
                destination.copy_(source)
            assert torch.equal(result, full)


def test_pack_aligns_and_does_not_overlap() -> None:
    for sizes in itertools.product((0, 1, 7, 8, 9), repeat=3):
        offsets, total = pack(sizes, 8)
        assert all(offset % 8 == 0 for offset in offsets)
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
        assert max(ends) <= total < sum(sizes) + 8 * len(sizes) + 1


def test_lanes() -> None:
    even, uneven, columns = ShardLayout((8, 4), 0, 2), ShardLayout((7, 4), 0, 2), ShardLayout((8, 4), 1, 2)
    assert choose_lane(even, 4, min_bytes=64, allows_uneven=False) is Lane.DIRECT
    assert choose_lane(even, 4, min_bytes=65, allows_uneven=False) is Lane.PACKED
    assert choose_lane(even, 2, min_bytes=64, allows_uneven=False) is Lane.PACKED
    assert choose_lane(uneven, 4, min_bytes=0, allows_uneven=False) is Lane.PACKED
    assert choose_lane(uneven, 4, min_bytes=0, allows_uneven=True) is Lane.DIRECT
    assert choose_lane(columns, 4, min_bytes=0, allows_uneven=True) is Lane.PACKED
    assert choose_lane(even, 4, min_bytes=None, allows_uneven=True) is Lane.PACKED
    assert choose_lane(ShardLayout((8, 4), 1, 1), 4, min_bytes=None, allows_uneven=False) is Lane.DIRECT


def test_ranks_have_the_rows_that_torch_chunk_would_give_them() -> None:
    """A part that takes the same rows of each chunk is itself cut by `ceil`: tiles need no layout of their own."""
    for size in range(1, 25):
        for ranks in range(1, 7):
            layout = ShardLayout((size, 3), 0, ranks)
            for tiles in range(1, layout.chunk + 1):
                bounds = ShardLayout((layout.chunk,), 0, tiles).bounds
                for start, stop in pairwise(bounds):
                    if start == stop:
                        continue
                    part = part_of(layout, start, stop - start)
                    wanted = [min(max(layout.local_size(rank) - start, 0), stop - start) for rank in range(ranks)]
                    assert [part.local_size(rank) for rank in range(ranks)] == wanted
                    assert part.shape == (sum(wanted), 3)
                    assert part.padded_numel == 3 * (stop - start)


@pytest.mark.parametrize("length", range(1, 5))
def test_backward_prefetches_the_reverse_of_what_ran(length: int) -> None:
    for order in itertools.product("abc", repeat=length):
        current = Pass()
        for position, unit in enumerate(order):
            before = [other for other in order[:position] if other != unit]
            assert current.record(unit) == (before[-1] if before else None)
