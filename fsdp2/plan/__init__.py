"""Predicts a step: memory, communication and time of one rank, without ranks, devices or memory.

>>> from fsdp2.plan import MACHINES, Workload, predict
"""

from fsdp2.plan.alternatives import Comparison, compare
from fsdp2.plan.machine import MACHINES, Machine
from fsdp2.plan.prediction import Plan
from fsdp2.plan.rehearsal import predict
from fsdp2.plan.sequences import SequenceCost, sequence_cost
from fsdp2.plan.workload import Workload, default_loss

__all__ = [
    "MACHINES",
    "Comparison",
    "Machine",
    "Plan",
    "SequenceCost",
    "Workload",
    "compare",
    "default_loss",
    "predict",
    "sequence_cost",
]
