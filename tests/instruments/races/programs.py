"""Programs for the detector: what the lagging device trains (`device/training.py`), but on the CPU; and trainings with
memory of the detector's.

`run` runs one, under the detector or without it. What it returns must not depend on that.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import Tensor

import fsdp2.comm
from fsdp2.comm import gloo
from fsdp2.comm.flat import NcclComm
from fsdp2.comm.gloo import GlooComm
from tests.instruments.device import training
from tests.instruments.device.training import FEATURES, ON_FOUR, Feature, sharded, train
from tests.instruments.races.detector import Detector, detecting
from tests.instruments.races.nets import Look
from tests.instruments.races.programs_of_offload import OF_OFFLOAD

__all__ = ["PROGRAMS", "num_ranks", "run"]

Program = tuple[int, Callable[[int, Look], list[Tensor]]]  # how many ranks, and what they do


class OverNccl(NcclComm):
    """The calls for NCCL, on gloo, which has no average and needs no large operands."""

    direct_min_bytes = 256
    has_average = False


def of(ranks: int, feature: Feature) -> Program:
    """Training with this feature."""

    def program(rank: int, look: Look) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if feature.coalesced:
                patch.setitem(fsdp2.comm.COMMS, "gloo", OverNccl())
            if look is not None:
                patch.setattr(training, "side_stream", lambda device: SideStream(look))
                patch.setattr(training, "record", lambda device: look.streams.record())
            return train(sharded(feature, "cpu", dist.get_world_size()), feature, "cpu", rank)

    return ranks, program


def is_the_same(feature: Feature) -> bool:
    """Whether the CPU does what a device would do."""
    return feature.on_device is None and "offload_policy" not in feature.options


class SideStream:
    """A stream of the user's."""

    def __init__(self, look: Detector):
        self._on = lambda: look.streams.on("side")
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._on())

    def __exit__(self, *_: object) -> None:
        self._stack.close()


PROGRAMS: dict[str, Program] = {
    **{name: of(2, feature) for name, feature in FEATURES.items() if is_the_same(feature)},
    **{name: of(4, feature) for name, feature in ON_FOUR.items() if is_the_same(feature)},
    "stage 0 on four": of(4, FEATURES["stage 0"]),  # an all-reduce that is a reduce-scatter and a gather
    "16 bits on the wire, coalesced": of(2, replace(FEATURES["16 bits on the wire"], coalesced=True)),
    "prefetched, checkpointed": of(2, replace(FEATURES["prefetched"], reentrant=False)),
    "predicted, evaluated": of(2, replace(FEATURES["predicted"], evaluates=True)),
    **OF_OFFLOAD,
}


def num_ranks(name: str) -> int:
    """How many ranks a program needs."""
    return PROGRAMS[name][0]


def run(name: str, rank: int, look: bool) -> list[Tensor]:
    """Run a program on this rank.

    Raises:
        AssertionError: the detector found races.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooComm, "direct_min_bytes", 256)
        patch.setattr(gloo, "_WHOLE_BYTES", 1024)
        if not look:
            return PROGRAMS[name][1](rank, None)
        with detecting() as detector:
            return PROGRAMS[name][1](rank, detector)
