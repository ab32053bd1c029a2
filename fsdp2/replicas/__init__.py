"""Replicas that die and rejoin: separate jobs, each with a whole model over its ranks, that average gradients.

`Replicas` is used in the training loop. A manager, `ReplicaManager` or torchft's, decides which replicas take part in a
step. See docs/unequal.md.
"""

from fsdp2.replicas.manager import ReplicaManager
from fsdp2.replicas.training import Replicas

__all__ = ["ReplicaManager", "Replicas"]
