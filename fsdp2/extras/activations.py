"""Keeps saved activations that exceed a budget in host memory between forward and backward. Layer: extras.

::

    forward    block 1 ----------> block 2 ----------> block 3 ...        compute
                   \\ save, copy 1      \\ save, copy 2     \\ saved, and stays    (the budget suffices for the rest)
                                        block 1's memory is free
    backward   block 3 ----------> block 2 ----------> block 1            compute
                   copy 2 back         copy 1 back

What autograd saves passes through torch's saved-tensor hooks. The activations of the first blocks are used last in
backward, so they are moved, as soon as they are saved. How many must move is known from the last iteration; in the
first iteration the oldest move when the budget is exceeded. If the budget sufficed for an iteration, the next one runs
without hooks, as long as its calls match those of the last one and so save as much.

Memory: a saved tensor belongs to the compute stream, which waits for the copy before it frees the tensor, at the end of
the next block. A tensor that comes back is allocated on the compute stream, and kept alive here until that stream waits
for the copy.

Source: https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp2._torch import base_of, version
from fsdp2._torch.shared import is_fake, storage_key
from fsdp2.errors import ArgumentError, MisuseError, OrderError
from fsdp2.extras.host_memory import host
from fsdp2.runtime.streams import streams_for
from fsdp2.runtime.tree import tensors_in


def offload_activations(
    blocks: Sequence[nn.Module], *, budget: int = 0, min_bytes: int = 1 << 16
) -> "ActivationOffload":
    """Keep what the blocks save for backward in host memory if it exceeds a budget. Results do not change.

    Copies overlap with compute, use page-locked memory, and are back one block before they are needed. If the budget
    suffices, nothing moves; then, from the second iteration on, saved tensors are not inspected until a block is called
    with other shapes or dtypes, in another mode, or more often. Parameters never move. On the CPU nothing moves.

    Checkpointed blocks save only their inputs, so only these move. The checkpoint must be inside the block's call
    (`fsdp2.parallel`, or a module that calls it), not around it.

    Args:
        blocks: modules in forward order, none inside another. `fully_shard` may come before or after.
        budget: bytes of saved activations that may stay on the device. Those of two more blocks are there while they
            are copied.
        min_bytes: smaller tensors stay on the device, and do not count.

    Returns:
        An object that counts the bytes moved; its ``remove()`` undoes the call.

    Raises:
        ArgumentError: no blocks, a block inside another, or a budget that is not a number of bytes.
        MisuseError: the activations of a block are offloaded already.
        OrderError: in backward: a saved tensor was changed in place after it was saved, an error in plain autograd too.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fsdp2.offload_activations(model.blocks, budget=8 << 30)
    """
    blocks = [*blocks]
    if not blocks or not all(isinstance(block, nn.Module) for block in blocks):
        raise ArgumentError(f"offload_activations: expected modules, got {blocks}")
    for name, value in (("budget", budget), ("min_bytes", min_bytes)):
        if type(value) is not int or value < 0:
            raise ArgumentError(f"offload_activations: {name}: expected a number of bytes, got {value!r}")
    inside = {module for block in blocks for module in block.modules() if module is not block}
    for index, block in enumerate(blocks):
        if block in inside:
            raise ArgumentError(f"offload_activations: block {index}, a {type(block).__name__}, is inside another")
        if block in _offloads:
            raise MisuseError(f"offload_activations: the activations of block {index} are offloaded already")
    return ActivationOffload(blocks, budget, min_bytes)


def calls_to_move(nbytes: Sequence[int], budget: int) -> list[bool]:
    """For each call of a block, in forward order, whether its activations move: the first ones do, until the rest fits
    into the budget.

    Args:
        nbytes: the bytes that each call saves.
    """
    left = [*accumulate(reversed(nbytes))][::-1]  # saved by a call and all later ones
    return [total > budget for total in left]


class ActivationOffload:
    """Moves the saved activations of some blocks; returned by `offload_activations`.

    Attributes:
        moved_bytes: bytes copied to the host in the current iteration.
        saved_bytes: bytes saved by the blocks in the current iteration, wherever they are.
    """

    def __init__(self, blocks: Sequence[nn.Module], budget: int, min_bytes: int):
        self.moved_bytes = 0
        self.saved_bytes = 0
        self._blocks = WeakSet(blocks)  # weak: dropping the model drops this object
        self._budget = budget
        self._min_bytes = min_bytes
        self._calls: list[_Call] = []
        self._moves: list[bool] = []  # planned from the last iteration
        self._known: list[_Call] = []  # of the last iteration, if the budget sufficed; empty after a different call
        self._is_backward = False
        self._arriving: list[_Saved] = []  # copies to the device that compute has not waited for
        self._leaving: list[_Call] = []  # calls whose tensors are being copied to the host
        for block in blocks:
            _offloads[block] = self
            if not isinstance(block, Offloading):
                kind: Any = type(block)
                block.__class__ = _offloading_class(kind)

    def remove(self) -> None:
        """Stop offloading. Not between forward and backward."""
        for block in self._blocks:
            _offloads.pop(block, None)

    # --- forward -----------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where the whole model is compiled
    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        """A block is called."""
        if self._is_backward or not any(call.is_alive for call in self._calls):  # or their graphs were dropped
            self._begin_iteration()
        index, signature = len(self._calls), _signature(block, args, kwargs)
        call = _Call(self, self._calls[-1] if self._calls else None, signature)
        call.moves = index < len(self._moves) and self._moves[index]
        if index < len(self._known) and self._known[index].signature == signature:
            call.nbytes, call.is_watched = self._known[index].nbytes, False
            self.saved_bytes += call.nbytes
        else:
            self._known = []
        self._calls.append(call)
        return call

    def _begin_iteration(self) -> None:
        nbytes = [call.nbytes for call in self._calls]
        self._moves = calls_to_move(nbytes, self._budget)
        self._known = self._calls if sum(nbytes) <= self._budget else []
        for call in self._leaving:
            call.free_moved()  # its microbatch's backward comes later
        self._calls, self._leaving, self._is_backward = [], [], False
        self.moved_bytes = self.saved_bytes = 0
        for saved in [*self._arriving]:
            self.arrived(saved)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, call: "_Call", result: Any) -> None:
        """A call is over: its saved bytes are known, and what the call before it moved can be freed."""
        if not call.is_watched:  # nor was any earlier call
            call.await_backward(result)
            return
        for earlier in self._leaving:
            earlier.free_moved()
        self._leaving = [call] if call.moves else []
        stay = [each for each in self._calls if not each.moves]
        total = sum(each.nbytes for each in stay)
        for each in stay:
            if total <= self._budget:
                break
            if each.is_watched:
                each.move()
                self._leaving.append(each)
                total -= each.nbytes

    def begin_backward(self) -> None:
        """Backward has reached a block."""
        self._is_backward = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled block runs it
    def save(self, call: "_Call", tensor: torch.Tensor) -> Any:
        """The pack hook: returns what autograd keeps instead of the tensor."""
        if type(tensor) is not torch.Tensor and (not is_fake(tensor) or isinstance(tensor, nn.Parameter)):
            return tensor
        base = base_of(tensor)
        is_of_param = base is not None and isinstance(base, nn.Parameter)
        if is_of_param or tensor.device == host() or tensor.nbytes < self._min_bytes:
            return tensor
        key = storage_key(tensor)
        saved = call.saved.get(key)
        if saved is None or saved.version != version(tensor):
            saved = call.saved[key] = _Saved(call, tensor)
            call.nbytes += tensor.nbytes
            self.saved_bytes += tensor.nbytes
            if call.moves:
                saved.move()
        return saved

    # --- backward ----------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load(self, saved: Any) -> torch.Tensor:
        """The unpack hook. The first one of a call starts to fetch the tensors of the call before it."""
        if not isinstance(saved, _Saved):
            assert isinstance(saved, torch.Tensor)
            return saved
        self.begin_backward()
        call = saved.call
        call.fetch()
        if call.before is not None:
            call.before.fetch()
        return saved.value()

    def arriving(self, saved: "_Saved") -> None:
        """A copy to the device has started."""
        self._arriving.append(saved)

    def arrived(self, saved: "_Saved") -> None:
        """Make compute wait for a copy to the device."""
        if saved in self._arriving:
            self._arriving.remove(saved)
            saved.wait()


class _Call:
    """One call of a block.

    Attributes:
        signature: equal for calls that save as much.
        nbytes: bytes saved in it.
        moves: whether they move to the host.
        is_watched: whether saved tensors pass through the hooks.
        before: the call before it in forward; None for the first, and when it is over.
        saved: the saved tensors that are still needed, by memory. The graph owns them.
    """

    def __init__(self, offload: ActivationOffload, before: "_Call | None", signature: Any):
        self.offload = offload
        self.before = before
        self.signature = signature
        self.nbytes = 0
        self.moves = False
        self.is_watched = True
        self.saved: WeakValueDictionary[Any, _Saved] = WeakValueDictionary()
        self._in_graph: ref[Any] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether backward may still reach it."""
        return bool(self.saved) or (self._in_graph is not None and self._in_graph() is not None)

    def await_backward(self, result: Any) -> None:
        """Without saved-tensor hooks: learn from the graph when backward begins, or that the graph was dropped."""
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                reached = _Reached(self.offload)
                tensor.grad_fn.register_prehook(reached)
                self._in_graph = ref(reached)
                return

    def move(self) -> None:
        """Move everything that was saved."""
        self.moves = True
        for saved in self.saved.values():
            saved.move()

    def free_moved(self) -> None:
        """Free the device memory of what has moved."""
        for saved in self.saved.values():
            saved.free()

    def fetch(self) -> None:
        """Start to copy everything back; only once."""
        if self.saved:
            saved, self.saved = self.saved, WeakValueDictionary()
            for each in saved.values():
                each.fetch()


