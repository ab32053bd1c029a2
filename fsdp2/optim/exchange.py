"""The two collectives of a bucket of matrices: gradients to the owners, new values back. Layer: optim.

Each is one all-to-all. A rank sends another rank its pieces of that rank's matrices, one after the other::

    in    rank r -> owner    a flag for each matrix: r has a gradient; then [gradient, parameter] of r's pieces
    out   owner -> rank r    [parameter] of r's pieces, after the step

Sizes depend only on shapes, never on which gradients exist, and every rank takes part. So empty shards and missing
gradients cannot make ranks disagree. A rank without a gradient sends zeros; if no rank has one, the owner sends the
parameter back unchanged. All values are sent in one dtype, which represents parameters and gradients exactly.

Parameters are sent in each step, although the owner could keep a copy: every change of the shards (loading a
checkpoint, averaged weights, the user) would have to reach the copy too, and a missed one gives silently wrong results.

Buffers are allocated and used on the current stream, and live until the collective that uses them was waited for.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_copy
from fsdp2.optim.owned import Crew, Matrix
from fsdp2.placement.box import Box

__all__ = ["Bucket", "Whole"]

Pieces = list[tuple[Matrix, Box | None]]  # of matrices; None: an empty piece


class Whole(NamedTuple):
    """A matrix on its owner, in the shape of its box; without a gradient if no rank has one."""

    matrix: Matrix
    values: torch.Tensor
    grad: torch.Tensor | None


class Bucket:
    """Matrices that are exchanged together, on this rank.

    Args:
        matrices: in the same order on every rank of the crew; `dtype` represents their values and gradients exactly.

    Attributes:
        num_bytes_sent: bytes that this rank sent in the last step.
    """

    def __init__(self, crew: Crew, matrices: Sequence[Matrix], dtype: torch.dtype):
        self.matrices, self.num_bytes_sent = matrices, 0
        self._crew, self._dtype, rank = crew, dtype, crew.rank
        self._owned = [matrix for matrix in matrices if matrix.owner == rank]
        by_owner = [[matrix for matrix in matrices if matrix.owner == each] for each in crew.ranks]
        # For each rank of the crew: this rank's pieces of its matrices, and its pieces of this rank's matrices.
        self._mine: list[Pieces] = [[(matrix, matrix.piece_of(rank)) for matrix in each] for each in by_owner]
        self._theirs: list[Pieces] = [[(m, m.piece_of(each)) for m in self._owned] for each in crew.ranks]
        # The same without pieces of replicas other than the owner's.
        self._given = [[piece for piece in each if piece[0].sends(rank)] for each in self._mine]
        self._taken = [[(m, m.piece_of(each)) for m in self._owned if m.sends(each)] for each in crew.ranks]
        self._sizes: Sequence[list[int]] = []  # of the received tensors, by rank of the crew
        self._work: dist.Work | None = None
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def send_gradients(self, grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Start the first collective. `grads`: this rank's gradients, by parameter."""
        self.num_bytes_sent = 0
        flags = [[matrix.param in grads for matrix, _ in pieces] for pieces in self._given]
        in_one = torch.tensor([*chain(*flags)], dtype=self._dtype).to(self._crew.device_type)
        sent = [[own] for own in in_one.split([*map(len, flags)])]
        for pieces, tensors in zip(self._given, sent, strict=True):
            for matrix, piece in pieces:
                if piece is not None:
                    index = matrix.within_local(piece)
                    values, grad = matrix.local[index], grads.get(matrix.param)
                    tensors += [torch.zeros_like(values) if grad is None else grad[index], values]
        sizes = [[len(each), *(numel for numel in _numels(each) for _ in range(2))] for each in self._taken]
        self._start(sent, sizes)

    def receive_gradients(self) -> list[Whole]:
        """Wait for it. Returns the matrices that this rank owns."""
        wholes: dict[Matrix, tuple[torch.Tensor, torch.Tensor]] = {}
        for matrix in self._owned:
            values = matrix.local.new_empty(matrix.box.shape)
            wholes[matrix] = values, torch.empty_like(values, dtype=matrix.grad_dtype)
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        flags: list[torch.Tensor] = []
        for pieces, tensors in zip(self._taken, self._received(), strict=True):
            flags.append(next(tensors))
            for matrix, piece in pieces:
                if piece is not None:
                    index = piece.within(matrix.box).slices()
                    destinations += [each[index] for each in reversed(wholes[matrix])]
                    sources += [next(tensors).view(piece.shape) for _ in range(2)]
        foreach_copy(destinations, sources)
        # The host reads only these values, to decide whether to step.
        matrices = [matrix for pieces in self._taken for matrix, _ in pieces]
        known = zip(matrices, torch.cat(flags).tolist() if matrices else [], strict=True)
        with_grad = {matrix for matrix, flag in known if flag}
        return [
            Whole(matrix, values, grad if matrix in with_grad else None) for matrix, (values, grad) in wholes.items()
        ]

    def send_values(self, wholes: Sequence[Whole]) -> None:
        """Start the second collective, with the current values of the matrices."""
        values = {whole.matrix: whole.values for whole in wholes}
        sent = [
            [values[m][piece.within(m.box).slices()] for m, piece in each if piece is not None] for each in self._theirs
        ]
        self._start(sent, [_numels(each) for each in self._mine])

    def receive_values(self) -> None:
        """Wait for it, and write this rank's pieces."""
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for pieces, tensors in zip(self._mine, self._received(), strict=True):
            for matrix, piece in pieces:
                if piece is not None:
                    destinations.append(matrix.local[matrix.within_local(piece)])
                    sources.append(next(tensors).view(piece.shape))
        foreach_copy(destinations, sources)

    def _start(self, sent: Sequence[list[torch.Tensor]], sizes: Sequence[list[int]]) -> None:
        """Send each rank of the crew these tensors. Collective; buckets start in the same order on every rank."""
        device = torch.device(self._crew.device_type)
        parts = [tensor.to(device, self._dtype).reshape(-1) for tensors in sent for tensor in tensors]
        in_one = received = torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype, device=device)
        if len(sent) > 1:
            ins, outs = [sum(map(torch.numel, tensors)) for tensors in sent], [sum(numels) for numels in sizes]
            received = in_one.new_empty(sum(outs))
            self.num_bytes_sent += (sum(ins) - ins[self._crew.ranks.index(self._crew.rank)]) * self._dtype.itemsize
            self._work = dist.all_to_all_single(received, in_one, outs, ins, self._crew.group, async_op=True)
        self._sizes = sizes
        self._buffers = in_one, received

    def _received(self) -> Iterator[Iterator[torch.Tensor]]:
        """Wait. Returns the flat tensors from each rank."""
        if self._work is not None:
            self._work.wait()
        assert self._buffers is not None
        parts = iter(self._buffers[1].split([*chain(*self._sizes)]))
        self._buffers = self._work = None
        return (islice(parts, len(numels)) for numels in self._sizes)


def _numels(pieces: Pieces) -> list[int]:
    return [piece.numel for _, piece in pieces if piece is not None]
