"""Sharded checkpoints: saved without communication, loaded into any sharding, never half there."""

from fsdp2.checkpoint.background import SaveHandle
from fsdp2.checkpoint.extra import RandomState, Reshardable, Stateful
from fsdp2.checkpoint.loading import Loaded, load
from fsdp2.checkpoint.retention import checkpoints, latest, prune
from fsdp2.checkpoint.saving import save
from fsdp2.checkpoint.scattering import load_from_rank
from fsdp2.checkpoint.sources import Source, concatenated, stored

__all__ = [
    "Loaded",
    "RandomState",
    "Reshardable",
    "SaveHandle",
    "Source",
    "Stateful",
    "checkpoints",
    "concatenated",
    "latest",
    "load",
    "load_from_rank",
    "prune",
    "save",
    "stored",
]
