"""The random values that one process would generate, restricted to what this rank owns. Layer: init.

One process draws a tensor's values from its generator one after the other, in memory order. Here every rank draws all
of them, in spans of bounded size, and keeps its own, so its generator ends in the same state as on one process. This
requires that several draws with n values in total give the same values as one draw. On the CPU this holds for every
operation if the pieces follow three rules (measured, and tested again before each use):

* `normal_` works in blocks of 16, so pieces start at multiples of 16;
* it draws the last 16 values again if the number of values is not a multiple of 16, so the last piece has at least 16;
* it uses another code path (with other values) for tensors with gaps or permuted dims, so pieces have them too.

Otherwise (on accelerators, and for `bernoulli_` and `exponential_` where torch leaves them to MKL) every rank draws the
whole tensor and frees it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from fsdp2.layout import strides
from fsdp2.placement.box import Box, boxes_of_flat_range

__all__ = ["SPAN_NUMEL", "Draw", "Target", "fill_sequential", "fill_span", "own_views", "spans"]

SPAN_NUMEL = 1 << 18  # values drawn at a time: 1 MiB of float32, which stays in the cache
BLOCK_NUMEL = 16  # of `normal_`
PROBE_NUMEL = 5 * BLOCK_NUMEL + 3

# Fills the first tensor. The second holds the values of the operation's tensor argument, if it has one.
Draw = Callable[[torch.Tensor, torch.Tensor | None, torch.Generator | None], object]


@dataclass(frozen=True)
class Target:
    """This rank's part of the tensor to fill.

    Attributes:
        local: this rank's elements.
        box: their place in the whole tensor.
        shape, stride: those of the whole tensor on one process.
        operand: this rank's elements of a tensor argument (the probabilities of `bernoulli_`), in the shape of `local`.
    """

    local: torch.Tensor
    box: Box
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    operand: torch.Tensor | None = None

    def permuted(self, order: list[int]) -> "Target":
        """The same elements of the tensor with permuted dims."""
        start, part, shape, stride = (
            tuple(numbers[dim] for dim in order) for numbers in (*self.box, self.shape, self.stride)
        )
        operand = None if self.operand is None else self.operand.permute(order)
        return Target(self.local.permute(order), Box(start, part), shape, stride, operand)


def fill_sequential(target: Target, draw: Draw, generator: torch.Generator | None) -> None:
    """Fill ``target.local``, and advance the generator as one process would. No communication.

    Args:
        draw: the operation, for a tensor of any shape on the device of the target.
        generator: None for the default generator of that device.
    """
    if target.box.shape == target.shape and target.local.stride() == target.stride:
        draw(target.local, target.operand, generator)
        return
    numel, dense = prod(target.shape), _is_contiguous(target.shape, target.stride)
    size = SPAN_NUMEL if numel >= SPAN_NUMEL + BLOCK_NUMEL and _may_split(target, draw, dense) else numel
    scratch = _scratch(min(numel, size + BLOCK_NUMEL), target.local, dense)
    in_memory_order = target.permuted(sorted(range(len(target.shape)), key=lambda dim: -target.stride[dim]))
    for start, stop in spans(numel, size, BLOCK_NUMEL):
        fill_span(in_memory_order, draw, generator, scratch[: stop - start], start)


def fill_span(target: Target, draw: Draw, generator: torch.Generator | None, piece: torch.Tensor, start: int) -> None:
    """Draw the elements of the whole tensor from `start` on into `piece`, and keep those of this rank."""
    operand = None
    if target.operand is not None:
        operand = torch.full_like(piece, 0.5, dtype=target.operand.dtype)
        for view, here in own_views(target, operand, start):
            view.copy_(target.operand[here])
    draw(piece, operand, generator)
    for view, here in own_views(target, piece, start):
        target.local[here].copy_(view)


def own_views(target: Target, values: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
    """Views of this rank's elements in `values`, which has those of the whole tensor from `start` on; and their places
    in ``target.local``."""
    at = 0
    for box in boxes_of_flat_range(target.shape, start, start + values.numel()):
        common = box.intersect(target.box)
        if common is not None:
            view = values[at : at + box.numel].view(box.shape)[common.within(box).slices()]
            yield view, common.within(target.box).slices()
        at += box.numel


def spans(numel: int, size: int, least: int) -> Iterator[tuple[int, int]]:
    """`range(numel)` in spans of `size`. The last one may be longer or shorter, but is not shorter than `least` (unless
    `numel` is)."""
    start = 0
    while start < numel:
        stop = start + size if numel - start - size >= least else numel
        yield start, stop
        start = stop


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """As `Tensor.is_contiguous`: the strides of dims of size 1, and of empty tensors, do not matter."""
    if prod(shape) == 0:
        return True
    return all(size == 1 or got == wanted for size, got, wanted in zip(shape, stride, strides(shape), strict=True))


def _scratch(numel: int, like: torch.Tensor, dense: bool) -> torch.Tensor:
    """A 1-D tensor. If not `dense`, it has a gap after each element, so that torch uses the same code path as for the
    whole tensor."""
    if dense:
        return like.new_empty(numel)
    return like.new_empty(2 * numel)[::2]


def _may_split(target: Target, draw: Draw, dense: bool) -> bool:
    """Whether pieces give the same values as the whole. Draws some values both ways from a new generator."""
    device = target.local.device
    if device.type != "cpu":
        return False  # on accelerators a value depends on the launch size
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
