"""The two collectives of a bucket of matrices: gradients to the owners, new values back. Layer: optim.

Each is one all-to-all. What one rank sends another are its pieces of the other's matrices, one after the other, then
one flag for each matrix and one for an error::

    in    rank r -> owner    [gradient, parameter] of r's piece of each of the owner's matrices; flags: r has a gradient
    out   owner -> rank r    [parameter] of r's piece, after the step;                           flags: it was stepped

Sizes depend on shapes alone, never on which gradients exist, and every rank takes part with something for every other,
however little it is. So empty shards and missing gradients cannot make ranks disagree. A rank without a gradient sends
zeros; if no rank has one, the owner sends the parameter back as it was. All travels in one dtype, which represents the
values of parameters and gradients exactly.

Parameters travel in, although the owner could keep a copy: whatever changes the shards (loading a checkpoint, averaged
weights, the user) would have to reach the copy too, and a change that does not is a silent wrong result.

Buffers are allocated and used on the current stream, and live until the collective that uses them was waited for.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from fsdp2._torch import foreach_copy
from fsdp2.optim.matrices import Share
from fsdp2.optim.owned import Crew
from fsdp2.placement.box import Box

__all__ = ["Bucket", "Local", "Whole"]

# The local tensors of a parameter and of its gradient, if there is one.
Local = tuple[torch.Tensor, torch.Tensor | None]

Pieces = list[tuple[Share, Box | None]]  # of matrices; None: nothing of this one


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


class Transfer:
    """One all-to-all.

    Args:
        sent, received: for each rank of the crew, the pieces that this rank sends it, and gets from it.
        num_tensors: for each piece: a gradient and a parameter, or a parameter.
    """

    def __init__(
        self, crew: Crew, dtype: torch.dtype, sent: list[Pieces], received: list[Pieces], num_tensors: int
    ) -> None:
        self._crew, self._dtype, self._num_tensors = crew, dtype, num_tensors
        self._sent, self._received = sent, received
        self._in, self._out = ([sum(self._sizes(pieces)) for pieces in each] for each in (sent, received))
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._work: dist.Work | None = None

    def _sizes(self, pieces: Pieces) -> list[int]:
        """Elements of each tensor, and of the flags."""
        numels = [0 if piece is None else piece.numel for _, piece in pieces for _ in range(self._num_tensors)]
        return [*numels, len(pieces) + 1]

    @property
    def num_bytes_sent(self) -> int:
        """Bytes that leave this rank."""
        return (sum(self._in) - self._in[self._crew.ranks.index(dist.get_rank())]) * self._dtype.itemsize

    def start(
        self,
        tensors_of: Callable[[Share, Box], Sequence[torch.Tensor]],
        flag_of: Callable[[Share], bool],
        has_error: bool,
    ) -> None:
        """Send. Collective; the transfers of a crew start in the same order on every rank."""
        device = torch.device(self._crew.device_type)
        said = [[flag_of(share) for share, _ in pieces] + [has_error] for pieces in self._sent]
        flags = torch.tensor([flag for each in said for flag in each], dtype=self._dtype).to(device)
        parts: list[torch.Tensor] = []
        for pieces, own in zip(self._sent, flags.split([len(each) for each in said]), strict=True):
            tensors = [each for share, piece in pieces if piece is not None for each in tensors_of(share, piece)]
            parts += [*(each.to(device, self._dtype).reshape(-1) for each in tensors), own]
        sent = received = torch.cat(parts)
        if len(self._crew.ranks) > 1:
            received = sent.new_empty(sum(self._out))
            group = self._crew.group
            self._work = dist.all_to_all_single(received, sent, self._out, self._in, group, async_op=True)
        self._buffers = sent, received

    def wait(self) -> Iterator[tuple[Pieces, list[list[torch.Tensor]], torch.Tensor]]:
        """What each rank sent: for each piece its tensors, flat, and the flags."""
        assert self._buffers is not None
        if self._work is not None:
            self._work.wait()
        _, received = self._buffers
        self._buffers = self._work = None
        for pieces, buffer in zip(self._received, received.split(self._out), strict=True):
            *flat, flags = buffer.split(self._sizes(pieces))
            step = self._num_tensors
            yield pieces, [list(flat[step * index : step * (index + 1)]) for index in range(len(pieces))], flags


class Bucket:
    """The matrices that travel together, on this rank.

    Args:
        shares: of one `wire_dtype`, in the same order on every rank of the crew.
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
        self._ranks = crew.ranks
        self.error_flags: torch.Tensor | None = None
        self.owned = [share for share in shares if share.owner == rank]
        by_owner = [[share for share in shares if share.owner == each] for each in crew.ranks]
        dtype = shares[0].wire_dtype
        self.inward = Transfer(
            crew,
            dtype,
            [[(share, share.piece_of(rank)) for share in owned if share.sends(rank)] for owned in by_owner],
            [[(share, share.piece_of(each)) for share in self.owned if share.sends(each)] for each in crew.ranks],
            2,
        )
        self.outward = Transfer(
            crew,
            dtype,
            [[(share, share.piece_of(each)) for share in self.owned] for each in crew.ranks],
            [[(share, share.piece_of(rank)) for share in owned] for owned in by_owner],
            1,
        )

    def send_gradients(self) -> None:
        """Start the first collective."""

        def tensors_of(share: Share, piece: Box) -> list[torch.Tensor]:
            values, grad = self._local_of(share)
            index = share.within_local(piece, self._rank)
            return [torch.zeros_like(values[index]) if grad is None else grad[index], values[index]]

        self.inward.start(tensors_of, lambda share: self._local_of(share)[1] is not None, False)

    def receive_gradients(self) -> list[Whole]:
        """Wait for it; the matrices that this rank owns."""
        wholes = {share: Whole(share, self._home_of(share)) for share in self.owned}
        to: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        flags: list[torch.Tensor] = []
        shares: list[Share] = []
        for pieces, tensors, said in self.inward.wait():
            for (share, piece), views in zip(pieces, tensors, strict=True):
                if piece is not None:
                    index = share.within_whole(piece)
                    to += [wholes[share].grad[index], wholes[share].values[index]]
                    what += [view.view(piece.shape) for view in views]
            flags.append(said[:-1])
            shares += [share for share, _ in pieces]
        foreach_copy(to, what)
        # The only values that the host reads: whether to step is decided here.
        for share, flag in zip(shares, torch.cat(flags).tolist() if self.owned else [], strict=True):
            wholes[share].has_grad |= bool(flag)
        return list(wholes.values())

    def send_values(self, wholes: Sequence[Whole], has_error: bool) -> None:
        """Start the second collective, with what is in the matrices now. `has_error`: tell the others that a step on
        this rank has failed."""
        found = {whole.share: whole for whole in wholes}
        self.outward.start(
            lambda share, piece: [found[share].values[share.within_whole(piece)]],
            lambda share: found[share].stepped,
            has_error,
        )

    def receive_values(self, read_flags: bool) -> dict[Share, bool]:
        """Wait for it, and write this rank's pieces. Which matrices were stepped, if `read_flags`; else nothing."""
        to: list[torch.Tensor] = []
        what: list[torch.Tensor] = []
        errors: list[torch.Tensor] = []
        stepped: dict[Share, bool] = {}
        for pieces, tensors, said in self.outward.wait():
            for (share, piece), (view,) in zip(pieces, tensors, strict=True):
                if piece is not None:
                    to.append(self._local_of(share)[0][share.within_local(piece, self._rank)])
                    what.append(view.view(piece.shape))
            errors.append(said[-1:])
            if read_flags:
                stepped.update((share, bool(flag)) for (share, _), flag in zip(pieces, said[:-1].tolist(), strict=True))
        foreach_copy(to, what)
        self.error_flags = torch.cat(errors)
        return stepped

    def ranks_with_errors(self) -> list[int]:
        """The ranks that had an error in the step before they sent. Reads from the device."""
        flags = [] if self.error_flags is None else self.error_flags.tolist()
        return [rank for rank, flag in zip(self._ranks, flags, strict=bool(flags)) if flag]
