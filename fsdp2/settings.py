"""`Settings`: the setters of `FSDPModule`. They change `UnitSettings` and the channels of buckets. Layer: module.

The class precedes the model's own in the MRO, so it has only documented names: any other could hide a model's method.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.policies import boolean
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.root import units_below
from fsdp2.runtime.unit import Unit, unit_for, unit_of


class Settings:
    """The setters of a sharded module.

    Setters whose docstring says *recursive* also apply to the sharded modules below (not with ``recurse=False``); the
    others act on this module's unit only.
    """

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward passes finish their reductions before they return (default True). Call it on the
        root, for the whole tree. Set False for all microbatches but the last, which waits for all reductions. While
        False, parameters that were prefetched but not used stay unsharded for the next backward."""
        unit = unit_for(self)
        root = unit if unit.step is None else unit.step.root()
        assert root is not None
        root.settings = replace(root.settings, is_last_backward=boolean("is_last_backward", is_last_backward))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients (default True). Recursive.

        While False, gradients add up on the unsharded parameters, in the reduce dtype, without communication; the next
        backward with True reduces their sum. With HSDP this covers reduce-scatter and all-reduce: each call also sets
        what `set_requires_all_reduce` sets, and the later of the two calls wins.

        Example::

            for index, batch in enumerate(microbatches):
                model.set_requires_gradient_sync(index == len(microbatches) - 1)
                loss(model(batch)).backward()
        """
        sync = boolean("requires_gradient_sync", requires_gradient_sync)
        change_settings(self, recurse, requires_gradient_sync=sync, requires_all_reduce=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With HSDP, whether backward also reduces over the replicate axis (default True). Recursive.

        While False, reduce-scattered gradients accumulate in a buffer separate from `.grad`; the next backward with
        True reduces them. `set_requires_gradient_sync` sets this as well, so call that method first.
        """
        change_settings(self, recurse, requires_all_reduce=boolean("requires_all_reduce", requires_all_reduce))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether trainable parameters without a gradient are reduced as zeros (default False). Recursive. For models
        in which ranks use different parameters: all ranks then reduce the same parameters in the same order, at the end
        of backward. A unit's gradients take up memory until then."""
        unused = boolean("reduce_scatter_unused_params", reduce_scatter_unused_params)
        change_settings(self, recurse, reduce_unused=unused)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight before compute waits for the oldest (default 1). The largest number in
        the root's tree applies. Recursive. A larger number overlaps more and takes more memory."""
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            error = ArgumentError if type(max_input_buffers) is int else TypeError
            raise error(f"max_input_buffers: expected an int of at least 1, got {max_input_buffers!r}")
        change_settings(self, recurse, max_input_buffers=max_input_buffers)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of this unit's gradients over all ranks by `factor`; None for the number of ranks."""
        change_settings(self, False, gradient_divide_factor=None if factor is None else float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether this unit's collectives always sum, and divide afterwards, instead of using the backend's AVG."""
        change_settings(self, False, force_sum=boolean("enable", enable))

    def set_all_reduce_hook(self, hook: Callable[..., None] | None, *, stream: torch.Stream | None = None) -> None:
        """Call `hook` once per reduction with this unit's flat reduced gradients (1-D, reduce dtype, padding included),
        before the sharded parameters get them. The hook may change them in place.

        Args:
            hook: called as ``hook(flat)``, or, if the unit's parameters are on several meshes, as ``hook(flat, mesh)``
                for each mesh. None removes it.
            stream: the stream on which the hook runs. With a replicate axis it runs on the all-reduce stream.

        Raises `ArgumentError` for a `stream` with a replicate axis.
        """
        by_feature("set_all_reduce_hook", self, hook, stream)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Use a custom all-gather for this unit; see `AllGather`. Every rank must set the same.
        Raises `ArgumentError` if the unit's parameters are on several meshes."""
        by_feature("set_custom_all_gather", self, comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Use a custom reduce-scatter for this unit; see `ReduceScatter`. Every rank must set the
        same. Raises `ArgumentError` if the unit's parameters are on several meshes, or its policy has a
        `reduce_scatter_dtype`."""
        by_feature("set_custom_reduce_scatter", self, comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether this unit's communication buffers come from the process group (NCCL: registered memory). Data is
        copied in and out, so this helps only where the backend is faster with its own memory. On a backend without such
        memory it warns and changes nothing. Raises `MisuseError` if a custom collective was set before."""
        by_feature("set_allocate_memory_from_process_group_for_comm", self, boolean("enable", enable))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Allocate this unit's communication buffers in symmetric memory. Collective.

        Raises:
            UnsupportedError: there is no CUDA device with NCCL, or no symmetric memory that the ranks can map.
            MisuseError: a custom collective was set before.
            ArgumentError: `backend` is unknown, or several reductions may be in flight; there is one buffer for them.
        """
        by_feature("set_symm_mem_for_comm", self, backend)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters have their own process group (default False). Recursive. An NCCL group runs one
        collective at a time, so in backward all-gathers and reduce-scatters otherwise wait for each other. The first
        call for a mesh creates the group and is collective; later calls reuse it."""
        by_feature("set_separate_reduce_scatter_group", self, boolean("enable", enable), recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change the `reshard_after_forward` of `fully_shard`, including the root's default. Recursive."""
        change_settings(self, recurse, reshard_after_forward=boolean("reshard_after_forward", reshard_after_forward))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters (default True). Recursive. False saves the next microbatch's
        all-gathers, but keeps the whole model in memory."""
        change_settings(self, recurse, reshard_after_backward=boolean("reshard_after_backward", reshard_after_backward))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward all-gathers this unit's parameters (default True). Set False if backward does not read them,
        as in an embedding; their gradients are still reduced."""
        change_settings(self, False, unshard_in_backward=boolean("unshard_in_backward", unshard_in_backward))

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Unshard `modules`, in this order, as soon as this module's own parameters are available in forward. The
        gathers are issued before this module computes, so that they overlap with it. An empty list removes the
        setting."""
        unit_for(self).forward_prefetch = [ref(unit_in("set_modules_to_forward_prefetch", m)) for m in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """The same for backward, instead of prefetching the unit that ran just before this one in forward. An empty
        list restores the default."""
        unit_for(self).backward_prefetch = [ref(unit_in("set_modules_to_backward_prefetch", m)) for m in modules]

    def set_auto_forward_prefetch(self, enable: bool = True) -> None:
        """Whether forward prefetches the next unit without explicit lists, once two iterations have run units in the
        same order (default False). Set it on the root. If the order changes, prefetching stops at the first difference
        and resumes after two equal iterations. Every rank must run units in the same order."""
        by_feature("set_auto_forward_prefetch", self, boolean("enable", enable))

    def set_keep_unsharded_storage(self, enable: bool, *, recurse: bool = True) -> None:
        """Whether resharded parameters keep the memory of the unsharded ones, at the same address (default False).
        Recursive. They are still gathered again. Avoids allocations; capture in a CUDA graph is untested."""
        by_feature("set_keep_unsharded_storage", self, boolean("enable", enable), recurse)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the all-gathers of the next root forward wait for `event`, instead of for all work issued to the current
        stream. Record it right after the optimizer step."""
        unit_for(self).ready_step().post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Exists for compatibility; all-gathers are always asynchronous here."""


def units_of(module: Any, recurse: bool) -> list[Unit]:
    """The unit of `module` and its followers; with `recurse`, also all units below."""
    unit = unit_for(module)
    return units_below(module) if recurse else [unit, *unit.followers]


def change_settings(module: Any, recurse: bool, **changes: Any) -> None:
    """Change fields of `UnitSettings` for the unit of `module`; with `recurse`, also for the units below."""
    for unit in units_of(module, recurse):
        unit.settings = replace(unit.settings, **changes)


def groups_of(module: object) -> list[Bucket]:
    """The groups of the module's unit and of its followers."""
    return [group for unit in units_of(module, recurse=False) for group in unit.groups]


def by_feature(name: str, *args: Any) -> Any:
    """Call the setter of this name, which a feature implements."""
    return hooks.implementation(hooks.setters, name, name)(*args)


def unit_in(call: str, module: Any) -> Unit:
    """The unit of `module`, an argument of `call` that must be sharded."""
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ArgumentError(f"{call}: expected modules on which fully_shard was called, got {type(module)}: {module}")
    return unit
