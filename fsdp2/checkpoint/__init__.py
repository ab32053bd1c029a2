"""Sharded checkpoints: saved without communication, loaded into any sharding, either complete or absent."""

from fsdp2.checkpoint.loading import Loaded, load
from fsdp2.checkpoint.run.background import SaveHandle
from fsdp2.checkpoint.run.retention import checkpoints, latest, prune
from fsdp2.checkpoint.saving import save
from fsdp2.checkpoint.scattering import load_from_rank
from fsdp2.checkpoint.state.extra import RandomState, Reshardable, Stateful
from fsdp2.checkpoint.state.sources import Source, concatenated, stacked, stored
from fsdp2.checkpoint.tools.converting import convert
from fsdp2.checkpoint.tools.describing import Description, describe
from fsdp2.checkpoint.tools.inspection import Report, verify

__all__ = [
    "Description",
    "Loaded",
    "RandomState",
    "Report",
    "Reshardable",
    "SaveHandle",
    "Source",
    "Stateful",
    "checkpoints",
    "concatenated",
    "convert",
    "describe",
    "latest",
    "load",
    "load_from_rank",
    "prune",
    "save",
    "stacked",
    "stored",
    "verify",
]
