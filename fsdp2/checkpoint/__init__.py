"""Sharded checkpoints: saved without communication, loaded into any sharding, never half there."""

from fsdp2.checkpoint.background import SaveHandle
from fsdp2.checkpoint.extra import RandomState, Reshardable, Stateful
from fsdp2.checkpoint.loading import Loaded, load
from fsdp2.checkpoint.retention import checkpoints, latest, prune
from fsdp2.checkpoint.saving import save

__all__ = [
    "Loaded",
    "RandomState",
    "Reshardable",
    "SaveHandle",
    "Stateful",
    "checkpoints",
    "latest",
    "load",
    "prune",
    "save",
]
