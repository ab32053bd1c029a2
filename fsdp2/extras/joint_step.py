"""`agree_on_step`: if one rank raises, all ranks raise, and can continue with the next batch. Layer: extras."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.errors import ArgumentError, CollectiveError, OrderError, StepError
from fsdp2.runtime.root import units_below
from fsdp2.watch.current import current
from fsdp2.watch.joint_step import JointStep
from fsdp2.watch.settings import settings
from fsdp2.watch.watchdog import watchdog


@contextmanager
def agree_on_step(*models: nn.Module) -> Iterator[None]:
    """Wrap the forwards and backwards of one step: either all ranks complete them, or none does.

    If one rank raises (out of memory, a bad batch), the others stop before a later communication, within about half
    a second. All ranks leave the block with a `StepError` that carries the message of the first rank that failed. By
    then gradients are dropped, parameters are sharded, the random number generators of the CPU and of the accelerator
    are as before the block, and the process groups are usable. Catch the error and continue with the next batch, which
    gives the same numbers as if the failed step had not run. Other changes made in the block, such as the running
    means of batch norm, stay.

    Every rank of the default process group must enter it, equally often. Put all microbatches of a step into one block,
    and clip and step after it. It costs one exchange of a few bytes through the store of the process group.

    Args:
        models: all roots that communicate in the block, or modules that contain them; at least one. After a failure the
            gradients of their parameters are dropped, including those of backwards before the block.

    Raises:
        ArgumentError: no models were given.
        StepError: a rank has raised an exception; raised on all ranks.
        CollectiveError: a rank has died, or the ranks cannot stop at the same place: one is in communication that is
            not fsdp2's, such as tensor parallelism, or in a collective that the failed rank has never run, because it
            failed in its first step.
        OrderError: on entry: the block is nested in another one; `safety(False)`; or, on one rank only, its watchdog
            has lost the store and ended.

    Example::

        for batch in batches:
            try:
                with fsdp2.agree_on_step(model):
                    model(batch).sum().backward()
            except fsdp2.StepError as error:
                print(f"skipped a batch: {error}")
                continue
            optimizer.step()
            optimizer.zero_grad()
    """
    if not models:
        raise ArgumentError(
            "agree_on_step: expected the models that communicate in the block, got none: their "
            "gradients are reset if a rank fails"
        )
    if current.step is not None:
        raise OrderError("agree_on_step: within another agree_on_step")
    dog = watchdog() if settings().is_on else None
    if dog is None and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        raise OrderError("agree_on_step: needs ranks that can ask each other: safety(True), and a store they share")
    cpu_state = torch.get_rng_state()
    device_state = torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None

    def reset() -> None:
        for model in models:
            # By unit, because the model may wrap its roots, as torch.compile does.
            for step in dict.fromkeys(unit.step for unit in units_below(model)):
                if step is not None:
                    step.reset()
            for param in model.parameters():
                param.grad = None
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            torch.get_device_module().set_rng_state(device_state)

    step = None if dog is None else JointStep(dog)
    current.step = step
    try:
        try:
            yield
        except CollectiveError:
            raise
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # their variables hold the memory that ran out
            rank = dist.get_rank() if dist.is_initialized() else 0
            why = f"rank {rank}: {type(error).__name__}: {error}"
            if step is None:
                reset()
            else:
                why = step.stop(why, reset)
            raise StepError(why) from error
        if step is not None and not step.succeed():
            raise StepError(step.stop("", reset))
    finally:
        current.step = None
