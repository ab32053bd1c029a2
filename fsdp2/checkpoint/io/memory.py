"""The bytes of tensors, as buffers for reading, writing and hashing. Layer: checkpoint."""

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from fsdp2.disk.direct import memory_at
from fsdp2.placement.box import Box, boxes_of_flat_range, whole

__all__ = ["blocks_of", "bytes_of", "is_plain_memory", "is_wrapper", "new_buffer", "part_of", "uncollected", "wait_for"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. (Tensors lack the buffer protocol, and NumPy lacks bfloat16.) The caller
    keeps the tensor alive while the view is in use."""
    assert is_plain_memory(tensor)
    size = tensor.numel() * tensor.element_size()
    return memory_at(tensor.data_ptr(), size) if size else memoryview(bytearray())


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous memory that the CPU can access."""
    if is_wrapper(tensor):
        return False
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own, because it consists of other tensors or is in a file."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def new_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory for copies: pinned if that makes copies of `device` faster."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type not in ("cpu", "meta"))


def blocks_of(values: torch.Tensor, first: int, last: int, block: int) -> Iterator[tuple[memoryview, bool]]:
    """Bytes ``first..last`` of a tensor's values, row by row, in pieces of `block` bytes (the last one shorter).

    Yields:
        (the bytes, whether they stay valid). Blocks of plain memory are views. Blocks of other tensors (on an
        accelerator, transposed) share one buffer, which the next block overwrites.
    """
    itemsize = values.element_size()
    if is_plain_memory(values):
        flat = bytes_of(values)
        for start in range(first, last, block):
            yield flat[start : min(start + block, last)], True
        return
    buffer = new_buffer(min(block, last - first), values.device)
    for start in range(first, last, block):
        end = min(start + block, last)
        host, filled = buffer[: end - start].view(values.dtype), 0
        for box in boxes_of_flat_range(values.shape, start // itemsize, end // itemsize):
            host[filled : filled + box.numel].view(box.shape).copy_(part_of(values, box))
            filled += box.numel
        yield bytes_of(host), False


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until everything issued on the current streams of these devices is done. Other threads use these tensors
    next, on streams of their own."""
    for device in devices:
        if device.type not in ("cpu", "meta"):
            # Not `Event.record()`, which uses the stream of the current device: device 0 in other threads.
            torch.accelerator.current_stream(device).record_event().synchronize()


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box of a tensor."""
    return tensor if box == whole(tensor.shape) else tensor[box.slices()]


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector within; also a decorator. Plans of thousands of tensors are many small
    objects without cycles, and the collector traverses the whole process each time their number has grown by a quarter.

    Only in the main thread: another thread could change the setting at the same time.
    """
    pauses = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
