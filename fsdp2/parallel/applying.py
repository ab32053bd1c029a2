"""`parallelize`: all kinds of parallelism, applied to one model in the right order. Layer: parallel.

Everything that depends only on config and model is checked before the model changes and before the first communication,
identically on all ranks.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp2.api import fully_shard
from fsdp2.arguments import parameter_set
from fsdp2.errors import ArgumentError, MisuseError
from fsdp2.extras.host_memory import CPUOffloadPolicy
from fsdp2.extras.offload import Offload
from fsdp2.extras.zero import ZeroPolicy
from fsdp2.parallel.blocks import Blocks, recompute_and_compile, units_of
from fsdp2.parallel.config import OFFLOADS, ParallelConfig
from fsdp2.parallel.context import apply_context_parallel
from fsdp2.parallel.meshes import Meshes, build_meshes
from fsdp2.parallel.tensor import TensorPlan, apply_tensor_parallel, check_tensor_plan
from fsdp2.policies import MixedPrecisionPolicy
from fsdp2.runtime.unit import unit_of

__all__ = ["parallelize"]

Model = TypeVar("Model", bound=nn.Module)

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(
    model: Model,
    config: ParallelConfig,
    *,
    meshes: Meshes | None = None,
    blocks: Blocks | Sequence[Blocks] | None = None,
    tp_plan: TensorPlan | None = None,
    **options: Any,
) -> Model:
    """Apply `config` to `model`, in place: tensor parallelism, context parallelism, activation checkpointing,
    compilation, and `fully_shard` of each block and of the model.

    This order is necessary: layers are split before their parameters are sharded over the other ranks; recomputation
    includes the communication of tensor and context parallelism; and sharding is outermost, so that a block's
    parameters are gathered once for everything that happens in it.

    Every rank must call it on the same model, before optimizers are created. Collective: it creates the meshes if they
    do not exist yet, and with tensor parallelism sends the values of all parameters and buffers from the first rank of
    each tensor group to the others. For models on the meta device no values are sent; give them values afterwards
    (`to_empty`, then `fsdp2.init`).

    With pipeline parallelism, `model` is one stage, and each rank calls this on the stages that `Meshes.stage_indices`
    returns; `torch.distributed.pipelining` runs them.

    Args:
        model: a plain model; it becomes the root unit.
        config: need not be resolved.
        meshes: from `build_meshes` with the same degrees; None creates them.
        blocks: which modules are blocks: a policy (`by_class`, ...), classes, modules, names of classes or of modules
            (``"layers.*"``), or a list of these. None: those named in the config, otherwise those that
            `transformer_blocks` finds.
        tp_plan: styles of `torch.distributed.tensor.parallel`, or their names, by module name. None: the model's own
            attribute `tp_plan`. Without tensor parallelism it has no effect.
        options: options of `fully_shard`, for each block and the model (`mp_policy`, `offload_policy`,
            `reshard_after_forward`, `zero`, `ignored_params`, `shard_placement_fn`); they override the config.

    Returns:
        `model`, the same object.

    Raises:
        ArgumentError: the product of the degrees is not the number of ranks; no blocks are found, or `blocks` matches
            none; the tensor plan is missing, or does not fit; or an option contradicts the config.
        MisuseError: the model is already sharded.
        UnsupportedError: an unknown style of tensor parallelism.

    Example::

        config = ParallelConfig.load("run.toml")
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        model = parallelize(Model(), config, tp_plan=plan)
        optimizer = torch.optim.AdamW(model.parameters())

    Source: the order is that of torchtitan's `parallelize_llama`,
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/infra/parallelize.py.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"parallelize: expected an nn.Module, got {type(model)}")
    if any(unit_of(module) is not None for module in model.modules()):
        raise MisuseError("parallelize: the model, or a part of it, is sharded already; call it once, on a plain model")
    signature(fully_shard).bind(model, **options)  # raise a TypeError for an unknown option now, not later
    units = units_of(model, (config.blocks or None) if blocks is None else blocks)
    chosen = [model.get_submodule(unit.fqn) for unit in units[:-1]]
    styles = None
    if config.tensor > 1:
        styles = check_tensor_plan(model, tp_plan, config.tensor, is_stage=config.pipeline > 1)
    if meshes is None:
        meshes = build_meshes(config)
    elif (degrees := config.resolve(meshes.root.size()).degrees) != meshes.config.degrees:
        raise ArgumentError(
            f"parallelize: the meshes have the degrees {meshes.config.degrees}, but the config has {degrees}"
        )
    options = _shard_options(config, meshes, options)

    if styles is not None and meshes.tensor is not None:
        apply_tensor_parallel(model, meshes.tensor, styles)
    if meshes.context is not None:
        apply_context_parallel(model, meshes.context, is_stage=meshes.pipeline is not None)
    recompute_and_compile(chosen, config.checkpoint_every, config.compile)
    for unit in units:
        fully_shard(model.get_submodule(unit.fqn), **{**options, **unit.options})
    return model


def _shard_options(config: ParallelConfig, meshes: Meshes, given: dict[str, Any]) -> dict[str, Any]:
    """The options of `fully_shard`: those of the config, overridden by `given`."""
    if own := {"mesh", "dp_mesh_dims"}.intersection(given):
        raise ArgumentError(f"parallelize: makes the mesh from the config's degrees; leave {', '.join(own)} out")
    options: dict[str, Any] = {"mesh": meshes.data}
    if config.mixed_precision != "no":
        options["mp_policy"] = MixedPrecisionPolicy(_COMPUTE[config.mixed_precision], torch.float32)
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=meshes.data.device_type != "cpu")
    if (offload := OFFLOADS[config.offload]) is not None:
        options["offload_policy"] = Offload(**offload, tier=config.offload_tier)
    if config.reshard_after_forward is not None:
        options["reshard_after_forward"] = config.reshard_after_forward
    elif config.pipeline > 1 and "zero" not in given and not meshes.only_replicates:
        options["reshard_after_forward"] = False
    options.update(given)
    if "ignored_params" in given:
        options["ignored_params"] = parameter_set(given["ignored_params"])  # an iterator can be read only once
    if meshes.only_replicates:
        zero, reshard = options.get("zero"), options.get("reshard_after_forward")
        if (zero is not None and zero.stage != 0) or reshard is not None:
            raise ArgumentError(
                "parallelize: shard = 1 shards nothing, which is stage 0 of ZeRO, where reshard_after_forward has no "
                f"meaning; got zero={zero}, reshard_after_forward={reshard}. Leave them out, or choose shard > 1"
            )
        options["zero"] = ZeroPolicy(stage=0)
    return options
