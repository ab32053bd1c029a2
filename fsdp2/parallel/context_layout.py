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

from dataclasses import dataclass

from fsdp2.errors import ArgumentError

__all__ = ["Block", "Part", "check_length", "rank_blocks", "rank_slices"]


@dataclass(frozen=True)
class Part:
    """Rows of a rank's part of a sequence: both of its two chunks, or one of them."""

    start: int
    stop: int

    def rows(self, length: int) -> slice:
        """The slice of these rows, if the rank has `length` rows."""
        return slice(self.start * length // 2, self.stop * length // 2)


ALL, FIRST, SECOND = Part(0, 2), Part(0, 1), Part(1, 2)


@dataclass(frozen=True)
class Block:
    """One step of a rank's ring: some of its queries attend to some keys of rank `source`.

    Attributes:
        source: the rank whose keys and values are used in this step.
        queries: which of this rank's queries take part.
        keys: which of `source`'s keys they see.
        is_causal: row i only sees rows up to i.
    """

    source: int
    queries: Part
    keys: Part
    is_causal: bool

    @property
    def work(self) -> float:
        """The work, in pairs of one chunk of queries and one chunk of keys."""
        pairs = (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)
        return pairs / 2 if self.is_causal else float(pairs)


def rank_blocks(rank: int, size: int, is_causal: bool) -> list[Block]:
    """The blocks that `rank` of `size` computes, in the order in which keys arrive.

    >>> [(block.source, block.work) for block in rank_blocks(1, 3, is_causal=True)]
    [(1, 2.0), (0, 2.0), (2, 2.0)]
    """
    if not is_causal:
        return [Block((rank - step) % size, ALL, ALL, False) for step in range(size)]
    blocks = [Block(rank, ALL, ALL, True)]
    for step in range(1, size):
        source = (rank - step) % size
        if source < rank:
            blocks.append(Block(source, ALL, FIRST, False))
        else:
            blocks.append(Block(source, SECOND, ALL, False))
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
        ArgumentError: it cannot; the message shows the arithmetic.
    """
    chunks = 2 * size
    if size > 1 and length % chunks != 0:
        below = length - length % chunks
        wanted = f"pad it to {below + chunks}" + (f" or cut it to {below}" if below else "")
        raise ArgumentError(
            f"{what} has {length} rows along the sequence, which cannot be cut into 2 x {size} = {chunks} equal chunks "
            f"for {size} context ranks ({length} = {length // chunks} x {chunks} + {length % chunks}): {wanted}"
        )
