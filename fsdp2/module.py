"""`FSDPModule`: the methods that `fully_shard` gives to a module, by swapping its class. Layer: module.

The class of a sharded module, ``(FSDPModule, original class)``, is created on demand. `FSDPModule` derives from torch's
public class of that name, for code that checks `isinstance`, and overrides all its methods.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed.fsdp

from fsdp2._torch import outside_transforms
from fsdp2.comm.base import Pending
from fsdp2.errors import MisuseError, OrderError
from fsdp2.policies import boolean
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Phase
from fsdp2.runtime.root import units_below
from fsdp2.runtime.unit import Unit, unit_for
from fsdp2.settings import Settings, by_feature

_TorchFSDPModule: Any = torch.distributed.fsdp.FSDPModule
_swapped_classes: dict[type, type] = {}


def swapped_class(original: type) -> type:
    """`original` with the FSDP methods added; one class for each original."""
    if original not in _swapped_classes:
        # Other code reads both names. transformers initialises its own modules (by `__module__`) differently from
        # users'. It finds the outputs that a model can record (`output_hidden_states`) by the class's str, which has
        # both.
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        _swapped_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), names)
    return _swapped_classes[original]


def original_class(swapped: type) -> Any:
    """The class that a module of class `swapped` had before it was sharded."""
    return swapped.__mro__[swapped.__mro__.index(_TorchFSDPModule) + 1]


class UnshardHandle:
    """An all-gather in flight, from ``module.unshard(async_op=True)``."""

    def __init__(self, unit: Unit):
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make the unsharded parameters usable. A second call does nothing."""
        if self._unit is not None:
            with outside_transforms():
                self._unit.wait_for_unshard()
            self._unit = None


class FSDPModule(Settings, _TorchFSDPModule):  # type: ignore[misc]  # every method is overridden, with our own types
    """The methods that `fully_shard` adds to a module. The setters are in `Settings`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module of the original class. (Slicing an `nn.Sequential` calls its class.)"""
        original = original_class(cls)
        module = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = type(self).__name__
        raise MisuseError(
            f"a sharded {name} cannot be pickled. Save its state_dict() with torch.distributed.checkpoint."
        )

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters of this module's unit (not those of sharded modules below it). Collective over the
        shard group. They stay unsharded until `reshard`, or until a forward or backward of this module reshards them
        at its end. Raises `OrderError` if parameters are still on the meta device.

        Args:
            async_op: return at once; the parameters are usable after the handle's `wait`. The next forward also waits.

        Example::

            handle = model.layers[1].unshard(async_op=True)
            x = model.layers[0](x)
            handle.wait()
        """
        unit = unit_for(self)
        step, handle = unit.ready_step(), UnshardHandle(unit)
        with outside_transforms():
            if step.order is None:
                if not step.awaits_backward:  # a backward needs the values of its forward
                    unit.drop_stale()
                step.follow_compute()
            unit.unshard()
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's unit. No communication."""
        unit_for(self).reshard_all()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """`to`, `cpu`, `to_empty` and similar methods act on the sharded parameters."""
        unit = unit_for(self)
        unit.reshard_all()
        explicit = [(p, p.grad_dtype) for p in unit.params if p.grad_dtype != p.dtype]
        afterwards = [hook(self, fn, recurse) for hook in hooks.before_apply]
        module = super(_TorchFSDPModule, self)._apply(fn, recurse)
        unit.refresh_groups(are_new=True)
        if unit.step is not None:
            unit.step.follow_compute()  # a backward may gather the shards next
        for each in afterwards:
            each()
        for param, grad_dtype in explicit:
            param.sharded.grad_dtype = grad_dtype
        return module  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The module's own `zero_grad`, applied also to the sharded parameters of units that are currently unsharded.
        It warns about unreduced gradients, and clears them only in units that are currently unsharded. With
        ``set_to_none=False`` it waits for steps that still read the gradients (`offload_optimizer`)."""
        for unit in units_below(self):
            for group in unit.groups:
                if not set_to_none:
                    group.settle()
                if group.phase is not Phase.SHARDED:
                    for param in group.params:
                        if set_to_none:
                            param.sharded.grad = None
                        elif param.sharded.grad is not None:
                            param.sharded.grad.detach_().zero_()
        super(_TorchFSDPModule, self).zero_grad(set_to_none)
        for hook in hooks.after_zero_grad:
            hook(self)

    def reset_iter_state(self) -> None:
        """Recover from an exception in forward or backward. Call it on the root, on every rank.

        Waits for communication in flight, reshards all units, and drops unreduced gradients; with `share_comm_ctx`,
        also other roots' gradients that are being reduced. The `.grad` of sharded parameters stays. Does nothing before
        the first forward or `unshard`. Raises `OrderError` if this module is not the root, or if, with
        `share_comm_ctx`, another root's ``finalize_backward(async_op=True)`` has not been waited for.
        """
        unit = unit_for(self)
        if unit.step is not None and unit.step.root() is not unit:
            raise OrderError(f"reset_iter_state: '{unit.fqn}' is not the root; call it on the outermost sharded module")
        if unit.step is not None:
            unit.step.reset()

    def set_manual_backward_finalization(self, enable: bool) -> None:
        """Whether backward leaves gradients unreduced until `finalize_backward` (default False). For pipelines, and to
        overlap reductions with other work. Takes effect at the next backward. While True, `set_is_last_backward` has no
        effect. Raises `OrderError` if this module is not the root."""
        by_feature("set_manual_backward_finalization", self, boolean("enable", enable))

    def finalize_backward(self, *, async_op: bool = False) -> Pending | None:
        """In manual mode, after the last backward: reduce all gradients and reshard. Collective: every rank must call
        it. Does nothing if no backward has reached the sharded modules.

        Args:
            async_op: return a handle while reductions are in flight. Sharded gradients are complete after its `wait`;
                do not run a forward before that.

        Raises:
            OrderError: manual mode is off; a backward is running; a forward has not had its backward; the last handle
                was not waited for; this module is not the root; HSDP gradients wait for an all-reduce; or a pipeline
                schedule that splits backward has lost gradients of units that reshard after forward.

        Example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for batch in microbatches:
                loss(model(batch)).backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        """
        return by_feature("finalize_backward", self, async_op)  # type: ignore[no-any-return]

    def _get_fsdp_state(self) -> Any:
        return unit_for(self)
