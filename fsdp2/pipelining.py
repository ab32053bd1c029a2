"""What `torch.distributed.pipelining` asks of a sharded stage beyond `FSDPModule`. Layer: between api and runtime.

A schedule calls public methods: `unshard(async_op=True)` and `reshard` where it looks ahead; before each microbatch's
backward `set_requires_gradient_sync(False)`, `set_reshard_after_backward(False)`, `set_is_last_backward(False)`. After
the last microbatch it sets them back, and ends the backward of the whole step itself, through the object that
``torch.distributed.fsdp.fully_shard.state(stage)`` returns::

    for state in stage_state._state_ctx.all_states:        # each unit: reduce what waits
        for group in state._fsdp_param_groups: group.post_backward()
    stage_state._root_post_backward_final_callback()       # wait for the reductions

`StageState` is that object here. Our end of backward reduces whatever waits, and waits for it, so only the second call
has something to do: the list is empty.

Source: torch/distributed/pipelining/stage.py, `perform_reduce_grad` (torch 2.13).
"""

from typing import Any

from torch import nn

from fsdp2._torch import set_fully_shard_state
from fsdp2.errors import OrderError
from fsdp2.runtime.unit import Unit

__all__ = ["StageState", "register_stage"]


class StageState:
    """The state of one sharded module, as torch's pipeline stages know it.

    Attributes:
        all_states: of the units to reduce one by one; none, see above.
    """

    all_states: tuple[Any, ...] = ()

    def __init__(self, unit: Unit):
        self._unit = unit

    @property
    def _state_ctx(self) -> "StageState":
        """What the units of a root share: nothing but the list."""
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that wait on the unsharded parameters, reshard, wait for the reductions.

        Collective over the meshes of the units of this root. Does nothing for a stage that never ran.

        Raises:
            OrderError: the schedule computes the gradients of weights apart from those of inputs, and the stage
                reshards after forward.
        """
        context = self._unit.context
        if context is not None:
            _check_split_backward(context.units)
            context.end_backward()


def _check_split_backward(units: list[Unit]) -> None:
    """Such a schedule asks the stage for its parameters before it computes either kind of gradient. A stage that
    reshards after forward then holds shards, which no gradient reaches (torch 2.11 to 2.14, with its own FSDP2 too)."""
    lost = [unit.fqn for unit in units if unit.split_backward and unit.settings.reshard_after_forward is not False]
    for unit in units:
        unit.split_backward = False
    if lost:
        raise OrderError(
            f"a pipeline schedule that splits backward lost gradients of the units {lost} of a stage, since they "
            "reshard after forward. Call fully_shard(..., reshard_after_forward=False) on all units of the stage."
        )


def register_stage(module: nn.Module, unit: Unit) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` find `unit`. Once for each module that is sharded."""
    set_fully_shard_state(module, StageState(unit))
