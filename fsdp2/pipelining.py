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
        """
        context = self._unit.context
        if context is None:
            return
        context.end_backward()


def register_stage(module: nn.Module, unit: Unit) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` find `unit`. Once for each module that is sharded."""
    set_fully_shard_state(module, StageState(unit))
