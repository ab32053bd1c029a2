"""The names that `install` replaces; strings only. Layer: compat.

`PUBLIC` names are replaced in all modules of torch that hold them. No private name of torch's is replaced. What real
clients access through a private path either works with torch's own objects (torchtitan's `FSDPMeshInfo`), or is an
attribute of our objects (`MARKS`, `fully_shard.state`, `_get_fsdp_state`). `docs/compat.md` lists all of them, and
which clients use them.
"""

__all__ = ["HOME", "IMPLEMENTATION", "MARKS", "PUBLIC"]

# The module from which client code imports FSDP2.
HOME = "torch.distributed.fsdp"

# The FSDP2 names that it exports; those that the installed torch does not have yet are skipped.
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

# torch's FSDP2 itself, which continues to work with its own objects.
IMPLEMENTATION = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.replicate_with_fsdp")

# Attributes that torch's `fully_shard` sets on every module it manages. Dynamo reads both; transformers reads the
# first, to keep ranks together in `generate`.
MARKS = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True}
