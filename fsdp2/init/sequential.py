"""The random values that one process would have made, cut to what this rank owns. Layer: init.

One process draws a tensor's values from its generator one after the other, in the order of the tensor's memory. Here
every rank draws all of them, in spans of bounded size, keeps its own, and so leaves its generator where that of the
one process stands. What one draw of n values gives, several of n values together give as well: for the CPU's generator
that is so of every operation if the pieces keep to three rules (measured, and asked again before it is relied on):

* `normal_` works in blocks of 16, so pieces start at multiples of 16;
* it draws the last 16 values again if their number is no multiple of 16, so the last piece has 16 values at least;
* it takes another way (and gives other values) for tensors with gaps or another order of dims: so do the pieces.

Where it is not so (on accelerators, and for `bernoulli_` and `exponential_` where torch leaves them to MKL) the tensor
is drawn whole, on every rank, and freed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from fsdp2.init.owned import Owned, boxes, spans
from fsdp2.layout import strides

__all__ = ["SPAN_NUMEL", "Draw", "Target", "fill_sequential"]

SPAN_NUMEL = 1 << 18  # values drawn at a time: 1 MiB of float32, which stays in the cache
BLOCK_NUMEL = 16  # of `normal_`
PROBE_NUMEL = 5 * BLOCK_NUMEL + 3

# Fills the first tensor; the second has the values of the operation's tensor argument, where it has one.
Draw = Callable[[torch.Tensor, torch.Tensor | None, torch.Generator | None], object]


@dataclass(frozen=True)
class Target:
    """The tensor to fill, as this rank has it.

    Attributes:
        local: this rank's elements.
        owned: which those are, of the whole tensor.
        stride: of the whole tensor, as one process would have it.
        operand: of the shape of `local`: this rank's elements of a tensor argument (the probabilities of `bernoulli_`).
    """

    local: torch.Tensor
    owned: Owned
    stride: tuple[int, ...]
    operand: torch.Tensor | None = None


def fill_sequential(target: Target, draw: Draw, generator: torch.Generator | None) -> None:
    """Fill ``target.local``, and advance the generator as one process would. No communication.

    Args:
        draw: the operation, for a tensor of any shape on the device of the target.
        generator: None for the default one of that device.
    """
    shape = target.owned.shape
    if target.owned.is_whole and target.local.stride() == target.stride:
        draw(target.local, target.operand, generator)
        return
    order = sorted(range(len(shape)), key=lambda dim: -target.stride[dim])
    local = target.local.permute(order)
    operand = None if target.operand is None else target.operand.permute(order)
    owned = target.owned.permuted(order)
    numel = prod(shape)
    dense = _is_contiguous(shape, target.stride)
    size = SPAN_NUMEL if numel >= SPAN_NUMEL + BLOCK_NUMEL and _may_split(target, draw, dense) else numel
    scratch = _scratch(min(numel, size + BLOCK_NUMEL), local, dense)
    for start, stop in spans(numel, size, BLOCK_NUMEL):
        piece = scratch[: stop - start]
        of_operand = None if operand is None else torch.full_like(piece, 0.5, dtype=operand.dtype)
        if operand is not None and of_operand is not None:
            for wide, narrow in _own_parts(of_operand, operand, owned, start, stop):
                wide.copy_(narrow)
        draw(piece, of_operand, generator)
        for wide, narrow in _own_parts(piece, local, owned, start, stop):
            narrow.copy_(wide)


def _own_parts(
    piece: torch.Tensor, local: torch.Tensor, owned: Owned, start: int, stop: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of what this rank owns of the values `start` to `stop`: in `piece`, which has these, and in `local`."""
    result = []
    at = 0
    for box in boxes(owned.shape, start, stop):
        sizes = [high - low for low, high in box]
        view = piece[at : at + prod(sizes)].view(sizes)
        at += prod(sizes)
        result += [(view[there], local[here]) for there, here in owned.within(box)]
    return result


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """As `Tensor.is_contiguous` says: strides of dims of size 1, and of empty tensors, do not matter."""
    if prod(shape) == 0:
        return True
    return all(size == 1 or got == wanted for size, got, wanted in zip(shape, stride, strides(shape), strict=True))


def _scratch(numel: int, like: torch.Tensor, dense: bool) -> torch.Tensor:
    """1-D; with a gap after each element if not dense, so that torch takes the way that it takes for the whole."""
    if dense:
        return like.new_empty(numel)
    return like.new_empty(2 * numel)[::2]


def _may_split(target: Target, draw: Draw, dense: bool) -> bool:
    """Whether pieces give what the whole would, by drawing some values both ways from a generator of our own."""
    device = target.local.device
    if device.type != "cpu":
        return False  # there a value depends on the size of the launch
    drawn = []
    states = []
    for size in (PROBE_NUMEL, BLOCK_NUMEL):
        generator = torch.Generator(device).manual_seed(0)
        values = _scratch(PROBE_NUMEL, target.local, dense)
        operand = None if target.operand is None else torch.full_like(values, 0.5, dtype=target.operand.dtype)
        for start, stop in spans(PROBE_NUMEL, size, BLOCK_NUMEL):
            draw(values[start:stop], None if operand is None else operand[start:stop], generator)
        drawn.append(values)
        states.append(generator.get_state())
    return torch.equal(drawn[0], drawn[1]) and torch.equal(states[0], states[1])
