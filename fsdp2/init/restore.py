"""Restore tensors from a tape: run the operations that produced them again, and no others. Layer: init.

Entries run in their recorded order, on real tensors with the recorded strides, and with the default dtype and random
numbers of that time. So the results are bitwise what they would have been then. The memory of a cell is freed after its
last use. The default dtype and all generators are left unchanged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp2._torch import version
from fsdp2.errors import OrderError
from fsdp2.init.tape import Cell, Constant, Draw, Entry, Tape, Window, map_args
from fsdp2.runtime.tree import tensors_in

__all__ = ["drawing", "generator_state", "restore"]

_UNFILLED = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)

_Memory = dict[Cell, torch.UntypedStorage]


@torch.no_grad()
def restore(tape: Tape, windows: Sequence[Window], time: int) -> list[torch.Tensor]:
    """The contents of `windows` at `time`, as plain tensors on the devices of their cells. Those of one cell share
    memory. Memory that was never written holds zeros.

    Raises:
        OrderError: a tensor from outside that the recording read has changed since.
    """
    kept = {window.cell for window in windows}
    entries = tape.needed(kept, time)
    last_use = {cell: entry.time for entry in entries for cell in entry.cells}
    memory: _Memory = {}
    default_dtype = torch.get_default_dtype()
    try:
        for entry in entries:
            torch.set_default_dtype(entry.default_dtype)
            with drawing(entry.draw):
                _run(entry, memory)
            for cell in entry.cells - kept:
                if last_use[cell] == entry.time:
                    memory.pop(cell, None)
    finally:
        torch.set_default_dtype(default_dtype)
    return [_look(window, memory) for window in windows]


def _run(entry: Entry, memory: _Memory) -> None:
    def real(value: Window | Constant) -> torch.Tensor:
        if isinstance(value, Window):
            return _look(value, memory)
        _check_constant(value, entry)
        return value.tensor

    args, kwargs = map_args((Window, Constant), real, (entry.args, entry.kwargs))
    outputs = tensors_in(entry.op(*args, **kwargs))
    for output, window in zip(outputs, entry.results, strict=True):
        if window is not None:
            if getattr(entry.op, "overloadpacket", None) in _UNFILLED:
                output.zero_()
            _settle(output, window, memory)


def _look(window: Window, memory: _Memory) -> torch.Tensor:
    """The real tensor for `window`."""
    cell = window.cell
    if cell not in memory:  # the next entry writes all of it
        nbytes = cell.storage.nbytes()
        memory[cell] = torch.empty(nbytes, dtype=torch.uint8, device=cell.device).untyped_storage()
    tensor = torch.empty(0, dtype=window.dtype, device=cell.device)
    tensor.set_(memory[cell], window.offset, window.shape, window.stride)
    if window.is_conj:
        tensor = tensor.conj()
    return torch.Tensor.neg(tensor) if window.is_neg else tensor


def _settle(output: torch.Tensor, window: Window, memory: _Memory) -> None:
    """Make `output` the content of the window's cell, in place if it has the stand-in's strides and owns its memory."""
    storage = output.untyped_storage()
    as_said = (output.stride(), output.storage_offset()) == (window.stride, window.offset)
    is_own = all(storage is not other for other in memory.values())
    if as_said and is_own and storage.nbytes() == window.cell.storage.nbytes():
        memory[window.cell] = storage
    else:
        memory.pop(window.cell, None)
        _look(window, memory).copy_(output)


def _check_constant(constant: Constant, entry: Entry) -> None:
    if version(constant.tensor) != constant.version:
        raise OrderError(
            f"deferred: a tensor of shape {tuple(constant.tensor.shape)} that existed before the recording, and that "
            f"{entry.op} read in it, was changed in place since; its old values are needed to replay that. Pass a "
            "clone() of it to the model, or change it after replay."
        )


# --- random numbers ---------------------------------------------------------------------------------------------------


def generator_state(device: torch.device) -> torch.Tensor:
    """A copy of the state of the device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state


def _set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


@contextmanager
def drawing(draw: Draw | None) -> Iterator[None]:
    """Within this context, the device's default generator produces the numbers of `draw`; its state is restored after
    it."""
    if draw is None:
        yield
        return
    before: Any = generator_state(draw.device)
    state = draw.state
    if state is None:
        state = torch.Generator(draw.device).manual_seed(draw.seed).get_state()
    _set_generator_state(draw.device, state)
    try:
        yield
    finally:
        _set_generator_state(draw.device, before)
