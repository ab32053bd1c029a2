"""The options of `fully_shard`, of its modules and of its surroundings as data, and what does not go together.

An `Option` says what it changes: the model, the arguments of `fully_shard`, calls on the sharded modules, the training
step. `options_case.py` trains with several of them, and `core/sharding/test_options.py` compares that with one process,
for every option alone and for every pair.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp2
import fsdp2.comm
from fsdp2 import CPUOffloadPolicy, ShardPlacementResult
from tests.helpers.options_model import BF16, OVERRIDE, Gathers, Scatters, norms_of
from tests.helpers.parity_models import mesh_2d

Call = Callable[[nn.Module, int], None]


Make = Callable[[nn.Module, int], Any]


@dataclass(frozen=True)
class Option:
    """One thing that a user may ask for.

    Attributes:
        name: in messages, and in the table of what does not go together.
        shard: arguments of `fully_shard`.
        made: more of them, made from (model, world_size).
        mp, zero: fields of the `MixedPrecisionPolicy` and of the `ZeroPolicy`.
        features: of the model.
        calls: made with (model, world_size) after sharding.
        fixed: named choices of which a case has one each: units, checkpoint, lane, optimizer, entry.
        step: what the training step does: see `Case.train_step`.
        scale: the gradients are this times the mean over ranks.
        rtol: of gradients and parameters.
        alone_on_4: its pairs are tested on 4 ranks too.
    """

    name: str
    shard: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Make] = field(default_factory=dict)
    mp: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    step: tuple[str, ...] = ()
    scale: float = 1.0
    rtol: float = 1e-4
    needs_4: bool = False

    @property
    def keys(self) -> set[str]:
        """The arguments that it gives, of which another option may not give the same."""
        return {*self.shard, *self.made, *self.mp, *self.zero, *self.fixed}


def units(model: nn.Module) -> list[Any]:
    """All sharded modules."""
    return [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]


def on_each(method: str, *args: Any) -> Call:
    """Call a method of every sharded module."""

    def call(model: nn.Module, world_size: int) -> None:
        for module in units(model):
            getattr(module, method)(*args)

    return call


def on_root(method: str, *args: Any) -> Call:
    """Call a method of the root."""
    return lambda model, world_size: getattr(model, method)(*args)


def divide(model: nn.Module, world_size: int) -> None:
    on_each("set_gradient_divide_factor", 2.0 * world_size)(model, world_size)


def prefetch_lists(model: Any, world_size: int) -> None:
    first, *rest = [module for module in [*model.parts] if isinstance(module, fsdp2.FSDPModule)]
    model.set_modules_to_forward_prefetch([first, *rest])
    model.set_modules_to_backward_prefetch([*reversed(rest), first])
    for module in rest:
        module.set_modules_to_backward_prefetch([first])


def halve(grads: Tensor, mesh: object = None) -> None:
    grads.mul_(0.5)


def largest_dim(param: nn.Parameter) -> Shard | None:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


def mesh_of_norms(model: nn.Module, world_size: int) -> Any:
    """The norms' weights are on a mesh of their own, which replicates."""
    mesh, own = mesh_2d(world_size, 1), set(norms_of(model).values())
    return lambda param: ShardPlacementResult(Shard(0), mesh) if param in own else None


def norms_in_fp32(model: nn.Module, world_size: int) -> Callable[[nn.Parameter], torch.dtype | None]:
    own = set(norms_of(model).values())
    return lambda param: param.dtype if param in own else None


def half(world_size: int) -> int:
    return world_size // 2


