"""The staging of a save (`fsdp2.checkpoint`), with an arena in host memory, which a thread of the host reads next."""

from collections.abc import Sequence

import pytest
import torch

from fsdp2.checkpoint.io.planned_files import Piece
from fsdp2.checkpoint.run import background
from fsdp2.placement.box import whole
from tests.instruments.races.detector import Detector

__all__ = ["staged"]


def staged(values: Sequence[torch.Tensor], look: Detector | None) -> list[torch.Tensor]:
    """What the writing thread sees of these fp32 tensors."""
    pieces = [Piece("", "F32", whole(each.shape), each, tuple(each.shape)) for each in values]
    if look is None:
        copies, _ = background.stage({"model": pieces}, [])
        return [piece.values.clone() for piece in copies["model"]]

    def new_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        look.give_to_host(buffer)
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "new_buffer", new_buffer)
        patch.setattr(background, "wait_for", lambda devices: look.streams.record().synchronize())
        copies, _ = background.stage({"model": pieces}, [])
    return [piece.values.clone() for piece in copies["model"]]
