"""The two collectives of a bucket of matrices: gradients to the owners, new values back. Layer: optim.

Each is one all-to-all of bytes. What one rank sends another is a `Segment`: its pieces of the other's matrices, one
after the other, then one flag for each matrix::

    in    rank r -> owner    [gradient, parameter] of r's piece of each of the owner's matrices; flags: r has a gradient
    out   owner -> rank r    [parameter] of r's piece, after the step;                           flags: it was stepped

Sizes depend on shapes alone, never on which gradients exist, and every rank takes part with a segment for every other,
however little is in it. So empty shards and missing gradients cannot make ranks disagree. A rank without a gradient
sends zeros; if no rank has one, the owner sends the parameter back as it was.

Parameters travel in, although the owner could keep a copy: whatever changes the shards (loading a checkpoint, averaged
weights, the user) would have to reach the copy too, and a change that does not is a silent wrong result.

Buffers are allocated and used on the current stream, and live until the collective that uses them was waited for.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_copy
from fsdp2.layout import pack
from fsdp2.optim.matrices import Share
from fsdp2.optim.owned import Crew
from fsdp2.placement.box import Box

__all__ = ["Bucket", "Local", "Whole"]

ALIGN = 16  # bytes; more than any dtype needs

# The local tensors of a parameter and of its gradient, if there is one.
Local = tuple[torch.Tensor, torch.Tensor | None]


class Whole:
    """A matrix on its owner: values and gradient, in the shape of the matrix's box.

    Attributes:
        has_grad: whether any rank had a gradient.
        stepped: whether the optimizer has stepped it.
    """

    def __init__(self, share: Share, device: torch.device):
        self.share = share
        self.values = torch.empty(share.box.shape, dtype=share.dtype, device=device)
        self.grad = torch.empty(share.box.shape, dtype=share.grad_dtype, device=device)
        self.has_grad = False
        self.stepped = False


class Segment:
    """What one rank sends another.

    Args:
        pieces: for each matrix that concerns both, the sender's or the receiver's piece.
        with_grads: each piece stands for a gradient and a parameter.

    Attributes:
        num_bytes: the size of all.
    """

    def __init__(self, pieces: Sequence[tuple[Share, Box | None]], with_grads: bool):
        self.pieces = pieces
        sizes: list[int] = []
        for share, piece in pieces:
            numel = 0 if piece is None else piece.numel
            sizes += [numel * share.grad_dtype.itemsize] * with_grads + [numel * share.dtype.itemsize]
        self._with_grads = with_grads
        self._offsets, self.num_bytes = pack([*sizes, len(pieces) + 1], ALIGN)

    def flags(self, buffer: torch.Tensor) -> torch.Tensor:
        """The flags, one byte each, in a buffer that begins with this segment."""
        return buffer.narrow(0, self._offsets[-1], len(self.pieces))

    def error_flag(self, buffer: torch.Tensor) -> torch.Tensor:
        """The last flag, likewise."""
        return buffer.narrow(0, self._offsets[-1] + len(self.pieces), 1)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Share, Box, list[torch.Tensor]]]:
        """For each piece that is not empty its tensors, in its shape: the gradient if there is one, the parameter."""
        step = 2 if self._with_grads else 1
        for index, (share, piece) in enumerate(self.pieces):
            if piece is not None:
                dtypes = [share.grad_dtype, share.dtype][-step:]
                offsets = self._offsets[index * step : (index + 1) * step]
                yield (
                    share,
                    piece,
                    [
                        buffer.narrow(0, offset, piece.numel * dtype.itemsize).view(dtype).view(piece.shape)
                        for offset, dtype in zip(offsets, dtypes, strict=True)
                    ],
                )


class Transfer:
    """One all-to-all: the segments that this rank sends and receives, one for each rank of the crew."""

    def __init__(self, crew: Crew, sent: Sequence[Segment], received: Sequence[Segment]):
        self._crew = crew
        self.sent, self.received = sent, received
        self._in = [segment.num_bytes for segment in sent]
        self._out = [segment.num_bytes for segment in received]
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._work: dist.Work | None = None

    @property
    def num_bytes_sent(self) -> int:
        """Bytes that leave this rank."""
        own = self._crew.ranks.index(dist.get_rank())
        return sum(self._in) - self._in[own]

    def allocate(self, device: torch.device) -> Iterator[tuple[Segment, torch.Tensor]]:
        """New memory for what is sent: each segment with its part of the buffer."""
        buffer = torch.empty(sum(self._in), dtype=torch.uint8, device=device)
        self._buffers = buffer, buffer
        return zip(self.sent, buffer.split(self._in), strict=True)

    def start(self) -> None:
        """Send. Collective; the transfers of a crew start in the same order on every rank."""
        assert self._buffers is not None
        sent, _ = self._buffers
        if len(self._crew.ranks) > 1:
            received = sent.new_empty(sum(self._out))
            self._buffers = sent, received
            group = self._crew.group
            self._work = dist.all_to_all_single(received, sent, self._out, self._in, group, async_op=True)

    def wait(self) -> list[tuple[Segment, torch.Tensor]]:
        """What was received: each segment with its part of the buffer, which lives as long as the caller holds it."""
        assert self._buffers is not None
        if self._work is not None:
            self._work.wait()
        _, received = self._buffers
        self._buffers = self._work = None
        return list(zip(self.received, received.split(self._out), strict=True))


class Bucket:
    """The matrices that travel together, on this rank.

    Args:
        shares: in the same order on every rank of the crew.
        local_of: this rank's tensors of the parameter of a matrix.
        home_of: where the parameter lives: the device on which its owner steps it.

    Attributes:
        owned: those that this rank owns.
        error_flags: for each rank of the crew, whether it had an error before it sent new values; None before the first
            step.
    """

    def __init__(
        self,
        crew: Crew,
        shares: Sequence[Share],
        local_of: Callable[[Share], Local],
        home_of: Callable[[Share], torch.device],
    ):
        self.shares = shares
        self._rank = rank = dist.get_rank()
        self._local_of, self._home_of = local_of, home_of
        self._device = torch.device(crew.device_type)
        self._ranks = crew.ranks
        self.error_flags: torch.Tensor | None = None
        self.owned = [share for share in shares if share.owner == rank]
        by_owner: dict[int, list[Share]] = {each: [] for each in crew.ranks}
        for share in shares:
            by_owner[share.owner].append(share)
        mine = {share: share.piece_of(rank) for share in shares}
        sent = {each: [share for share in by_owner[each] if share.sends(rank)] for each in crew.ranks}
        self.inward = Transfer(
            crew,
            [Segment([(share, mine[share]) for share in sent[each]], True) for each in crew.ranks],
            [
                Segment([(share, share.piece_of(each)) for share in self.owned if share.sends(each)], True)
                for each in crew.ranks
            ],
        )
        self.outward = Transfer(
            crew,
            [Segment([(share, share.piece_of(each)) for share in self.owned], False) for each in crew.ranks],
            [Segment([(share, mine[share]) for share in by_owner[each]], False) for each in crew.ranks],
        )

    def send_gradients(self) -> None:
        """Start the first collective."""
        to: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        for segment, buffer in self.inward.allocate(self._device):
            for share, piece, (grad_view, view) in segment.views(buffer):
                values, grad = self._local_of(share)
                index = share.within_local(piece, self._rank)
                to.append(view)
                what.append(values[index])
                if grad is None:
                    grad_view.zero_()
                else:
                    to.append(grad_view)
                    what.append(grad[index])
            _set_flags(segment.flags(buffer), [self._local_of(share)[1] is not None for share, _ in segment.pieces])
            segment.error_flag(buffer).zero_()
        foreach_copy(to, what)
        self.inward.start()

    def receive_gradients(self) -> list[Whole]:
        """Wait for it; the matrices that this rank owns."""
        wholes = {share: Whole(share, self._home_of(share)) for share in self.owned}
        to: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        flags: list[torch.Tensor] = []
        shares: list[Share] = []
        for segment, buffer in self.inward.wait():
            for share, piece, (grad_view, view) in segment.views(buffer):
                index = share.within_whole(piece)
                to += [wholes[share].values[index], wholes[share].grad[index]]
                what += [view, grad_view]
            flags.append(segment.flags(buffer))
            shares += [share for share, _ in segment.pieces]
        foreach_copy(to, what)
        # The only values that the host reads: whether to step is decided here.
        for share, flag in zip(shares, torch.cat(flags).tolist() if self.owned else [], strict=True):
            wholes[share].has_grad |= bool(flag)
        return list(wholes.values())

    def send_values(self, wholes: Sequence[Whole], has_error: bool) -> None:
        """Start the second collective, with what is in the matrices now. `has_error`: tell the others that a step on
        this rank has failed."""
        found = {whole.share: whole for whole in wholes}
        to: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        for segment, buffer in self.outward.allocate(self._device):
            for share, piece, (view,) in segment.views(buffer):
                to.append(view)
                what.append(found[share].values[share.within_whole(piece)])
            _set_flags(segment.flags(buffer), [found[share].stepped for share, _ in segment.pieces])
            segment.error_flag(buffer).fill_(has_error)
        foreach_copy(to, what)
        self.outward.start()

    def receive_values(self, read_flags: bool) -> dict[Share, bool]:
        """Wait for it, and write this rank's pieces. Which matrices were stepped, if `read_flags`; else nothing."""
        to: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        stepped: dict[Share, bool] = {}
        received = self.outward.wait()
        self.error_flags = torch.cat([segment.error_flag(buffer) for segment, buffer in received])
        for segment, buffer in received:
            for share, piece, (view,) in segment.views(buffer):
                values, _ = self._local_of(share)
                to.append(values[share.within_local(piece, self._rank)])
                what.append(view)
            if read_flags:
                flags = segment.flags(buffer).tolist()
                stepped.update((share, bool(flag)) for (share, _), flag in zip(segment.pieces, flags, strict=True))
        foreach_copy(to, what)
        return stepped

    def ranks_with_errors(self) -> list[int]:
        """The ranks that had an error in the step before they sent. Reads from the device."""
        flags = [] if self.error_flags is None else self.error_flags.tolist()
        return [rank for rank, flag in zip(self._ranks, flags, strict=bool(flags)) if flag]


def _set_flags(view: torch.Tensor, flags: Sequence[bool]) -> None:
    """Without a copy from the host where all are the same."""
    if len(set(flags)) <= 1:
        view.fill_(bool(flags and flags[0]))
    else:
        view.copy_(torch.tensor(flags, dtype=torch.uint8))