OPTIONS = [
    # --- arguments of fully_shard
    Option("reshard_true", {"reshard_after_forward": True}),
    Option("reshard_false", {"reshard_after_forward": False}),
    Option("reshard_int", {"reshard_after_forward": 2}, needs_4=True),
    Option("hsdp", made={"mesh": lambda model, size: mesh_2d(2, size // 2)}, needs_4=True),
    Option("one_replica", made={"mesh": lambda model, size: mesh_2d(1, size)}),
    Option("largest_dim", {"shard_placement_fn": largest_dim}),
    Option("mesh_of_norms", made={"shard_placement_fn": mesh_of_norms}),
    Option("offload", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    Option("zero_0", zero={"stage": 0}),
    Option("zero_1", zero={"stage": 1}),
    Option("zero_2", zero={"stage": 2}),
    Option("zero_3", zero={"stage": 3}),
    Option("secondary", zero={"secondary_shard_size": 2}, needs_4=True),
    Option("shard_size", zero={"shard_size": half}, needs_4=True),
    Option("replicas", zero={"shard_size": half, "shard_replicas": True}, needs_4=True),
    Option("keep_frozen", zero={"keep_frozen": True}, features=("frozen",)),
    Option("bf16", mp={"param_dtype": BF16, "reduce_dtype": torch.float32}, rtol=2e-2),
    Option("override", made={OVERRIDE: norms_in_fp32}, mp={"param_dtype": BF16}, rtol=2e-2),
    Option("fp16_reduce", mp={"reduce_dtype": torch.float16}, rtol=1e-2),
    Option("int8", mp={"all_gather_dtype": torch.int8}, rtol=1e-1),
    Option("bf16_wire", mp={"reduce_scatter_dtype": BF16}, rtol=2e-2),
    Option("output_dtype", mp={"output_dtype": BF16}, rtol=2e-2),
    # --- models
    Option("tied", features=("tied",)),
    Option("scalars", features=("scalars",)),
    Option("conv", features=("conv",)),
    Option("packed", features=("packed",)),
    Option("dtypes", features=("dtypes",)),
    Option("frozen", features=("frozen",)),
    Option("unused", features=("unused",), calls=(on_root("set_reduce_scatter_unused_params", True),)),
    # --- units
    Option("list_units", fixed={"units": "list"}),
    Option("auto_shard", fixed={"units": "auto"}),
    Option("deepcopy", fixed={"copy": True}),
    Option("reentrant", fixed={"use_reentrant": True}),
    Option("non_reentrant", fixed={"use_reentrant": False}),
    # --- calls
    Option("custom_gather", calls=(lambda m, size: on_each("set_custom_all_gather", Gathers())(m, size),)),
    Option("custom_scatter", calls=(lambda m, size: on_each("set_custom_reduce_scatter", Scatters())(m, size),)),
    Option("separate_group", calls=(on_root("set_separate_reduce_scatter_group"),)),
    Option("divide_factor", calls=(divide,), scale=0.5),
    Option("force_sum", calls=(on_each("set_force_sum_reduction_for_comms", True),)),
    Option("all_reduce_hook", calls=(on_each("set_all_reduce_hook", halve),), scale=0.5),
    Option("input_buffers", calls=(on_root("set_reduce_scatter_max_input_buffers", 3),)),
    Option("auto_prefetch", calls=(on_root("set_auto_forward_prefetch", True),)),
    Option("prefetch_lists", calls=(prefetch_lists,)),
    Option("keep_storage", calls=(on_root("set_keep_unsharded_storage", True),)),
    Option("no_unshard_in_backward", calls=(lambda m, size: m.inp.set_unshard_in_backward(False),)),
    # --- the step
    Option("method", fixed={"entry": "encode"}),
    Option("manual", calls=(on_root("set_manual_backward_finalization", True),), step=("manual",)),
    Option("no_sync", step=("no_sync",)),
    Option("partial", step=("partial",), needs_4=True),
    Option("is_last", step=("is_last",)),
    Option("keep_after_backward", step=("keep",)),
    Option("local_optimizer", step=("local_optimizer",)),
    Option("clip", step=("clip",)),
    Option("full_params", step=("full_params",)),
    Option("evaluate", step=("evaluate",)),
    Option("direct_lane", fixed={"lane": "direct"}),
    Option("flat_comm", fixed={"lane": "flat"}),
]


BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Refusal:
    """Pairs, each of the first names with each of the second, that `fully_shard` or a setter refuses.

    Attributes:
        error, match: of what is raised.
        why: in a few words.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    error: type[fsdp2.FSDPError]
    match: str
    why: str


RESHARD = ("reshard_true", "reshard_false", "reshard_int")


ONE_MESH = ("custom_gather", "custom_scatter")


REFUSALS = [
    Refusal(RESHARD, ("zero_0", "zero_1", "zero_2", "secondary"), fsdp2.ArgumentError, "give only one", "said twice"),
    Refusal(
        ("hsdp", "one_replica"),
        ("shard_size", "replicas"),
        fsdp2.ArgumentError,
        "shard_size makes the mesh",
        "two meshes",
    ),
    Refusal(
        ("zero_0", "zero_1", "zero_2"),
        ("secondary", "replicas"),
        fsdp2.ArgumentError,
        "need stage 3",
        "parameters that stay whole have no second copy and are not cut further",
    ),
    Refusal(("zero_0",), ("shard_size",), fsdp2.ArgumentError, "shards nothing", "nothing is sharded"),
    Refusal(("secondary",), ("replicas",), fsdp2.ArgumentError, "not both", "two ways to spend the replicas' memory"),
    Refusal(
        ("replicas",), ("int8",), fsdp2.UnsupportedError, "shard_replicas", "integers would be gathered in two steps"
    ),
    Refusal(
        ("mesh_of_norms",),
        ONE_MESH,
        fsdp2.ArgumentError,
        "on one mesh",
        "a custom collective serves one mesh; here a unit has two",
    ),
    Refusal(
        ("reshard_int",), ("mesh_of_norms",), fsdp2.ArgumentError, "expected a divisor", "that mesh shards over 1 rank"
    ),
    Refusal(("fp16_reduce",), ("bf16_wire",), fsdp2.ArgumentError, "narrower", "16 bits are not narrower than 16"),
    Refusal(("bf16_wire",), ("custom_scatter",), fsdp2.ArgumentError, "leave one out", "both say how rows travel"),
]


REFUSED = {frozenset((a, b)): each for each in REFUSALS for a in each.first for b in each.second}


# Pairs that mean nothing, with the reason.
SKIPPED = {
    frozenset(("list_units", "no_unshard_in_backward")): "the input layer is no unit of its own",
    frozenset(("auto_shard", "no_unshard_in_backward")): "the input layer is no unit of its own",
}
