"""What `torch.distributed.pipelining` needs from a sharded stage beyond `FSDPModule`. Layer: between api and runtime.

A schedule calls public methods: `unshard(async_op=True)` and `reshard` to look ahead, and before each microbatch's
backward `set_requires_gradient_sync(False)`, `set_reshard_after_backward(False)`, `set_is_last_backward(False)`. After
the last microbatch it resets them, and ends the backward of the whole step itself, through the object that
``torch.distributed.fsdp.fully_shard.state(stage)`` returns::

    for state in stage_state._state_ctx.all_states:        # each unit: reduce what waits
        for group in state._fsdp_param_groups: group.post_backward()
    stage_state._root_post_backward_final_callback()       # wait for the reductions

`StageState` is that object here. Our end of backward reduces all waiting gradients and waits for the reductions, so
only the second call has work to do, and the list is empty. A stage of torch 2.15 calls `finalize_backward` instead.

Source: torch/distributed/pipelining/stage.py, `perform_reduce_grad` (torch 2.13).
"""

from typing import Any

from torch import nn

from fsdp2._torch import set_fully_shard_state
from fsdp2.runtime.unit import Unit


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
        """Reduce the gradients that wait on the unsharded parameters, reshard, wait for the reductions.

        Collective over the meshes of the units of this root. Does nothing for a stage that never ran.

        Raises:
            OrderError: the schedule computes the gradients of weights separately from those of inputs, and the stage
                reshards after forward.
        """
        context = self._unit.context
        if context is not None:
            context.check_split_backward()
            context.end_backward()


def register_stage(module: nn.Module, unit: Unit) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` find `unit`. Call it once for each sharded module."""
    set_fully_shard_state(module, StageState(unit))
