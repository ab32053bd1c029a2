"""Ranks that share one GPU over NCCL; see `benchmarks.gpu.groups.share_gpu`."""

from __future__ import annotations

import os

import fsdp2.comm
from benchmarks.gpu import groups
from tests.gpu import ranks

__all__ = ["BACKENDS", "register"]

BACKENDS = "cpu:gloo,cuda:nccl"


def register() -> None:
    """As that of `tests.gpu.ranks`; besides, weights are operands themselves and biases are packed."""
    groups.share_gpu()
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torch's watchdog would end a process before its message
    ranks.register()
    from tests.instruments.device.training import Coalesced

    fsdp2.comm.COMMS["nccl"] = Coalesced()
