"""A rank's part of a tensor, with its place in the whole. Layer: checkpoint."""

from typing import NamedTuple

import torch

from fsdp2.checkpoint.schema.dtypes import name_of
from fsdp2.errors import ArgumentError
from fsdp2.placement.box import Box
from fsdp2.placement.tiling import Tiling

__all__ = ["Entry"]


class Entry(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: a plain tensor.
        tiling: how the whole tensor is cut, in ranks of the `World`.
        box: the part that `local` holds.
        outside: the user's tensor.
        copy: this rank's index in the tensor's mesh, if the mesh is assumed to be one of several with equal values.
    """

    name: str
    local: torch.Tensor
    tiling: Tiling
    box: Box
    outside: torch.Tensor
    copy: int | None = None

    @property
    def dtype(self) -> str:
        """Its name in safetensors."""
        name = name_of(self.local.dtype)
        if name is None:
            raise ArgumentError(f"'{self.name}': safetensors has no dtype for {self.local.dtype}; convert the tensor")
        return name
