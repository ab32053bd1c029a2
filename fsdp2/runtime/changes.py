"""Changes that a user makes in place: of unsharded parameters (`Changes`), and of shards whose gathered values were
kept (`agrees`). Layer: runtime, below the param group.

An unsharded parameter has a version counter of its own, which a gather does not touch. A shard has none that counts all
changes: `tensor.data`, and operators on lists of tensors, leave that of a DTensor as it was.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2._torch import is_fake, version
from fsdp2.comm.base import all_reduce
from fsdp2.errors import OrderError
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gradients import Gradients
from fsdp2.runtime.parameter import ManagedParameter


class Changes:
    """Finds changes in place of a group's unsharded parameters."""

    def __init__(self, params: Sequence[ManagedParameter], gradients: Gradients):
        self._params = params
        self._gradients = gradients
        self._versions: list[int] = []  # when they last had the values of the shards

    def forget(self) -> None:
        """They have the values of the shards, or count as if they had."""
        self._versions = list(map(version, self._gradients.unsharded))

    def found(self) -> list[ManagedParameter]:
        """The parameters that were changed."""
        now = list(map(version, self._gradients.unsharded))
        if now == self._versions:
            return []
        return [param for param, new, old in zip(self._params, now, self._versions, strict=True) if new != old]

    def check_none(self) -> None:
        """In forward or backward: raise if a parameter was changed."""
        if list(map(version, self._gradients.unsharded)) != self._versions:
            raise OrderError(
                f"'{self.found()[0].fqn}' was changed in place within the forward or backward of its unit, as "
                "Embedding(max_norm=...) does. Each rank sees other data, so ranks may differ in the change, and no "
                "shard has it. Change parameters between forward and backward, the same on all ranks. After this "
                "error call model.reset_iter_state(), which drops the change."
            )

    def adopt(self, changed: Sequence[ManagedParameter]) -> None:
        """Copy the changes of these parameters into their shards.

        Raises:
            OrderError: the all-gather of one of them sends something other than its shard.
        """
        for param in changed:
            if not param.aliases:
                _copy_back(param)
        self.forget()


@torch.no_grad()
def _copy_back(param: ManagedParameter) -> None:
    if param.is_extended:
        raise OrderError(
            f"'{param.fqn}' was changed in place while it was unsharded, but its all-gather sends something other "
            "than its shard, so the change cannot reach it. Change it in full_params(model), or while sharded."
        )
    rows, shard = _own_rows(param)
    rows = rows.to(shard.device)
    # Where the compute dtype is a shorter one, elements that were not changed keep all their digits.
    same = rows == shard.to(rows.dtype)
    shard.copy_(torch.where(same, shard, rows.to(shard.dtype)))
    torch.autograd.graph.increment_version(param.sharded)


def _own_rows(param: ManagedParameter) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the unsharded parameter, and the shard, with dims in memory order."""
    assert param.whole is not None
    rows = param.geometry.cut(param.geometry.from_memory(param.whole))
    return rows, param.geometry.to_memory(param.geometry.local_view(param.flat))


def agrees(params: Sequence[ManagedParameter], channel: Channel, is_same: bool) -> bool:
    """Whether the shards of all ranks have the values that were gathered and kept. Collective over the shard group: one
    number. The host waits for it, since what is gathered next depends on it.

    Args:
        is_same: what this rank knows without a look.
    """
    group = channel.roles.shard_group
    assert group is not None
    if is_fake(params[0].flat):
        return is_same
    differ = not (is_same and all(map(_has_shard, params)))
    flag = torch.tensor([differ], dtype=torch.int32, device=channel.roles.device)
    all_reduce(flag, channel.what("comparison of kept values", group), dist.ReduceOp.MAX)
    return not flag.item()


def _has_shard(param: ManagedParameter) -> bool:
    rows, shard = _own_rows(param)
    return torch.equal(rows, shard.to(rows.device, rows.dtype))
