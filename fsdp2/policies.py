"""Settings: frozen dataclasses, validated once. Ground layer.

The public ones have the fields of torch's FSDP2, so that `fully_shard` accepts the objects of either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.errors import ArgumentError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype a unit computes and reduces in. Sharded parameters and the optimizer keep the original dtype.

    Attributes:
        param_dtype: dtype of the unsharded floating-point parameters, and so of the all-gather and of compute.
            None: the original dtype.
        reduce_dtype: dtype of reduce-scatter and all-reduce, and of gradients that wait for them. None: the
            parameter's `grad_dtype`, by default its original dtype (as in torch 2.15; torch 2.13 uses `param_dtype`).
        output_dtype: floating-point forward outputs are cast to it. None: no cast.
        cast_forward_inputs: cast floating-point forward inputs to `param_dtype`, if that is set.
        param_dtype_override_fn: `fully_shard` calls it once for each floating-point parameter. It returns None or
            `param_dtype` for the default, or the parameter's own dtype to leave it alone (an fp32 router in a bf16
            block). It must return the same on every rank.
        all_gather_dtype: ``torch.int8`` sends unsharded parameters as block-quantised integers with one scale for each
            256 elements: half the bytes of bf16, for an error of at most 1/254 of a block's largest element (ZeRO++'s
            qwZ, https://arxiv.org/abs/2306.10209). Sharded parameters stay exact. None: the compute dtype.
        reduce_scatter_dtype: gradients are sent in bfloat16 or float16, but summed in `reduce_dtype`, by an
            all-to-all and a local sum: half the bytes of an fp32 reduction, without the rounding of a 16-bit sum.
            None: `reduce_dtype`.

    Example::

        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    all_gather_dtype: torch.dtype | None = field(default=None, kw_only=True)
    reduce_scatter_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _check_dtype(name, getattr(self, name))
        boolean("MixedPrecisionPolicy: cast_forward_inputs", self.cast_forward_inputs)
        override, wire, summed = self.param_dtype_override_fn, self.reduce_scatter_dtype, self.reduce_dtype
        if override is not None and not callable(override):
            raise _unfit("param_dtype_override_fn", "a function of a parameter or None", repr(override))
        if self.all_gather_dtype not in (None, torch.int8):
            raise _unfit("all_gather_dtype", "torch.int8 or None", self.all_gather_dtype)
        if wire not in (None, torch.bfloat16, torch.float16):  # narrower ones would need a scale
            raise _unfit("reduce_scatter_dtype", "bfloat16, float16 or None", repr(wire))
        if wire is not None and summed is not None and wire.itemsize >= summed.itemsize:
            raise _unfit("reduce_scatter_dtype", f"a dtype narrower than reduce_dtype={summed}", wire)


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep everything on the mesh's device (the default)."""

    @property
    def home(self) -> torch.device | None:
        """Where the sharded parameters live; None for the mesh's device."""
        return None

    @property
    def grad_home(self) -> torch.device | None:
        """Where their gradients live."""
        return self.home

    @property
    def pins(self) -> bool:
        """Whether host memory is page-locked."""
        return False

    @property
    def in_files(self) -> bool:
        """Whether `home` is memory mapped from files."""
        return False

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory in `home`, 1-D."""
        return torch.zeros(numel, dtype=dtype, device=self.home)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor on the device `home` is of the kind that `zeros` returns."""
        return True

    def of_params(self, sizes: Sequence[int]) -> "Sequence[OffloadPolicy]":
        """The policies for a unit's parameters of these sizes in bytes."""
        return [self] * len(sizes)


def _unfit(name: str, expected: str, got: object) -> ArgumentError:
    return ArgumentError(f"{name}: expected {expected}, got {got}")


def _check_dtype(name: str, value: Any) -> None:
    if value is None or (isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex)):
        return
    name_of = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtype = getattr(torch, name_of.get(str(value), str(value)), None)
    hint = f"; pass {dtype}" if isinstance(dtype, torch.dtype) else ""
    raise _unfit(f"MixedPrecisionPolicy: {name}", "a floating-point dtype or None", f"{value!r}{hint}")


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise _unfit(name, "a bool", repr(value))
    return value


@dataclass(frozen=True)
class UnitSettings:
    """What the `set_*` methods of `FSDPModule` change. One per unit, replaced as a whole.

    Attributes:
        reshard_after_forward: True, False, the size of the smaller group to reshard to, or None, the default: the first
            forward sets it to True, except on the root, which stays unsharded if a backward may follow.
        reshard_after_backward: free the unsharded parameters after backward.
        unshard_in_backward: all-gather before backward where needed (False for parameters that backward never reads).
        requires_gradient_sync: reduce gradients in backward.
        requires_all_reduce: with HSDP, also reduce over the replicate axis.
        reduce_unused: reduce trainable parameters without a gradient as zeros: True for all, or their indices in the
            group.
        is_last_backward: finish all reductions before backward returns; read on the root only.
        gradient_divide_factor: divide the sum of gradients by this instead of the number of ranks.
        force_sum: use SUM and divide afterwards, never the backend's AVG.
        max_input_buffers: reductions that may be in flight before compute waits for the oldest.
        all_reduce_hook: called with the flat reduced gradients before the parameters get them, their mesh, and the
            `Streams`.
        zero: the `ZeroPolicy`; it decides what waits for the last backward of a step.
        when_reduced: called in the last backward of a step with the parameters of a reduction, once they have their
            gradients.
        features: by name, the arguments of `fully_shard` and the settings that features implement.
        ends_step: a backward with these settings completes the sharded gradients, so that the optimizer may step.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    reduce_unused: bool | frozenset[int] = False
    is_last_backward: bool = True
    gradient_divide_factor: float | None = None
    force_sum: bool = False
    max_input_buffers: int = 1
    all_reduce_hook: Callable[[torch.Tensor, DeviceMesh, Any], None] | None = None
    zero: Any = None
    when_reduced: tuple[Callable[[Sequence[Any]], None], ...] = ()
    features: Mapping[str, Any] = field(default_factory=dict)
    ends_step: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends_step", self.requires_gradient_sync and self.requires_all_reduce)

    def in_backward(self, is_last: bool) -> "UnitSettings":
        """The settings for a backward that is, or is not, the last of a step."""
        if is_last:
            return self
        settings = replace(self, when_reduced=())
        return settings if self.zero is None else self.zero.before_last(settings)
