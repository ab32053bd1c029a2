"""Settings: frozen dataclasses, validated once. Ground layer.

The public ones have the fields of torch's FSDP2, so that either's objects can be passed to `fully_shard`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy", "UnitSettings"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype a unit computes and reduces in. Sharded parameters and the optimizer keep the original dtype.

    Attributes:
        param_dtype: dtype of the unsharded floating-point parameters, hence of the all-gather and of compute.
            None: the original dtype.
        reduce_dtype: dtype of reduce-scatter and all-reduce, and of gradients that wait for them. None: the
            parameter's original dtype (as torch 2.15; torch 2.13 takes `param_dtype`).
        output_dtype: floating-point forward outputs are cast to it. None: no cast.
        cast_forward_inputs: cast floating-point forward inputs to `param_dtype`, where that is set.

    Example::

        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep everything on the mesh's device (the default)."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer state in host memory.

    Attributes:
        pin_memory: page-lock the host memory, which lets copies overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full SPMD mesh are data parallel.

    Attributes:
        shard: name, or names, of the axes over which parameters are sharded.
        replicate: name, or names, of the axes over which they are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shard axes as a tuple, empty when there are none."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicate axes as a tuple, empty when there are none."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class UnitSettings:
    """What the `set_*` methods of `FSDPModule` change; one per unit, replaced as a whole.

    Attributes:
        reshard_after_forward: True, False, the size of the smaller group to reshard to, or None until the first
            forward decides (False for the root, True for others).
        reshard_after_backward: give the unsharded parameters back after backward.
        unshard_in_backward: all-gather before backward where needed (False for parameters that backward never reads).
        requires_gradient_sync: reduce gradients in backward.
        requires_all_reduce: with HSDP, also reduce over the replicate axis.
        reduce_unused: trainable parameters without a gradient take part with zeros.
        is_last_backward: finish all reductions before backward returns; read on the root only.
        gradient_divide_factor: divide the sum of gradients by this rather than by the number of ranks.
        force_sum: use SUM and divide by hand, never the backend's AVG.
        max_input_buffers: reductions that may be in flight before compute waits for the oldest.
        all_reduce_hook: called with the flat reduced gradients before they are handed out.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    reduce_unused: bool = False
    is_last_backward: bool = True
    gradient_divide_factor: float | None = None
    force_sum: bool = False
    max_input_buffers: int = 1
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
