"""`FSDPModule`: the methods that `fully_shard` gives to a module, by swapping its class. Layer: module.

The class of a sharded module is made on the fly, with `FSDPModule` before the original class, so that both
``isinstance`` checks hold. It derives from torch's public `FSDPModule` as well, for third-party code that asks for that
one; every method of it is overridden.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, Self
from weakref import ref

import torch
import torch.distributed.fsdp
from torch import nn

from fsdp2.errors import ArgumentError, MisuseError, OrderError, UnsupportedError
from fsdp2.runtime.root import pre_forward, units_below
from fsdp2.runtime.unit import Unit, unit_of

__all__ = ["FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx", "swapped_class"]

_TorchFSDPModule: Any = torch.distributed.fsdp.FSDPModule
_swapped_classes: dict[type, type] = {}


def swapped_class(original: type) -> type:
    """The class that has the FSDP methods beside those of `original`; one for each original class."""
    if original not in _swapped_classes:
        _swapped_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return _swapped_classes[original]


class UnshardHandle:
    """An all-gather under way, from ``module.unshard(async_op=True)``."""

    def __init__(self, unit: Unit):
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make the unsharded parameters usable. Waiting again does nothing."""
        if self._unit is not None:
            self._unit.wait_for_unshard()
            self._unit = None


