"""Ranks that share one GPU over NCCL (see `benchmarks.gpu.groups.share_gpu`), for what `tests/instruments/device/` does
on ranks with a lagging device each. Arithmetic is the GPU's, so values are near those of the CPU instead of equal."""

import os

import torch

import fsdp2.comm
from benchmarks.gpu import groups
from tests.instruments.device import lagging, ranks

__all__ = ["BACKENDS", "assert_near", "register"]

BACKENDS = "cpu:gloo,cuda:nccl"


def register() -> None:
    """Let `tests/instruments/device` train on the GPU, where weights are operands themselves and biases are packed.

    Call it before its other modules are imported.
    """
    groups.share_gpu()
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torch's watchdog would end a process before its message
    groups.take_gpu()
    ranks.DEVICE = "cuda"
    lagging.counts, lagging.occupy, lagging.set_delays = _counts, groups.occupy, _no_delays
    from tests.instruments.device import steps

    steps.assert_same = assert_near
    from tests.instruments.device.training import Coalesced

    fsdp2.comm.COMMS["nccl"] = Coalesced()


def _counts() -> dict[str, int]:
    return {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}


def _no_delays(seed: int, max_us: int = 300) -> None:
    torch.accelerator.synchronize()


def assert_near(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-3) -> None:
    """Each tensor is, by its norm. What is stale or lost is far: each step changes a parameter by some percent.

    Where there are tensors of 16 bits, a fifth of the norm is allowed, by which what is lost may not be seen: bf16 is
    rounded otherwise there, and AdamW's first steps have the size of its learning rate however small a gradient is.
    """
    if any(each.dtype.itemsize == 2 for each in expected):
        tolerance = 0.2
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        difference = (left.double() - right.double()).norm().item()
        limit = tolerance * right.double().norm().item() + 1e-6
        assert difference <= limit, f"number {number}: {left} is not {right}, by {difference}"
