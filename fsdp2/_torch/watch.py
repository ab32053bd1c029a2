"""Private names of torch for `fsdp2.watch`. Ground layer."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process, including those of other libraries. No public function lists them."""
    return list(distributed_c10d._world.pg_map)


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort all collectives of `groups`, on backends that can. NCCL's communicators are aborted together, because the
    abort of one may wait for another (https://github.com/pytorch/pytorch/issues/119797). No public function does that.
    """
    nccl: Any = None
    if dist.is_nccl_available():
        with suppress(RuntimeError):
            nccl = groups[0]._get_backend(torch.device("cuda"))
    are_nccl = nccl is not None and isinstance(nccl, dist.ProcessGroupNCCL)
    if are_nccl:
        nccl._group_start()
    for group in groups:
        with suppress(RuntimeError):  # this backend cannot; the others still end
            group.abort()
    if are_nccl:
        nccl._group_end()