class _Reached:
    """A hook on a node of the autograd graph, which owns it."""

    def __init__(self, offload: ActivationOffload):
        self._offload = offload

    def __call__(self, grads: Any) -> None:
        self._offload.begin_backward()


class _Saved:
    """A saved tensor, on the device, on the host, or on both.

    Attributes:
        call: the call that saved it.
        version: its version when it was saved.
    """

    def __init__(self, call: _Call, tensor: torch.Tensor):
        self.call = call
        self.version = version(tensor)
        self._tensor: torch.Tensor | None = tensor
        self._host: torch.Tensor | None = None
        self._done: torch.Event | None = None
        self._device = tensor.device

    def move(self) -> None:
        """Start to copy it to the host."""
        tensor = self._tensor
        if tensor is None or self._host is not None:
            return
        self.call.offload.moved_bytes += tensor.nbytes
        streams = streams_for(self._device)
        ready = streams.record()
        with torch.no_grad(), streams.copying():
            streams.wait(ready)
            self._host = torch.empty_like(tensor, device=host(), pin_memory=torch.accelerator.is_available())
            self._host.copy_(tensor, non_blocking=True)
            self._done = streams.record()

    def free(self) -> None:
        """Free it on the device, in the order of the compute stream."""
        if self._host is not None and self._tensor is not None:
            self._check()
            streams_for(self._device).wait(self._done)
            self._tensor = None

    def fetch(self) -> None:
        """Start to copy it to the device, if it is not there."""
        if self._host is None:
            return
        if self._tensor is not None:
            self.wait()  # its copy still reads it, and backward frees it
            return
        with torch.no_grad():
            self._tensor = torch.empty_like(self._host, device=self._device)
        streams = streams_for(self._device)
        ready = streams.record()
        with torch.no_grad(), streams.copying():
            streams.wait(ready)
            self._tensor.copy_(self._host, non_blocking=True)
            self._done = streams.record()
        self.version = version(self._tensor)
        self.call.offload.arriving(self)

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        streams_for(self._device).wait(self._done)

    def value(self) -> torch.Tensor:
        """The tensor, on the device. Still available to a second backward over the same graph."""
        assert self._tensor is not None
        self.call.offload.arrived(self)
        self._check()
        return self._tensor

    def _check(self) -> None:
        if self._tensor is not None and version(self._tensor) != self.version:
            raise OrderError(
                f"offload_activations: a tensor of shape {tuple(self._tensor.shape)} that backward needs was "
                f"changed in place after it was saved (version {version(self._tensor)}, expected {self.version}). Use "
                "the operation that makes a new tensor."
            )


_offloads: "WeakKeyDictionary[nn.Module, ActivationOffload]" = WeakKeyDictionary()


class Offloading(nn.Module):
    """A mixin that marks blocks whose activations are offloaded."""


def _signature(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Equal for calls that save as much."""
    tensors = [
        (value.shape, value.dtype, value.requires_grad, torch.is_autocast_enabled(value.device.type))
        for value in tensors_in((args, kwargs))
    ]
    return ref(block), block.training, tensors


@cache
def _offloading_class(cls: Any) -> Any:
    """A subclass whose calls run under the saved-tensor hooks."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        offload = _offloads.get(self)
        if offload is None or not torch.is_grad_enabled():
            return super(offloading, self).__call__(*args, **kwargs)
        begun = offload.begin(self, args, kwargs)
        hooks = saved_tensors_hooks(partial(offload.save, begun), offload.load) if begun.is_watched else nullcontext()
        with hooks:
            result = super(offloading, self).__call__(*args, **kwargs)
        offload.end(begun, result)
        return result

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__call__": call}
    offloading: Any = type(cls.__name__, (Offloading, cls), names)
    return offloading
