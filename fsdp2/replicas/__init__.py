"""Replicas that die and rejoin: jobs of their own, each with a whole model over its ranks, that average gradients.

`Replicas` stands in the training loop, a manager decides who takes part in a step: `ReplicaManager`, or torchft's. See
docs/unequal.md.
"""

from fsdp2.replicas.manager import ReplicaManager
from fsdp2.replicas.training import Replicas

__all__ = ["ReplicaManager", "Replicas"]
