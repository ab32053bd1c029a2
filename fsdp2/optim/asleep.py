"""`asleep`: moves a model's shards, gradients and optimizer state to host memory or files, so that other work can use
the device. Layer: optim.

::

    awake     | shards | gradients | optimizer state |  on the device
    asleep    the same tensors, on (page-locked) host memory or mapped files; nothing of the model is on the device

Parameters, gradients and the optimizer stay the same objects; a DTensor gets another local tensor.

`wake(overlap=True)` copies while the next forward runs::

    current stream    | allocate | gather of unit 0, compute ... | gather of unit 1, compute ...        | step
    copies                       | unit 0 | unit 1 | ... | optimizer state |
                                          ^ the gather waits for its unit's copy, the step for the copy of all state
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2._torch import backward_is_running, local_tensor, set_local_tensor, spec_of
from fsdp2.disk import mapped
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.extras.host_memory import host
from fsdp2.optim.local import LocalOptimizer
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.root import units_below
from fsdp2.runtime.state import Stage
from fsdp2.runtime.streams import Streams, streams_for
from fsdp2.runtime.unit import Unit

KINDS = ("weights", "gradients", "optimizer", "buffers")
_Back = Callable[[bool], None]  # moves something back; with the argument `overlap`
_sleeping: "WeakKeyDictionary[nn.Module, list[_Back]]" = WeakKeyDictionary()


@contextmanager
def asleep(
    model: nn.Module, *optimizers: torch.optim.Optimizer, keep: Sequence[str] = (), folder: str | None = None
) -> Iterator[None]:
    """Within this context nothing of the model is on the device. See `sleep`.

    Example::

        with fsdp2.asleep(model, optimizer):
            engine.generate(...)  # has the memory
    """
    sleep(model, *optimizers, keep=keep, folder=folder)
    try:
        yield
    finally:
        wake(model)


def sleep(
    model: nn.Module, *optimizers: torch.optim.Optimizer, keep: Sequence[str] = (), folder: str | None = None
) -> None:
    """Move everything that the model has on the device to host memory, until `wake`. No communication. Call it between
    two steps.

    Parameters, gradients, optimizers and their state stay the same objects. State dicts, checkpoints and
    `fsdp2.weights` work while the model is asleep; a forward or an optimizer step raises.

    Args:
        model: a model with units; offloaded shards stay where they are.
        optimizers: optimizers whose state is moved too.
        keep: what stays on the device: any of "weights", "gradients", "optimizer", "buffers".
        folder: move to files in this folder instead of page-locked memory.

    Raises:
        ArgumentError: `keep` has another word; nothing in `model` is sharded.
        OrderError: the model is asleep already; called in forward or backward; or there are unreduced gradients.
    """
    wrong = [each for each in keep if each not in KINDS]
    if wrong:
        raise ArgumentError(f"sleep: expected keep to have some of {KINDS}, got {wrong[0]!r}")
    units = units_below(model)
    if not units:
        raise ArgumentError("sleep: expected a model in which fully_shard was called, got one without units")
    _check(model, units)
    place = partial(_in_files, folder) if folder is not None else _in_host_memory
    back: list[_Back] = []
    streams = streams_for(units[0].device)
    with streams.copying():
        last = streams.record()
    streams.wait(last)  # the copies of a wake that no step has followed
    for unit in units:
        unit.reshard_all()
        for group in unit.groups:
            if "weights" not in keep:
                back.append(_put_shards(group, place))
            if "gradients" not in keep:
                grads = [param.sharded.grad for param in group.params if param.sharded.grad is not None]
                back += [partial(_at_once, _put_tensor(grad, place)) for grad in grads]
        if unit.step is not None:
            unit.step.memory.free_all()
    if "optimizer" not in keep:
        for optimizer in optimizers:
            if isinstance(optimizer, LocalOptimizer):
                optimizer.flats = None  # they are on the memory that the state leaves
            back += [_put_state(state, place) for state in optimizer.state.values()]
            refuse = optimizer.register_step_pre_hook(_refuse_step)
            back.append(partial(_wake_optimizer, optimizer, refuse, units[0].device))
    if "buffers" not in keep:
        managed = {id(param.sharded) for unit in units for param in unit.params}
        own = [each for each in (*model.buffers(), *model.parameters()) if id(each) not in managed]
        back += [partial(_at_once, _put_tensor(each, place)) for each in own]
    _sleeping[model] = back


def wake(model: nn.Module, *, overlap: bool = False) -> None:
    """Move back what `sleep` has moved. No communication. The host does not wait for the copies.

    Args:
        overlap: copy weights and optimizer state on a separate stream while the next forward runs: a unit's gather
            waits for its weights, and the optimizer's step for its state. Anything else that reads weights or state,
            such as ``param.full_tensor()``, must come after that forward or that step. False: copy on the current
            stream, so that work issued there next sees the values.

    Raises:
        OrderError: the model is not asleep.
    """
    if model not in _sleeping:
        raise OrderError("wake: this model is not asleep; call fsdp2.sleep(model) first")
    for each in _sleeping.pop(model):
        each(overlap)


def _check(model: nn.Module, units: Sequence[Unit]) -> None:
    if model in _sleeping:
        raise OrderError("sleep: this model is asleep already; call fsdp2.wake(model) first")
    for unit in units:
        in_forward = unit.step is not None and unit.step.order is not None
        if in_forward or backward_is_running() or unit.state.stage is not Stage.IDLE:
            raise OrderError(f"sleep: unit '{unit.name}' is in a forward or backward; call it between two steps")
        for group in unit.groups:
            waiting = [p.fqn for p in group.params if p.unsharded is not None and p.unsharded.grad is not None]
            if waiting or group.gradients.partials:
                raise OrderError(
                    f"sleep: gradients of unit '{unit.name}' wait to be reduced: {waiting or 'over the replicas'}. Run "
                    "the last backward of the step first."
                )


# --- places -----------------------------------------------------------------------------------------------------------


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Host memory for a copy of it; None if it is in host memory already."""
    if tensor.device == host() or tensor.is_meta:
        return None
    return torch.empty_like(tensor, device=host(), pin_memory=tensor.device.type != "cpu")


