"""The arguments of `fully_shard`, checked once and before anything is changed. Layer: below placing.

torch's own policies are accepted too, and are converted to ours. What cannot be used is an `ArgumentError`.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptionalPolicy,
    ZeroPolicy,
)

# Kept under these names, because `fsdp2.compat` may replace torch's classes by ours.
_TorchOffloadPolicy = torch.distributed.fsdp.OffloadPolicy
_TorchCPUOffloadPolicy = torch.distributed.fsdp.CPUOffloadPolicy
_TORCHS_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_UNSET = object()


def check_options(mesh: object, shard_placement_fn: object, zero: object) -> None:
    """Check the types of the arguments that are not checked elsewhere."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise _unfit("mesh", "a DeviceMesh or None", mesh, 'Make one: init_device_mesh("cuda", (world_size,)).')
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise _unfit("shard_placement_fn", "a function of a parameter, or None", shard_placement_fn)
    if zero is not None and not isinstance(zero, ZeroPolicy):
        hint = f"Pass ZeroPolicy(stage={zero})." if isinstance(zero, int) else ""
        raise _unfit("zero", "a ZeroPolicy or None", zero, hint)


def own_precision_policy(policy: Any) -> MixedPrecisionPolicy:
    """`policy` as one of ours; any object with the fields of torch's `MixedPrecisionPolicy` is accepted."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    lacking = [name for name in _TORCHS_PRECISION if getattr(policy, name, _UNSET) is _UNSET]
    if lacking or isinstance(policy, type):
        hint = f"Pass MixedPrecisionPolicy(param_dtype={policy})." if isinstance(policy, torch.dtype) else ""
        raise _unfit("mp_policy", "a MixedPrecisionPolicy", policy, hint)
    names = [each.name for each in fields(MixedPrecisionPolicy)]
    given: dict[str, Any] = {name: value for name in names if (value := getattr(policy, name, _UNSET)) is not _UNSET}
    return MixedPrecisionPolicy(**given)


def own_offload_policy(policy: Any, device: torch.device) -> OffloadPolicy:
    """`policy` as one of ours, for a mesh of `device`; None means no offload, as in torch. Raises `UnsupportedError`
    for pinned memory on a machine without an accelerator."""
    if isinstance(policy, _TorchCPUOffloadPolicy):
        policy = CPUOffloadPolicy(pin_memory=policy.pin_memory)
    elif policy is None or isinstance(policy, _TorchOffloadPolicy):
        policy = OffloadPolicy()
    if not isinstance(policy, OffloadPolicy):
        raise _unfit("offload_policy", "an OffloadPolicy", policy, "Pass CPUOffloadPolicy() to offload.")
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        raise UnsupportedError(
            f"CPUOffloadPolicy: got pin_memory=True on {device}, and memory is pinned for an accelerator, which this "
            "machine does not have. Pass CPUOffloadPolicy(pin_memory=False)."
        )
    return policy


def own_optional_policy(optional: Any) -> OptionalPolicy | None:
    """The policy of an optional unit; None for a unit that all ranks run."""
    if isinstance(optional, bool):
        return OptionalPolicy() if optional else None
    if isinstance(optional, OptionalPolicy):
        return optional
    hint = f"Pass OptionalPolicy(runs_if={getattr(optional, '__name__', 'function')})." if callable(optional) else ""
    raise _unfit("optional", "a bool or an OptionalPolicy", optional, hint)


def own_mesh_dims(dims: Any) -> DataParallelMeshDims | None:
    """`dims` as ours, or None; torch's own are accepted."""
    if dims is None or isinstance(dims, DataParallelMeshDims):
        return dims
    if getattr(dims, "shard", _UNSET) is _UNSET or getattr(dims, "replicate", _UNSET) is _UNSET:
        hint = f"Pass DataParallelMeshDims(shard={dims!r})." if isinstance(dims, (str, tuple)) else ""
        raise _unfit("dp_mesh_dims", "a DataParallelMeshDims or None", dims, hint)
    return DataParallelMeshDims(dims.shard, dims.replicate)


def parameter_set(params: Any) -> set[nn.Parameter]:
    """`ignored_params` as a set, from any collection of parameters. (Names, for example, would have no effect.)"""
    if params is None:
        return set()
    if isinstance(params, (str, torch.Tensor, nn.Module)) or not isinstance(params, Iterable):
        raise _unfit("ignored_params", "a set of parameters", params)
    found = set(params)
    for each in found:
        if not isinstance(each, nn.Parameter):
            raise _unfit("ignored_params", "a set of parameters", each, "Pass the parameters: {model.head.weight}.")
    return found


def _unfit(name: str, expected: str, got: object, hint: str = "") -> ArgumentError:
    what = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
    text = f"fully_shard: {name}: expected {expected}, got {what}"
    return ArgumentError(f"{text}. {hint}" if hint else text)
