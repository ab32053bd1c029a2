"""fsdp2: per-parameter sharded data parallelism for PyTorch.

Further modules are ``fsdp2.checkpoint``, ``fsdp2.init``, ``fsdp2.optim``, ``fsdp2.parallel``, ``fsdp2.plan``,
``fsdp2.trace``, ``fsdp2.compat`` and ``fsdp2.events``. All are available after ``import fsdp2``; some are loaded on
first use. ``fsdp2.__version__`` is the version.

The public names are those in ``__all__`` of these modules, and of ``fsdp2.events`` only ``Event`` and ``record``. All
other modules and names may change or disappear without notice.
"""

import importlib
import importlib.metadata
import typing

from fsdp2 import checks as _checks  # noqa: F401  # they register themselves in the runtime's hooks
from fsdp2.api import fully_shard
from fsdp2.errors import (
    ArgumentError,
    CheckpointError,
    CollectiveError,
    CorruptError,
    FSDPError,
    MismatchError,
    MisuseError,
    OrderError,
    ReplacedError,
    StepError,
    UnsupportedError,
)
from fsdp2.extras import all_reduce_hook as _all_reduce_hook  # noqa: F401  # adds a setter
from fsdp2.extras import comm_memory as _comm_memory  # noqa: F401  # adds two setters
from fsdp2.extras import copying as _copying  # noqa: F401
from fsdp2.extras import gather_hooks as _gather_hooks  # noqa: F401
from fsdp2.extras import gradients as _gradients  # noqa: F401  # unused parameters, `register_hook`
from fsdp2.extras import in_place as _in_place  # noqa: F401
from fsdp2.extras import int8 as _int8  # noqa: F401  # adds an `all_gather_dtype`
from fsdp2.extras import kept as _kept  # noqa: F401
from fsdp2.extras import levels as _levels  # noqa: F401  # units under transforms of `torch.func`
from fsdp2.extras import narrow as _narrow  # noqa: F401  # adds two `reduce_scatter_dtype`s
from fsdp2.extras import one_block as _one_block  # noqa: F401
from fsdp2.extras import pipelining as _pipelining  # noqa: F401
from fsdp2.extras import prediction as _prediction  # noqa: F401
from fsdp2.extras import smaller as _smaller  # noqa: F401
from fsdp2.extras.activations import ActivationOffload, offload_activations
from fsdp2.extras.balance import balance
from fsdp2.extras.custom_comm import AllGather, ReduceScatter
from fsdp2.extras.finalization import GradientReductionHandle
from fsdp2.extras.forward_methods import register_fsdp_forward_method
from fsdp2.extras.full_params import full_params
from fsdp2.extras.host_memory import CPUOffloadPolicy
from fsdp2.extras.joint_step import agree_on_step
from fsdp2.extras.offload import Offload
from fsdp2.extras.optional import OptionalPolicy
from fsdp2.extras.shared_reductions import share_comm_ctx
from fsdp2.extras.spmd import DataParallelMeshDims
from fsdp2.extras.tiles import tile
from fsdp2.extras.unequal import join
from fsdp2.extras.weight_sets import WeightSets, weight_sets
from fsdp2.extras.zero import ZeroPolicy
from fsdp2.init import allocation as _allocation  # noqa: F401  # memory for units on the meta device
from fsdp2.mesh import ShardPlacementResult
from fsdp2.module import (
    FSDPModule,
    UnshardHandle,
)
from fsdp2.optim import (
    LocalOptimizer,
    OffloadedOptimizer,
    StepInBackward,
    adopt_optimizer,
    asleep,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
    local_optimizer,
    matrix_optimizer,
    offload_optimizer,
    sleep,
    step_in_backward,
    wake,
)
from fsdp2.policies import (
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fsdp2.replicas import ReplicaManager, Replicas
from fsdp2.transfer import Weights, weights
from fsdp2.watch import exchange as _exchange  # noqa: F401
from fsdp2.watch.settings import safety
from fsdp2.wrap import WrapReport, auto_shard, by_class, by_predicate, by_size, transformer_blocks

__all__ = [
    "ActivationOffload",
    "AllGather",
    "ArgumentError",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CollectiveError",
    "CorruptError",
    "DataParallelMeshDims",
    "FSDPError",
    "FSDPModule",
    "GradientReductionHandle",
    "LocalOptimizer",
    "MismatchError",
    "MisuseError",
    "MixedPrecisionPolicy",
    "Offload",
    "OffloadPolicy",
    "OffloadedOptimizer",
    "OptionalPolicy",
    "OrderError",
    "ReduceScatter",
    "ReplacedError",
    "ReplicaManager",
    "Replicas",
    "ShardPlacementResult",
    "StepError",
    "StepInBackward",
    "UnshardHandle",
    "UnsupportedError",
    "WeightSets",
    "Weights",
    "WrapReport",
    "ZeroPolicy",
    "adopt_optimizer",
    "agree_on_step",
    "asleep",
    "auto_shard",
    "balance",
    "by_class",
    "by_predicate",
    "by_size",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "full_params",
    "fully_shard",
    "get_total_norm",
    "join",
    "local_optimizer",
    "matrix_optimizer",
    "offload_activations",
    "offload_optimizer",
    "register_fsdp_forward_method",
    "safety",
    "share_comm_ctx",
    "sleep",
    "step_in_backward",
    "tile",
    "transformer_blocks",
    "wake",
    "weight_sets",
    "weights",
]

if typing.TYPE_CHECKING:
    from fsdp2 import checkpoint as checkpoint
    from fsdp2 import compat as compat
    from fsdp2 import events as events
    from fsdp2 import init as init
    from fsdp2 import parallel as parallel
    from fsdp2 import plan as plan
    from fsdp2 import trace as trace

    __version__: str

_ON_DEMAND = ("checkpoint", "compat", "events", "init", "parallel", "plan", "trace")


def __getattr__(name: str) -> object:
    if name in _ON_DEMAND:
        return importlib.import_module(f"fsdp2.{name}")
    if name == "__version__":
        return importlib.metadata.version("fsdp2")
    raise AttributeError(f"module 'fsdp2' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND, "__version__"})
