"""`ZeroPolicy`: the stages of ZeRO. Layer: extras.

The core asks it for the mesh, the roles of its axes, and the settings of backwards before the last one of a step.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._torch import real_tensors
from fsdp2.errors import ArgumentError
from fsdp2.extras import shard_replicas as _shard_replicas  # noqa: F401  # implements that
from fsdp2.mesh import MeshRoles, default_mesh
from fsdp2.policies import UnitSettings, boolean
from fsdp2.runtime import hooks

_meshes: dict[tuple[dist.ProcessGroup, int], DeviceMesh] = {}


@dataclass(frozen=True)
class ZeroPolicy:
    """What is sharded, and when: the stages of ZeRO in one argument of `fully_shard`.

    =====  =============================  ==========================================================================
    stage  sharded                        parameters stay gathered                gradients are reduced
    =====  =============================  ==========================================================================
    0      nothing (DDP)                  always                                  in the last backward of a step
    1      optimizer state                from a step's first to its last use     in the last backward of a step
    2      and gradients                  from a step's first to its last use     in each backward
    3      and parameters                 while their unit computes               in each backward
    =====  =============================  ==========================================================================

    If a step has several backwards, call ``model.set_is_last_backward(False)`` before all but the last. With a
    replicate axis, the all-reduce over it also waits for the last backward.

    Attributes:
        stage: 0 to 3.
        shard_size: the number of ranks over which parameters are sharded; they are replicated over the others (HSDP,
            MiCS). The policy creates the mesh, so pass none to `fully_shard`. None: given by the mesh, by default all
            ranks.
        secondary_shard_size: with stage 3, the number of ranks that together hold a second copy between forward and
            backward, so that backward gathers only among them (ZeRO++'s hpZ).
        shard_replicas: with stage 3 and a replicate axis, also shard the parameters, their gradients and the optimizer
            state over the replicas. A step gathers them once over the replicas; all other gathers stay within one.
        keep_frozen: parameters that do not require gradients when `fully_shard` is called stay gathered after their
            first use (LoRA on a base model that fits). ``"host"``: each rank keeps them in host memory, whole and in
            the compute dtype (page-locked if there is an accelerator), and copies them from there instead of gathering.
            Then change their sharded form only by `load_state_dict`, operators on the DTensors, or in `full_params`,
            and on all ranks; they are gathered again after that.

    Raises:
        ArgumentError: a stage that does not exist, or fields that contradict each other.

    Example::

        for block in model.blocks:
            fully_shard(block, zero=ZeroPolicy(stage=2))
        fully_shard(model, zero=ZeroPolicy(stage=2))

    Source: ZeRO, https://arxiv.org/abs/1910.02054; ZeRO++, https://arxiv.org/abs/2306.10209; MiCS,
    https://arxiv.org/abs/2205.00119.
    """

    stage: int = 3
    shard_size: int | None = None
    secondary_shard_size: int | None = None
    shard_replicas: bool = False
    keep_frozen: bool | Literal["host"] = False

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ArgumentError(f"ZeroPolicy: expected a stage of 0, 1, 2 or 3, got {self.stage!r}")
        _check_size("shard_size", self.shard_size)
        _check_size("secondary_shard_size", self.secondary_shard_size)
        boolean("ZeroPolicy: shard_replicas", self.shard_replicas)
        if not isinstance(self.keep_frozen, bool) and self.keep_frozen != "host":
            raise ArgumentError(f"ZeroPolicy: keep_frozen: expected a bool or 'host', got {self.keep_frozen!r}")
        if self.stage != 3 and (self.secondary_shard_size is not None or self.shard_replicas):
            raise ArgumentError(
                f"ZeroPolicy: secondary_shard_size and shard_replicas need stage 3, since parameters stay whole in "
                f"stage {self.stage}"
            )
        if self.secondary_shard_size is not None and self.shard_replicas:
            raise ArgumentError("ZeroPolicy: give secondary_shard_size or shard_replicas, not both")
        if self.stage == 0 and self.shard_size is not None:
            raise ArgumentError("ZeroPolicy: stage 0 shards nothing, so shard_size has no meaning")
        if self.stage == 0 and self.keep_frozen == "host":
            raise ArgumentError("ZeroPolicy: stage 0 gathers nothing, so there is nothing to keep in host memory")

    def mesh(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """All ranks as (replicate, shard) with a `shard_size`, the same mesh for every unit."""
        if self.shard_size is None:
            return mesh
        if mesh is not None:
            raise ArgumentError(
                "ZeroPolicy: shard_size makes the mesh; pass mesh=None, or shard_size=None and a 2-D mesh"
            )
        whole = default_mesh()
        key, size = (whole.get_group(), self.shard_size), whole.size()
        if size % self.shard_size != 0:
            raise ArgumentError(
                f"ZeroPolicy: expected a shard_size that divides the {size} ranks, got {self.shard_size}"
            )
        if key not in _meshes:
            with real_tensors():
                shape, names = (size // self.shard_size, self.shard_size), ("replicate", "shard")
                _meshes[key] = init_device_mesh(whole.device_type, shape, mesh_dim_names=names)
        return _meshes[key]

    def roles(self, roles: MeshRoles) -> MeshRoles:
        """Stage 0: all ranks hold whole parameters. `shard_replicas`: replicas share each shard."""
        if self.stage == 0:
            return roles.replicated()
        if not self.shard_replicas:
            return roles
        if roles.replicate_axis is None or roles.shard_axis is None:
            raise ArgumentError(
                "ZeroPolicy: shard_replicas cuts the shards over a replicate axis too, but the mesh has none: "
                f"{roles.mesh}. Pass a 2-D mesh (replicate, shard), or shard_size."
            )
        return replace(roles, sharded_replicas=True)

    def reshard_after_forward(self, value: bool | int | None) -> bool | int | None:
        """The size of the secondary shards; below stage 3 False, since parameters stay gathered."""
        if self.stage == 3 and self.secondary_shard_size is None:
            return value
        if value is not None:
            raise ArgumentError(
                f"fully_shard: got reshard_after_forward={value!r} and {self}, which sets it too; give only one"
            )
        return self.secondary_shard_size if self.stage == 3 else False

    def before_last(self, settings: UnitSettings) -> UnitSettings:
        """See the table above."""
        return replace(
            settings,
            requires_gradient_sync=settings.requires_gradient_sync and self.stage >= 2,
            requires_all_reduce=False,
            reshard_after_backward=settings.reshard_after_backward and self.stage == 3,
        )


def _check_size(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"ZeroPolicy: {name}: expected a number of ranks or None, got {value!r}")


def _check_policy(zero: Any) -> ZeroPolicy:
    if not isinstance(zero, ZeroPolicy):
        hint = f". Pass ZeroPolicy(stage={zero})." if isinstance(zero, int) else ""
        raise ArgumentError(f"fully_shard: zero: expected a ZeroPolicy or None, got {zero!r}{hint}")
    return zero


hooks.options["zero"] = _check_policy
