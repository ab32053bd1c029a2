"""`Geometry`: the memory layout of one parameter and how it is split over the ranks. Layer: runtime, below the
parameter.

Internally a tensor's dims are in *memory order*, so that everything is contiguous, and a shard of the outermost dim is
one block of memory even if the user's strides are different (channels_last).
"""

import torch
from torch import nn

from fsdp2.layout import ShardLayout, memory_order
from fsdp2.mesh import MeshRoles


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a local tensor is of a subclass: only its own operators may access its memory."""
    return type(tensor) not in (torch.Tensor, nn.Parameter)


class Geometry:
    """The memory layout of one parameter on this rank. `data` is the whole parameter, to be sharded on its `dim`.

    Attributes:
        layout: how it is split over the shard axis, dims in memory order. A scalar has shape ``(1,)``.
        outer: with sharded replicas, how this rank's piece is split again; otherwise None.
        local: the layout of the sharded parameter, and the index in it of this rank's piece (`local_numel` elements).
        as_is: the user's dims are already in memory order.
    """

    def __init__(self, data: torch.Tensor, dim: int, roles: MeshRoles):
        self._order = memory_order(data.shape, data.stride())
        self._back = [self._order.index(each) for each in range(data.ndim)]
        self.as_is = self._order == tuple(range(data.ndim)) and data.ndim > 0
        shape = tuple(data.shape[each] for each in self._order)
        dim = self._order.index(dim) if shape else 0
        self.layout = ShardLayout(shape or (1,), dim, roles.shard_size)
        self._shard_rank = roles.shard_rank
        self.outer: ShardLayout | None = None
        self.local = self.layout, roles.shard_rank
        if roles.sharded_replicas:
            self.outer = ShardLayout(self.layout.local_shape(roles.shard_rank), dim, roles.replicate_size)
            self.local = self.outer, roles.replicate.rank
        layout, rank = self.local
        self.local_numel = layout.local_numel(rank)
        seen = self.from_memory(torch.empty(layout.local_shape(rank), device="meta"))
        self.view = tuple(seen.shape), seen.stride()

    def to_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of a tensor with the user's dims: dims in memory order."""
        if self.as_is:
            return tensor
        return tensor.permute(self._order) if self._order else tensor.view(1)

    def from_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reverse of `to_memory`."""
        if self.as_is:
            return tensor
        return tensor.permute(self._back) if self._order else tensor.view(())

    def local_view(self, flat: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The local piece with the user's dims, from element `offset` in the storage of `flat` (1-D). One call instead
        of three (slice, view, permute), because it runs for each gradient in each step."""
        shape, stride = self.view
        return flat.as_strided(shape, stride, offset)

    def cut(self, data: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the whole parameter, dims in memory order."""
        dim, rank = self.layout.dim, self._shard_rank
        if is_wrapper(data):  # tensor subclasses support chunk rather than narrow
            chunks = torch.chunk(data, self.layout.parts, dim)
            return chunks[rank] if rank < len(chunks) else data.narrow(dim, 0, 0)
        piece = self.to_memory(data).narrow(dim, self.layout.bounds[rank], self.layout.local_size(rank))
        if self.outer is not None:
            outer, rank = self.local
            piece = piece.narrow(dim, outer.bounds[rank], outer.local_size(rank))
        return piece
