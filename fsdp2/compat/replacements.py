"""The replacements for torch's names. Layer: compat.

Most are the objects of fsdp2 themselves. `fully_shard` also leaves the marks that torch's leaves for others.
"""

from functools import wraps
from typing import Any

import torch.distributed.fsdp
from torch import nn

from fsdp2 import api, policies
from fsdp2 import module as modules
from fsdp2.compat.names import MARKS, PUBLIC

__all__ = ["fully_shard", "public_replacements"]

_torch_fully_shard: Any = torch.distributed.fsdp.fully_shard


@wraps(api.fully_shard)
def fully_shard(module: Any, **kwargs: Any) -> Any:
    """See `fsdp2.fully_shard`. Marks all modules below as managed, as torch's does."""
    sharded = api.fully_shard(module, **kwargs)
    for root in [module] if isinstance(module, nn.Module) else module:
        for each in root.modules():
            each.__dict__.update(MARKS)
    return sharded


# torch's pipelining calls this for a stage. torch's own function finds our answer, which `fsdp2.fully_shard` leaves
# there.
fully_shard.state = _torch_fully_shard.state  # type: ignore[attr-defined]
fully_shard.__module__ = __name__  # where pickle finds it


def public_replacements() -> dict[str, Any]:
    """Our object for each name."""
    ours: dict[str, Any] = {"fully_shard": fully_shard}
    for home in (modules, policies):
        ours |= {name: vars(home)[name] for name in PUBLIC if name in vars(home) and name not in ours}
    return ours
