"""`part_of`: the rows of a tile, on every number of ranks."""

from __future__ import annotations

from itertools import pairwise

from fsdp2.extras.tiles import part_of
from fsdp2.layout import ShardLayout


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
