"""Names relative to the root, and weights that have two names. Layer: runtime, below the unit."""

from collections.abc import Mapping, Sequence

from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.runtime.parameter import ManagedParameter, managed_by


def name_parameters(params: Sequence[ManagedParameter], module_fqns: Mapping[nn.Module, str]) -> None:
    """Set each parameter's FQN from that of the module that first holds it."""
    for param in params:
        slot = param.slots[0]
        prefix = module_fqns.get(slot.module, "") if slot.module is not None else ""
        param.fqn = f"{prefix}.{slot.name}" if prefix else slot.name


def check_tied(root: nn.Module, params: Sequence[ManagedParameter]) -> None:
    """One weight under two names must be one managed parameter, or training would update two copies.

    Raises:
        ArgumentError: one weight belongs to two groups, or is managed under one name and not under another.
    """
    advice = "Call fully_shard once on the list of the modules that share it: fully_shard([a, b])."
    for fqn, plain in root.named_parameters():
        managed = managed_by(plain)
        if managed is not None and managed in params and managed.unsharded is not plain:
            raise ArgumentError(f"'{fqn}' and '{managed.fqn}' are one weight; only the second is sharded. {advice}")
