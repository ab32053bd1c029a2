"""The device meshes of a `ParallelConfig`: one root mesh with named axes, and its parts. Layer: parallel.

Axes, outermost first. Those of degree 1 are left out (``dp_shard`` stays if it is the only data axis)::

    pp            dp_replicate   dp_shard   cp        tp
    pipeline      replicate      shard      context   tensor
                  \\________ `data` _______________/
                  \\________ `loss` _______________/   the same ranks on one axis

Each rank of the context axis holds a different part of the same sequences. For sharded data parallelism it is one more
rank with its own data: parameters are sharded over shard x context, and gradients averaged over them, as in torchtitan
and Accelerate.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._torch import concatenate_meshes, flatten_mesh, real_tensors
from fsdp2.errors import ArgumentError
from fsdp2.parallel.agreement import agree
from fsdp2.parallel.config import AXES, ParallelConfig

__all__ = ["Meshes", "build_meshes"]

# Keyed by the default process group, the device type and the degrees, since creating a mesh creates process groups.
_known: dict[tuple[dist.ProcessGroup, str, tuple[int, ...]], "Meshes"] = {}


@dataclass(frozen=True)
class Meshes:
    """The meshes of a config, and this rank's position in them. Created by `build_meshes`.

    Attributes:
        config: resolved: `shard` is a number.
        root: all ranks; its axes are those of the table above.
        data: for `fully_shard`: 1-D, or 2-D (replicate, shard), with context folded into the shard axis.
        loss: 1-D: the ranks of `data`, over which losses and token counts are averaged.
        tensor, context, pipeline: 1-D; None if the degree is 1.
    """

    config: ParallelConfig
    root: DeviceMesh
    data: DeviceMesh
    loss: DeviceMesh
    tensor: DeviceMesh | None
    context: DeviceMesh | None
    pipeline: DeviceMesh | None

    @property
    def data_ranks(self) -> int:
        """The number of different batches in a step."""
        return self.config.data_ranks

    @property
    def data_rank(self) -> int:
        """The index of this rank's batch. Equal on ranks that differ only in tensor, context and pipeline
        parallelism."""
        return self.loss.get_local_rank() // self.config.context

    @property
    def only_replicates(self) -> bool:
        """Whether `data` has only a replicate axis, so that each rank has whole parameters."""
        return self.config.replicate > 1 and self.config.shard == self.config.context == 1

    @property
    def stage(self) -> int:
        """This rank's position in its pipeline; 0 without one."""
        return 0 if self.pipeline is None else self.pipeline.get_local_rank()

    def stage_indices(self, num_stages: int | None = None, style: str = "loop") -> tuple[int, ...]:
        """The stages of a pipeline that this rank runs.

        Args:
            num_stages: the number of stages of the whole pipeline, a multiple of the pipeline degree (the default).
            style: how stages are distributed if a rank has several. ``"loop"``: rank r has r, r + n, ... (the
                interleaved schedules). ``"v"``: rank r has r and 2n - 1 - r (`ScheduleZBVZeroBubble`,
                `ScheduleDualPipeV`).

        Raises:
            ArgumentError: the stages cannot be distributed in this way.

        Example::

            stages = {index: make_stage(index) for index in meshes.stage_indices(num_stages=4)}
        """
        ranks = self.config.pipeline
        num_stages = ranks if num_stages is None else num_stages
        if style == "v" and num_stages == 2 * ranks:
            return (self.stage, num_stages - 1 - self.stage)
        if style != "loop" or num_stages < 1 or num_stages % ranks:
            raise ArgumentError(
                f'stage_indices: expected a multiple of the {ranks} pipeline ranks in style "loop", or two stages on '
                f'each in style "v"; got {num_stages} stages, {style!r}'
            )
        return tuple(range(self.stage, num_stages, ranks))


def build_meshes(config: ParallelConfig, device_type: str | None = None) -> Meshes:
    """The meshes of `config` over all ranks. Created once: a later call with the same degrees returns the same object.

    The first call creates process groups and is collective over all ranks: every rank must call it with the same
    config, before anything else communicates over the meshes. Needs an initialised default process group.

    Args:
        config: need not be resolved.
        device_type: "cuda", "cpu", ...; None: the accelerator of this machine, or the CPU.

    Raises:
        ArgumentError: no process group is initialised; the product of the degrees is not the number of ranks; or ranks
            have different configs, which is raised on all of them, before any collective.

    Example::

        dist.init_process_group()
        meshes = build_meshes(ParallelConfig(replicate=2, tensor=2))
        sampler = DistributedSampler(dataset, meshes.data_ranks, meshes.data_rank)
        model = parallelize(model, meshes.config)
    """
    if not dist.is_initialized():
        raise ArgumentError("build_meshes: there is no process group; call torch.distributed.init_process_group()")
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = accelerator.type if accelerator else "cpu"
    world = dist.group.WORLD
    assert world is not None
    config = config.resolve(dist.get_world_size())
    key = (world, device_type, tuple(config.degrees.values()))
    if key not in _known:
        facts = {"device type": device_type, **config.degrees}
        agree(world, "build_meshes", facts, "Start all ranks with the same config.")
        with real_tensors():
            _known[key] = _make(config, device_type)
    return _known[key] if _known[key].config == config else replace(_known[key], config=config)


def _make(config: ParallelConfig, device_type: str) -> Meshes:
    sizes = {AXES[name]: degree for name, degree in config.degrees.items() if degree > 1}
    if not any(AXES[name] in sizes for name in ("replicate", "shard", "context")):
        sizes = {axis: sizes.get(axis, 1) for axis in AXES.values() if axis in sizes or axis == AXES["shard"]}
    root = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def part(*axes: str) -> DeviceMesh | None:
        """The given axes that the root has, flattened into one axis; None if it has none."""
        there = tuple(axis for axis in axes if axis in sizes)
        return flatten_mesh(root[there]) if there else None

    replicate, shard, loss = part("dp_replicate"), part("dp_shard", "cp"), part("dp_replicate", "dp_shard", "cp")
    data = concatenate_meshes([replicate, shard]) if replicate and shard else replicate or shard
    assert data is not None and loss is not None
    return Meshes(config, root, data, loss, tensor=part("tp"), context=part("cp"), pipeline=part("pp"))
