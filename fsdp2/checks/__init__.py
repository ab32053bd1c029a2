"""Checks for mistakes that would otherwise go unnoticed in training. Each raises or warns, and says what to do.

::

    captured    `torch.autograd.grad` with respect to an unsharded parameter
    emptied     parameters that were never filled after `to_empty`
    meshes      ranks or axes of a mesh in another order
    names       a name of the model that a method of ours would hide
    left_out    trainable parameters that no unit manages
    replicas    replicas that start from different parameters
    unreduced   a step, clip or `zero_grad` while gradients are unreduced
    weights     weights that several modules hold
    whole_loads whole tensors that are loaded into sharded parameters
    step_hook   the hook that checks optimizers before they step

Importing this package registers them in the hooks of the runtime, which knows none of them.
"""

from fsdp2.checks import (
    captured,
    emptied,
    left_out,
    meshes,
    names,
    replicas,
    step_hook,
    unreduced,
    weights,
    whole_loads,
)
from fsdp2.runtime import hooks

hooks.units_drafted += [names.check_drafts, meshes.check_meshes]
hooks.params_ignored.append(left_out.note_ignored)
hooks.param_sharded.append(replicas.note_sample)
hooks.unit_made += [step_hook.install_step_hooks, whole_loads.watch_loads]
hooks.units_named.append(weights.check_weights)
hooks.root_made += [
    captured.watch_root,
    replicas.check_root,
    emptied.watch_root,
    left_out.watch_root,
    unreduced.watch_root,
]
hooks.before_apply.append(emptied.before_apply)
hooks.after_zero_grad.append(unreduced.check_zero_grad)
