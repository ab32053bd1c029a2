"""What `torch.distributed.pipelining` needs from a sharded stage beyond `FSDPModule`. Layer: extras.

A schedule calls public methods: `unshard(async_op=True)` and `reshard` to look ahead, and before each microbatch's
backward `set_requires_gradient_sync(False)`, `set_reshard_after_backward(False)`, `set_is_last_backward(False)`. After
the last microbatch it resets them, and ends the backward of the whole step itself, through the object that
``torch.distributed.fsdp.fully_shard.state(stage)`` returns::

    for state in stage_state._state_ctx.all_states:        # each unit: reduce what is left
        for group in state._fsdp_param_groups: group.post_backward()
    stage_state._root_post_backward_final_callback()       # wait for the reductions

Here `StageState` is that object. Our end of backward reduces all remaining gradients and waits for the reductions, so
only the second call has work to do, and the list is empty. A stage of torch 2.15 calls `finalize_backward` instead.

torch's schedules that split backward read a stage's parameters before they compute either kind of gradient. A stage
that reshards after forward holds shards at that time, and no gradient reaches those (torch 2.11 to 2.15, also with its
own FSDP2). That raises when the step is finalised.

Source: torch/distributed/pipelining/stage.py, `perform_reduce_grad` (torch 2.13).
"""

from typing import Any
from weakref import WeakSet, ref

from fsdp2._torch.shared import set_fully_shard_state
from fsdp2.errors import OrderError
from fsdp2.extras.finalization import before_finalize
from fsdp2.runtime import hooks
from fsdp2.runtime.state import Stage
from fsdp2.runtime.step import Step
from fsdp2.runtime.unit import Unit

_lost: WeakSet[Unit] = WeakSet()  # units that a split backward has left without gradients


class StageState:
    """The state of one sharded module, as torch's pipeline stages expect it.

    Attributes:
        all_states: states of the units to reduce one by one; empty, see above.
    """

    all_states: tuple[Any, ...] = ()

    def __init__(self, unit: Unit):
        self._unit = unit

    @property
    def _state_ctx(self) -> "StageState":
        """The state that the units of a root share: only the list."""
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients left on the unsharded parameters, reshard, wait for the reductions.

        Collective over the meshes of the units of this root. Does nothing for a stage that never ran.

        Raises:
            OrderError: the schedule computes the gradients of weights separately from those of inputs, and the stage
                reshards after forward.
        """
        step = self._unit.step
        if step is not None:
            _check_root(step)
            step.end_backward()


def _register(unit: Unit) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` find `unit`."""
    for module in unit.modules:
        set_fully_shard_state(module, StageState(unit))


def _note_lost(step: Step) -> None:
    """A backward is over: note units that lost gradients. Pipelines turn both settings off; otherwise the user may have
    asked for gradients of inputs only."""
    for unit in [unit for unit in step.units if not unit.settings.reshard_after_backward]:
        if unit.settings.reshard_after_forward and not unit.state.settings.requires_gradient_sync:
            ran, of = unit.state.stage in (Stage.BACKWARD, Stage.DONE), [group.gradients for group in unit.groups]
            if ran and of and all(any(each.trainable) and not each.arrived for each in of):
                _lost.add(unit)


def _check_root(step: Step) -> None:
    """Raise if a backward has lost gradients since the last call."""
    lost = [unit for unit in step.units if unit in _lost]
    for unit in lost:
        _lost.discard(unit)
    if lost:
        raise OrderError(
            f"a pipeline schedule that splits backward lost gradients of the units {[unit.fqn for unit in lost]} of a "
            "stage, since they reshard after forward. Call fully_shard(..., reshard_after_forward=False) on all units "
            "of the stage."
        )


def _follow_root(step: Step) -> None:
    weak = ref(step)
    step.hooks.before_last_reductions.append(lambda: _note_lost(_alive(weak)))


def _alive(weak: "ref[Step]") -> Step:
    step = weak()
    assert step is not None
    return step


hooks.unit_made.append(_register)
hooks.root_made.append(_follow_root)
before_finalize.append(_check_root)
