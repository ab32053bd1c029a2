"""Clipping and optimizers on local shards. Layer: above the API; imports no checkpointing."""

from fsdp2.optim import state as _state  # noqa: F401  # registers these optimizers with checkpoints
from fsdp2.optim.adopt import adopt_optimizer
from fsdp2.optim.asleep import asleep, sleep, wake
from fsdp2.optim.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from fsdp2.optim.in_backward import StepInBackward, step_in_backward
from fsdp2.optim.local import LocalOptimizer, local_optimizer
from fsdp2.optim.matrix import MatrixOptimizer, matrix_optimizer
from fsdp2.optim.offloaded import OffloadedOptimizer, offload_optimizer
from fsdp2.optim.owned import OwnedTensor

__all__ = [
    "LocalOptimizer",
    "MatrixOptimizer",
    "OffloadedOptimizer",
    "OwnedTensor",
    "StepInBackward",
    "adopt_optimizer",
    "asleep",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "local_optimizer",
    "matrix_optimizer",
    "offload_optimizer",
    "sleep",
    "step_in_backward",
    "wake",
]