def _in_files(folder: str, tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_meta or mapped.file_of(tensor) is not None or not tensor.is_contiguous():
        return None
    return mapped.zeros(tensor.numel(), tensor.dtype, (folder,)).view(tensor.shape)


_Place = Callable[[torch.Tensor], torch.Tensor | None]


def _put_shards(group: Bucket, place: _Place) -> _Back:
    """Move the shards of a group."""
    moved: list[tuple[Any, torch.Tensor]] = []
    group.settle()
    with torch.inference_mode(False), torch.no_grad():
        for param in group.params:
            if (
                param.at_rest is None
                or is_wrapper(local_tensor(param.sharded))
                or param.flat.device != group.roles.device
            ):
                continue
            new = place(param.flat)
            if new is not None:
                moved.append((param, new.copy_(param.flat)))
        _give(moved)
    _follow(group)
    refuse = partial(_refuse_gather, group)
    group.changing.append(refuse)
    return partial(_wake_shards, group, moved, refuse)


def _give(moved: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Give the parameters these flat tensors."""
    for param, flat in moved:
        param.flat = flat
        set_local_tensor(param.sharded, param.geometry.local_view(flat), param.plan.specs.sharded(flat.dtype))


def _follow(group: Bucket) -> None:
    """Drop the group's references to the previous tensors."""
    group.refresh()
    group.channel_changed()


def _wake_shards(group: Bucket, moved: Sequence[tuple[Any, torch.Tensor]], refuse: Any, overlap: bool) -> None:
    group.changing.remove(refuse)
    streams = streams_for(group.roles.device)
    with torch.inference_mode(False), torch.no_grad():
        _give([(param, torch.empty_like(flat, device=group.roles.device)) for param, flat in moved])
        group.lay_together()
        with _on_copy_stream(streams, overlap):
            for param, flat in moved:
                param.flat.copy_(flat, non_blocking=flat.is_pinned())
            copied = streams.record()
    _follow(group)
    if overlap and copied is not None:
        group.changing.append(_Arriving(group, streams, copied))


@contextmanager
def _on_copy_stream(streams: Streams, overlap: bool) -> Iterator[None]:
    """Run a block on the copy stream, after the current stream: the block writes to memory that was allocated there,
    whose previous content may still be in use. The host allocator keeps page-locked memory until it has been read."""
    if not overlap:
        yield
        return
    free = streams.record()
    with streams.copying():
        streams.wait(free)
        yield


class _Arriving:
    """Makes users of the shards wait for their copy."""

    def __init__(self, group: Bucket, streams: Streams, copied: Any):
        self._group, self._streams, self._copied = group, streams, copied
        self._is_gathered = False

    def __call__(self, is_gather: bool) -> None:
        self._streams.wait(self._copied)
        # Compute waits for each gather, so at the second one everything has waited.
        if self._is_gathered or not is_gather:
            self._group.changing.remove(self)
        self._is_gathered = True


def _refuse_gather(group: Bucket, is_gather: bool) -> None:
    if is_gather:
        raise OrderError(f"unit '{group.channel.fqn or '(root)'}' is asleep: call fsdp2.wake(model) before a forward")


def _refuse_step(*_: object) -> None:
    raise OrderError("the optimizer's state is asleep: call fsdp2.wake(model) before a step")


def _put_tensor(tensor: torch.Tensor, place: _Place) -> _Back:
    """Move a gradient, a buffer or another tensor."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    new = None if is_wrapper(local) else place(local.detach())
    if new is None:
        return _nothing
    device = local.device
    _replace(tensor, new.copy_(local.detach()))
    return partial(_wake_tensor, tensor, device)


def _replace(tensor: torch.Tensor, local: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        set_local_tensor(tensor, local, spec_of(tensor))
    else:
        tensor.data = local


def _wake_tensor(tensor: torch.Tensor, device: torch.device, overlap: bool) -> None:
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    with torch.inference_mode(False), torch.no_grad():
        new = torch.empty_like(local, device=device)
        with _on_copy_stream(streams_for(device), overlap):
            new.copy_(local, non_blocking=local.is_pinned())
    _replace(tensor, new)


def _wake_optimizer(
    optimizer: torch.optim.Optimizer, refuse: RemovableHandle, device: torch.device, overlap: bool
) -> None:
    """The optimizer's state is being copied back: let its next step wait for that."""
    refuse.remove()
    streams = streams_for(device)
    with _on_copy_stream(streams, overlap):
        copied = streams.record()
    if not overlap or copied is None:
        return

    def arrive(*_: object) -> None:
        streams.wait(copied)
        for handle in handles:
            handle.remove()

    handles = optimizer.register_step_pre_hook(arrive), optimizer.register_state_dict_pre_hook(arrive)


def _put_state(state: dict[Any, Any], place: _Place) -> _Back:
    """Move the state of one parameter. Counters on the CPU stay."""
    tensors = [each for each in state.values() if isinstance(each, torch.Tensor) and each.ndim]
    return partial(_each, [_put_tensor(each, place) for each in tensors])


def _each(calls: Sequence[_Back], overlap: bool) -> None:
    for call in calls:
        call(overlap)


def _at_once(call: _Back, _overlap: bool) -> None:
    call(False)


def _nothing(_overlap: bool) -> None:
    """It was not moved."""
