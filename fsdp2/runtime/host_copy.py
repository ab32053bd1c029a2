"""`HostCopy`: a group's frozen parameters as they were gathered, in host memory. Layer: runtime, below the param group.

Filled behind the first gather and copied from in place of the later ones, both on the all-gather stream, which alone
touches the memory; so neither the host nor compute waits for it.
"""

from collections.abc import Sequence

import torch

from fsdp2.policies import HOST_MEMORY
from fsdp2.runtime.parameter import ManagedParameter


class HostCopy:
    """The whole values of `params`, which are gathered and plain, in the compute dtype; page-locked beside an
    accelerator. `versions` are those of the sharded parameters that were gathered."""

    def __init__(self, params: Sequence[ManagedParameter], versions: list[int]):
        self.versions = versions
        with torch.inference_mode(False), torch.no_grad():
            self._flats = []
            for whole in _wholes(params):
                pins = whole.device.type != "cpu"
                flat = torch.empty(whole.numel(), dtype=whole.dtype, device=HOST_MEMORY[-1], pin_memory=pins)
                self._flats.append(flat.copy_(whole, non_blocking=True))

    @property
    def nbytes(self) -> int:
        """How much host memory it takes."""
        return sum(flat.nbytes for flat in self._flats)

    def copy_to(self, params: Sequence[ManagedParameter]) -> None:
        """Fill the unsharded parameters, whose memory is allocated."""
        for whole, flat in zip(_wholes(params), self._flats, strict=True):
            whole.copy_(flat, non_blocking=True)


def _wholes(params: Sequence[ManagedParameter]) -> list[torch.Tensor]:
    wholes = [param.whole for param in params]
    return [whole.view(-1) for whole in wholes if whole is not None]
