"""`torch.autograd.grad` with respect to an unsharded parameter, which gives this rank's own gradient. Layer: checks."""

from torch.autograd.graph import get_gradient_edge

from fsdp2._torch import outside_transforms
from fsdp2._torch.checks import captures
from fsdp2.errors import OrderError
from fsdp2.extras.finalization import is_manual
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit


def watch_root(step: Step) -> None:
    """Check the backwards of a new root."""
    step.hooks.reached_in_part.append(_check)


def _check(unit: Unit) -> None:
    """Raise if the running backward returns the gradient of a parameter of `unit`, unless gradients are finalised
    manually: pipelines that split backward do that, and set the gradients themselves. (A unit that reshards after
    forward has no unsharded parameters that a user could pass.)"""
    root = None if unit.step is None else unit.step.root()
    if unit.settings.reshard_after_forward or not unit.settings.requires_gradient_sync:
        return
    if root is not None and is_manual(root):
        return
    for group in unit.groups:
        if (fqn := _find(group)) is not None:
            raise OrderError(
                f"'{fqn}': torch.autograd.grad would return this rank's own gradient of it. Call loss.backward(), "
                "which gives sharded parameters the mean over the ranks; for gradients of this rank compute the "
                "loss within fsdp2.full_params(model)."
            )


def _find(group: Bucket) -> str | None:
    """The FQN of such a parameter. The nodes are not kept, because torch would keep using their stream after the
    program has switched to another one."""
    pairs = zip(group.params, group.gradients.unsharded, strict=bool(group.gradients.unsharded))
    with outside_transforms():
        nodes = ((param.fqn, get_gradient_edge(each).node) for param, each in pairs if each.requires_grad)
        return next((fqn for fqn, node in nodes if captures(node)), None)
