"""Trainable parameters that no unit manages, in a model with units. Layer: checks.

If `fully_shard` was called on the blocks but not on the model that contains them, the model's other parameters
(embedding, head) stay plain. Their gradients are not reduced, so they diverge between ranks while the loss falls. The
same happens to parameters that are added after `fully_shard`. Each such parameter is reported once: after the first
backward, in a clip or in a save. Parameters in `ignored_params`, and those that DDP reduces, are not reported.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch import is_replicated
from fsdp2.runtime.parameter import managed_by
from fsdp2.runtime.step import Step

_CALL: Any = nn.Module.__call__

_known = WeakIdKeyDictionary()  # plain parameters that the user excluded, or that were reported
_models: WeakSet[nn.Module] = WeakSet()  # the models that `outermost_model` returned
_trained: WeakSet[nn.Module] = WeakSet()  # the models whose backward was checked
# Lists of parameters that were clipped: the id of the first, and their number. Not weak references, because torch
# cannot move parameters that have one (`module.to` swaps tensors).
_clipped: set[tuple[int, int]] = set()


def note_ignored(params: Iterable[nn.Parameter]) -> None:
    """Record parameters that the user excluded."""
    for param in params:
        if not isinstance(param, DTensor):  # a weak reference to one would keep `module.to` from swapping it
            _known[param] = True


def outermost_model(module: nn.Module) -> nn.Module:
    """The outermost module that contains `module` and whose call is running; otherwise `module` itself."""
    found = module
    frame = inspect.currentframe()
    while frame is not None:
        # Only look at frames of `Module.__call__`: reading a frame's locals keeps them alive until it returns.
        if frame.f_code is _CALL.__code__:
            caller = frame.f_locals["self"]
            if any(each is module for each in caller.modules()):
                found = caller
        frame = frame.f_back
    _models.add(found)
    return found


def watch_root(step: Step) -> None:
    """Warn about parameters of the model around a root that got a gradient in the first backward."""
    model = ref(outermost_model(step.units[0].modules[0]))
    step.hooks.after_backward.append(lambda: _after_backward(model()))


def _after_backward(model: nn.Module | None) -> None:
    if model is not None and model not in _trained:
        _trained.add(model)
        _warn("backward", [each for each in _never_reduced(model) if each[1].grad is not None])


def warn_in_clip(params: Sequence[torch.Tensor]) -> None:
    """Warn about parameters in `params` that have a gradient; checks the same list only once."""
    if not params or not _models or (id(params[0]), len(params)) in _clipped:
        return
    _clipped.add((id(params[0]), len(params)))
    ids = {id(param) for param in params if not isinstance(param, DTensor) and param.grad is not None}
    if ids:
        _warn(
            "clip_grad_norm_",
            [each for model in list(_models) for each in _never_reduced(model) if id(each[1]) in ids],
        )


def warn_in_save(model: nn.Module) -> None:
    """Warn about parameters of `model`, because only one rank's values will be saved."""
    _warn("save", list(_never_reduced(model)))


def _never_reduced(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters of `model` that neither we nor DDP reduce, and that were not reported yet."""
    stack = [("", model)]
    seen: set[nn.Module] = set()
    while stack:
        prefix, module = stack.pop()
        if module in seen or isinstance(module, DistributedDataParallel) or is_replicated(module):
            continue
        seen.add(module)
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and not isinstance(param, DTensor) and not managed_by(param) and param not in _known:
                yield f"{prefix}{name}", param
        stack += reversed([(f"{prefix}{name}.", child) for name, child in module.named_children()])


def _warn(call: str, params: Sequence[tuple[str, nn.Parameter]]) -> None:
    if not params or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for _, param in params:
        _known[param] = True
    names = ", ".join(f"'{name}'" for name, _ in params[:5]) + (", ..." if len(params) > 5 else "")
    warnings.warn(
        f"{call}: {len(params)} trainable parameters ({names}) are not sharded, but others are. Their gradients are "
        "not reduced, so each rank trains its own values. Call fully_shard last on a module that holds them too. If "
        "you reduce them yourself, pass them to fully_shard as ignored_params.",
        stacklevel=4,
    )
