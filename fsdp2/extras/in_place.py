"""In-place changes of unsharded parameters, outside of forward and backward, reach the shards. Layer: extras."""

import torch

from fsdp2.errors import OrderError
from fsdp2.runtime import hooks
from fsdp2.runtime.parameter import ManagedParameter


@torch.no_grad()
def copy_back(param: ManagedParameter) -> None:
    """Copy this rank's rows into the shard.

    Raises:
        OrderError: the all-gather sends something else than the shard.
    """
    if param.is_extended:
        raise OrderError(
            f"'{param.fqn}' was changed in place while it was unsharded, but its all-gather sends something other "
            "than its shard, so the change cannot reach it. Change it in full_params(model), or while sharded."
        )
    rows, shard = own_rows(param)
    rows = rows.to(shard.device)
    # If the compute dtype is narrower, elements that were not changed keep their full precision.
    same = rows == shard.to(rows.dtype)
    shard.copy_(torch.where(same, shard, rows.to(shard.dtype)))
    torch.autograd.graph.increment_version(param.sharded)


def own_rows(param: ManagedParameter) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the unsharded parameter, and the shard, with dims in memory order."""
    assert param.whole is not None
    rows = param.geometry.cut(param.geometry.from_memory(param.whole))
    return rows, param.geometry.to_memory(param.geometry.local_view(param.flat))


hooks.in_place["copy_back"] = copy_back
