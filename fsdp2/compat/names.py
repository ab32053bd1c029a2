"""The names that `install` replaces; strings only. Layer: compat.

`PUBLIC` are replaced wherever a module of torch holds them. No private name of torch's is: what real clients reach for
by a private path either works with torch's own objects (torchtitan's `FSDPMeshInfo`), or is asked of objects that are
ours (`MARKS`, `fully_shard.state`, `_get_fsdp_state`). `docs/compat.md` lists them all, and who asks.
"""

__all__ = ["HOME", "IMPLEMENTATION", "MARKS", "PUBLIC"]

# Where client code imports FSDP2 from.
HOME = "torch.distributed.fsdp"

# What torch's home exports of FSDP2; those that the installed torch does not have yet are skipped.
PUBLIC = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)

# torch's FSDP2 itself, which goes on working with its own objects.
IMPLEMENTATION = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.replicate_with_fsdp")

# Attributes that torch's `fully_shard` sets on every module it manages. Dynamo reads both; transformers reads the
# first, to keep ranks together in `generate`.
MARKS = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True}
