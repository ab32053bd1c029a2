"""`CPUOffloadPolicy`: shards in host memory. Layer: extras."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp

from fsdp2.arguments import unfit
from fsdp2.errors import OrderError, UnsupportedError
from fsdp2.policies import OffloadPolicy, boolean
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Phase
from fsdp2.runtime.step import Step
from fsdp2.runtime.streams import Streams
from fsdp2.runtime.unit import Unit

HOST = torch.device("cpu")
# The last of these is the device of host memory. A plan substitutes another device.
_HOSTS = [HOST]


def host() -> torch.device:
    """The device of host memory, or its substitute within `standing_for_host`."""
    return _HOSTS[-1]


@contextmanager
def standing_for_host(device: torch.device) -> Iterator[None]:
    """In the block, offloaded tensors go to `device`, since in a plan the CPU device stands for the accelerator."""
    _HOSTS.append(device)
    try:
        yield
    finally:
        _HOSTS.pop()


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer state in host memory.

    Attributes:
        pin_memory: page-lock the host memory, which lets copies overlap with compute.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        boolean("CPUOffloadPolicy: pin_memory", self.pin_memory)

    @property
    def home(self) -> torch.device | None:
        """Where the sharded parameters live."""
        return host()

    @property
    def pins(self) -> bool:
        """Whether host memory is page-locked."""
        return self.pin_memory


# Kept under these names, because `fsdp2.compat` may replace torch's classes by ours.
_TorchOffloadPolicy = torch.distributed.fsdp.OffloadPolicy
_TorchCPUOffloadPolicy = torch.distributed.fsdp.CPUOffloadPolicy


def _own_policy(policy: Any) -> OffloadPolicy:
    """`policy` as one of ours. Raises `UnsupportedError` for pinned memory on a machine without an accelerator."""
    if isinstance(policy, _TorchCPUOffloadPolicy):
        policy = CPUOffloadPolicy(pin_memory=policy.pin_memory)
    elif isinstance(policy, _TorchOffloadPolicy):
        policy = OffloadPolicy()
    if not isinstance(policy, OffloadPolicy):
        raise unfit("offload_policy", "an OffloadPolicy", policy, "Pass CPUOffloadPolicy() to offload.")
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        raise UnsupportedError(
            "CPUOffloadPolicy: got pin_memory=True, and memory is pinned for an accelerator, which this machine does "
            "not have. Pass CPUOffloadPolicy(pin_memory=False)."
        )
    return policy


def _check_home(units: Sequence[Unit]) -> None:
    """Raise if parameters are not on the device to which they are offloaded."""
    for unit in units:
        sharded = [group for group in unit.groups if group.phase is Phase.SHARDED]
        held = [(param.plan.offload.home, param.fqn, param.held) for group in sharded for param in group.params]
        found = [(fqn, now.device) for home, fqn, now in held if home not in (None, now.device) and not now.is_meta]
        if found:
            raise OrderError(
                f"unit '{unit.name}' is offloaded, so its sharded parameters must be on the CPU; these are not: "
                f"{found}. Move them there: model.to('cpu'); fsdp2.init.materialize(model) puts them there itself."
            )


def _follow_root(step: Step) -> None:
    groups = [group for unit in step.units for group in unit.groups]
    if any(group.params[0].plan.home != group.roles.device for group in groups):
        step.hooks.after_forward.append(partial(_wait_for_copies, step.memory.streams))


def _wait_for_copies(streams: Streams) -> None:
    """After a forward without a backward: let the host wait until the shards have been copied from its memory. It may
    change them next, and stream order does not apply to the host. (After a backward it has waited for gradients.)"""
    if not torch.is_grad_enabled():
        with streams.gathering():
            copied = streams.record()
        if copied is not None:
            copied.synchronize()


hooks.options["offload_policy"] = _own_policy
hooks.units_named.append(_check_home)
hooks.root_made.append(_follow_root)
