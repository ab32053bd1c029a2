"""Combined parallelism: meshes from degrees, and one call that applies all kinds."""

from fsdp2.parallel.applying import parallelize
from fsdp2.parallel.config import ParallelConfig
from fsdp2.parallel.context import apply_context_parallel
from fsdp2.parallel.context_sharding import next_token_labels, positions, shard_sequence, token_mean, unshard_sequence
from fsdp2.parallel.meshes import Meshes, build_meshes
from fsdp2.parallel.ring_attention import ring_attention

__all__ = [
    "Meshes",
    "ParallelConfig",
    "apply_context_parallel",
    "build_meshes",
    "next_token_labels",
    "parallelize",
    "positions",
    "ring_attention",
    "shard_sequence",
    "token_mean",
    "unshard_sequence",
]
