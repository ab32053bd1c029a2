"""How a sequence is cut over the ranks of a context axis, and which blocks of attention each rank computes: pure
geometry. Layer: parallel.

The *head-tail* layout: a sequence is cut into ``2 n`` equal chunks, and rank r has chunks r and ``2 n - 1 - r``. Under
a causal mask, early rows see few keys and late rows many. With one chunk of each kind, every rank has the same work.
With 2 ranks (a row is a rank's query chunk, ``.`` is masked, ``\\`` half masked)::

                    k0   k3  | k1   k2
    rank 0   q0     \\    .   | .    .         step 0: own keys, causal       step 1: second half of the queries
             q3     #    \\   | #    #                                                sees all keys of rank 1
    rank 1   q1     #    .   | \\    .         step 1: all queries see the    step 0: own keys, causal
             q2     #    .   | #    \\                 first half of the keys of rank 0

Every step is half a full block, on every rank. Without a mask each step is a full block. The layout is the same, so it
need not be known by which one a sequence was cut.

Source: the layout is that of "Striped Attention" (https://arxiv.org/abs/2311.09431) coarsened to two chunks, as in
Llama 3 (https://arxiv.org/abs/2407.21783, 3.3.2).
"""

from typing import NamedTuple

from fsdp2.errors import ArgumentError

__all__ = ["Block", "check_length", "rank_blocks", "rank_slices"]


class Block(NamedTuple):
    """One step of a rank's ring: some of its queries attend to some keys of rank `source`.

    Attributes:
        source: the rank whose keys and values are used in this step.
        queries: the rows of this rank that take part.
        keys: the rows of `source` that they see.
        is_causal: row i only sees rows up to i.
    """

    source: int
    queries: slice
    keys: slice
    is_causal: bool


def rank_blocks(rank: int, size: int, is_causal: bool, num_queries: int, num_keys: int) -> list[Block]:
    """The blocks that `rank` of `size` computes, in the order in which keys arrive; each rank has that many rows.

    >>> [(block.source, block.queries.start, block.keys.stop) for block in rank_blocks(1, 3, True, 8, 8)]
    [(1, 0, 8), (0, 0, 4), (2, 4, 8)]
    """
    everyone, seen = slice(0, num_queries), slice(0, num_keys)
    blocks = [Block(rank, everyone, seen, is_causal)]
    for source in ((rank - step) % size for step in range(1, size)):
        if not is_causal:
            blocks.append(Block(source, everyone, seen, False))
        elif source < rank:
            blocks.append(Block(source, everyone, slice(0, num_keys // 2), False))
        else:
            blocks.append(Block(source, slice(num_queries // 2, num_queries), seen, False))
    return blocks


def rank_slices(length: int, rank: int, size: int) -> list[slice]:
    """The rows of a sequence of `length` that `rank` of `size` has, in its order. The length must be valid.

    >>> rank_slices(16, 1, 2)
    [slice(4, 8, None), slice(8, 12, None)]
    """
    if size == 1:
        return [slice(0, length)]
    chunk = length // (2 * size)
    return [slice(first * chunk, (first + 1) * chunk) for first in (rank, 2 * size - 1 - rank)]


def check_length(what: str, length: int, size: int) -> None:
    """Check that a sequence can be cut into equal chunks.

    Raises:
        ArgumentError: it cannot; the message says what to pad it to.
    """
    chunks = 2 * size
    if size > 1 and length % chunks:
        raise ArgumentError(
            f"{what} has {length} rows along the sequence, which cannot be cut into 2 x {size} = {chunks} equal chunks "
            f"for {size} context ranks: pad it to {length + -length % chunks}"
        )
