"""fsdp2: per-parameter sharded data parallelism for PyTorch."""

from fsdp2.api import fully_shard
from fsdp2.errors import ArgumentError, CollectiveError, FSDPError, MisuseError, OrderError, UnsupportedError
from fsdp2.mesh import ShardPlacementResult
from fsdp2.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from fsdp2.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "ArgumentError",
    "CPUOffloadPolicy",
    "CollectiveError",
    "DataParallelMeshDims",
    "FSDPError",
    "FSDPModule",
    "MisuseError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OrderError",
    "ShardPlacementResult",
    "UnshardHandle",
    "UnsupportedError",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
