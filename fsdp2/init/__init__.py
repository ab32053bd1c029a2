"""Initialises sharded models with values that do not depend on the number of ranks. Layer: above the API."""

from fsdp2.init.materialize import materialize
from fsdp2.init.seeded import Mode, seeded

__all__ = ["Mode", "materialize", "seeded"]