class FSDPModule(_TorchFSDPModule):  # type: ignore[misc]  # every method is overridden, with our own types
    """What a sharded module can do beside what its original class can.

    The setters whose docstring says *recursive* also set the sharded modules below (``recurse=False`` does not);
    the others act on this module's unit alone.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module of the original class: containers build others of their kind when they are sliced."""
        original = cls.__mro__[cls.__mro__.index(_TorchFSDPModule) + 1]
        module = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise MisuseError(
            f"a sharded {type(self).__name__} cannot be deep-copied: the copy would need hooks and communication of "
            "its own. Build a second model, call fully_shard on it, and load this one's state_dict()."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MisuseError(
            f"a sharded {type(self).__name__} cannot be pickled. Save its state_dict() with "
            "torch.distributed.checkpoint."
        )

    # --- forms of the parameters -------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters of this module's unit (not those of sharded modules below).

        Collective over the shard group. They stay unsharded until `reshard`, or until a forward or backward of this
        module ends and reshards them.

        Args:
            async_op: return at once; the parameters are usable after the handle's `wait`, and the next forward waits
                by itself.

        Raises:
            OrderError: parameters are still on the meta device.

        Example::

            handle = model.layers[1].unshard(async_op=True)
            x = model.layers[0](x)
            handle.wait()
        """
        unit = self._unit()
        context = unit.ready_context()
        if not context.schedule.in_root_forward:
            context.follow_compute()
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Give back the unsharded parameters of this module's unit. No communication."""
        self._unit().reshard()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """`to`, `cpu`, `to_empty` and the like act on the sharded parameters."""
        unit = self._unit()
        unit.reshard()
        explicit = [(p, p.grad_dtype) for p in unit.params if p.grad_dtype != p.dtype]
        module = super(_TorchFSDPModule, self)._apply(fn, recurse)
        unit.refresh_groups()
        for param, grad_dtype in explicit:
            param.sharded.grad_dtype = grad_dtype
        return module  # type: ignore[no-any-return]

    # --- when to reduce ----------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward passes finish their reductions before they return (default True).

        Applies to the whole tree of the root. Set False for all microbatches but the last: reductions are still issued,
        but waited for only in the last; parameters that were prefetched and not used stay for the next backward.
        """
        unit = self._unit()
        root = unit if unit.context is None else unit.context.root
        assert isinstance(root, Unit)
        root.settings = replace(root.settings, is_last_backward=_bool("is_last_backward", is_last_backward))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients (default True). Recursive.

        While False, gradients add up on the unsharded parameters, in the reduce dtype, without communication; the next
        backward with True reduces their sum.

        Example::

            for index, batch in enumerate(microbatches):
                model.set_requires_gradient_sync(index == len(microbatches) - 1)
                loss(model(batch)).backward()
        """
        self._set(recurse, requires_gradient_sync=_bool("requires_gradient_sync", requires_gradient_sync))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With HSDP, whether backward also reduces over the replicate axis (default True). Recursive.

        While False, reduce-scattered gradients add up apart from `.grad`; the next backward with True reduces them.
        """
        self._set(recurse, requires_all_reduce=_bool("requires_all_reduce", requires_all_reduce))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether trainable parameters without a gradient take part in reductions, with zeros (default False).
        Recursive. For models in which ranks use different parameters: all ranks then reduce the same ones, in the same
        order, at the end of backward (so the gradients of the whole unit stay until then)."""
        self._set(recurse, reduce_unused=_bool("reduce_scatter_unused_params", reduce_scatter_unused_params))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight before compute waits for the oldest (default 1); the largest number in
        the root's tree counts. Recursive. More overlap for more memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ArgumentError(f"max_input_buffers: expected at least 1, got {max_input_buffers}")
        self._set(recurse, max_input_buffers=max_input_buffers)

    # --- how to reduce -----------------------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients over all ranks by `factor`, in place of the number of ranks."""
        self._set(False, gradient_divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let this unit's collectives sum, and divide afterwards, never use a backend's AVG."""
        self._set(False, force_sum=_bool("enable", enable))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` once per reduction with this unit's flat reduced gradients (1-D, reduce dtype, padding included),
        before they are handed to the sharded parameters; what it changes in place counts."""
        if stream is not None:
            raise UnsupportedError("set_all_reduce_hook: a stream of its own is not supported yet; pass stream=None")
        self._set(False, all_reduce_hook=hook)

    # --- when to reshard and unshard ---------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change the `reshard_after_forward` of `fully_shard`, also what the root chose by itself. Recursive."""
        self._set(recurse, reshard_after_forward=_bool("reshard_after_forward", reshard_after_forward))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward gives the unsharded parameters back (default True). Recursive. False saves the next
        microbatch's all-gathers for the memory of the whole model."""
        self._set(recurse, reshard_after_backward=_bool("reshard_after_backward", reshard_after_backward))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward all-gathers this unit's parameters (default True). False for parameters that backward
        does not read, such as those of an embedding; their gradients are reduced all the same."""
        self._set(False, unshard_in_backward=_bool("unshard_in_backward", unshard_in_backward))

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Unshard `modules`, in this order, as soon as this module's own parameters are there in forward. Issued before
        this module computes, so that they overlap with it. An empty list undoes it."""
        self._unit().forward_prefetch = [ref(_unit_in("set_modules_to_forward_prefetch", m)) for m in modules]

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """The same for backward, in place of the unit that ran just before this one in forward. An empty list restores
        that."""
        self._unit().backward_prefetch = [ref(_unit_in("set_modules_to_backward_prefetch", m)) for m in modules]

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """For call compatibility: all-gathers are always asynchronous here."""

    # --- recovery ----------------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: make the next iteration start clean. Call it on the root, on
        every rank.

        Waits for communication under way, reshards all units, and drops gradients that were not reduced (those on
        sharded parameters stay). Does nothing before the first forward.

        Raises:
            OrderError: this module is not the root.
        """
        unit = self._unit()
        context = unit.context
        if context is None:
            return
        if context.root is not unit:
            raise OrderError(f"reset_iter_state: '{unit.fqn}' is not the root; call it on the outermost sharded module")
        context.reset()
        for each in context.units:
            assert isinstance(each, Unit)
            each.reset()

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next root forward's all-gathers wait for `event` rather than for all work given to the current stream so
        far. Record it right after the optimizer step."""
        self._unit().ready_context().post_optim_event = event

    # --- not yet -----------------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Not supported yet.

        Raises:
            UnsupportedError: always.
        """
        raise _not_yet("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Not supported yet.

        Raises:
            UnsupportedError: always.
        """
        raise _not_yet("set_custom_reduce_scatter")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Not supported yet.

        Raises:
            UnsupportedError: always.
        """
        raise _not_yet("set_separate_reduce_scatter_group")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Not supported yet.

        Raises:
            UnsupportedError: always.
        """
        raise _not_yet("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """Not supported yet.

        Raises:
            UnsupportedError: always.
        """
        raise _not_yet("set_symm_mem_for_comm")

    # --- ours --------------------------------------------------------------------------------------------------------

    def _unit(self) -> Unit:
        assert isinstance(self, nn.Module)
        unit = unit_of(self)
        assert unit is not None
        return unit

    def _get_fsdp_state(self) -> Any:
        return self._unit()

    def _set(self, recurse: bool, **changes: Any) -> None:
        assert isinstance(self, nn.Module)
        for unit in units_below(self) if recurse else [self._unit()]:
            unit.settings = replace(unit.settings, **changes)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}: expected a bool, got {value!r}")
    return value


def _unit_in(call: str, module: Any) -> Unit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ArgumentError(f"{call}: expected modules on which fully_shard was called, got {type(module)}: {module}")
    return unit


def _not_yet(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what} is not supported by this version of fsdp2; see the status table in the README")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method beside `forward` be an entry point: it unshards, and its output drives backward.

    Does nothing on a module that is not sharded, so that model code may call it in any case.

    Raises:
        ArgumentError: the module has no such method.

    Example::

        register_fsdp_forward_method(model, "generate")
        model.generate(tokens)
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(f"register_fsdp_forward_method: {type(module)} has no method '{method_name}'")
    unit = module._unit()

    @wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pre_forward(unit, self, args, kwargs)
        return unit.post_forward(self, args, method(*args, **kwargs))

    setattr(module, method_name, MethodType(wrapped, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots use one set of communication streams. They always do here: streams belong to the device; the
    call checks its argument, and is there for code written for torch's FSDP2.

    Raises:
        ArgumentError: something in the list is not a sharded module.
    """
    for module in modules:
        _unit_in("share_comm_ctx", module)
