"""The plan for each parameter of a unit, which `fully_shard` makes before it changes anything. Layer: api."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2._torch import local_tensor, real_tensors
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.mesh import MeshRoles, ShardPlacementResult, default_mesh, roles_from_dims, roles_of
from fsdp2.policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, ZeroPolicy
from fsdp2.runtime import hooks
from fsdp2.runtime.extension import extension_of, is_wrapper
from fsdp2.runtime.parameter import Plan
from fsdp2.specs import specs_of

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def roles_for(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, zero: ZeroPolicy | None) -> MeshRoles:
    """The roles that the arguments of `fully_shard` give to the axes of the mesh; creates the mesh if there is none.

    Raises:
        ArgumentError: the mesh does not fit the other arguments.
    """
    if zero is not None and zero.shard_size is not None:
        if mesh is not None:
            raise ArgumentError(
                "ZeroPolicy: shard_size makes the mesh; pass mesh=None, or shard_size=None and a 2-D mesh"
            )
        mesh = _replicated_mesh(zero.shard_size)
    mesh = default_mesh() if mesh is None else mesh
    roles = roles_of(mesh) if dims is None else roles_from_dims(mesh, dims)
    if zero is None:
        return roles
    if zero.stage == 0:
        return roles.replicated()
    if zero.shard_replicas:
        if roles.replicate_axis is None or roles.shard_axis is None:
            raise ArgumentError(
                f"ZeroPolicy: shard_replicas cuts the shards over a replicate axis too, but the mesh has none: {mesh}. "
                "Pass a 2-D mesh (replicate, shard), or shard_size."
            )
        return roles.sharding_replicas()
    return roles


_replicated_meshes: dict[tuple[dist.ProcessGroup, int], DeviceMesh] = {}


def _replicated_mesh(shard_size: int) -> DeviceMesh:
    """All ranks as (replicate, shard), the same mesh for every unit."""
    whole = default_mesh()
    key = (whole.get_group(), shard_size)
    if whole.size() % shard_size != 0:
        raise ArgumentError(
            f"ZeroPolicy: expected a shard_size that divides the {whole.size()} ranks, got {shard_size}"
        )
    if key not in _replicated_meshes:
        with real_tensors():
            shape = (whole.size() // shard_size, shard_size)
            _replicated_meshes[key] = init_device_mesh(whole.device_type, shape, mesh_dim_names=("replicate", "shard"))
    return _replicated_meshes[key]


class Placing:
    """How the parameters of one unit are placed. `allows_extensions`: they may have hooks for their all-gather."""

    def __init__(
        self,
        roles: MeshRoles,
        placement_fn: PlacementFn | None,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
    ):
        self.roles = roles
        self.placement_fn = placement_fn
        self.policy = policy
        self.offload = offload
        self.allows_extensions = True

    def plan(self, fqn: str, param: nn.Parameter) -> Plan:
        """The plan for one parameter.

        Raises:
            ArgumentError, MisuseError: `shard_placement_fn` or `param_dtype_override_fn` returned an unsuitable value;
                the parameter is a DTensor on a mesh that is incompatible with ours.
        """
        dim, roles = self._placement(fqn, param)
        if roles.sharded_replicas and self.policy.all_gather_dtype is not None:
            raise UnsupportedError("all_gather_dtype does not go together with shard_replicas")
        if param.ndim == 0:
            roles = roles.replicated()
        self._check_extension(fqn, param, roles)
        specs = specs_of(fqn, param, dim, roles)
        wanted = self.policy.all_gather_dtype
        has_own = extension_of(fqn, self._local(param)) is not None
        converts = wanted is not None and param.dtype.is_floating_point and roles.shard_size > 1 and not has_own
        extension = hooks.implementation(hooks.gather_dtypes, wanted, "all_gather_dtype") if converts else None
        return Plan(roles, specs, dim, self.policy, self._param_dtype(fqn, param), self.offload, extension)

    def _check_extension(self, fqn: str, param: nn.Parameter, roles: MeshRoles) -> None:
        local = self._local(param)
        if is_wrapper(local) and not local.is_contiguous():
            raise UnsupportedError(
                f"'{fqn}' is a {type(local).__name__} of shape {tuple(local.shape)} that is not contiguous, stride "
                f"{local.stride()}; tensor subclasses must be: call .contiguous() on it"
            )
        if is_wrapper(local) and self.offload.param_folders:
            raise UnsupportedError(
                f"'{fqn}' is a {type(local).__name__}, which cannot rest in a file; pass Offload(params=True, ...)"
            )
        if extension_of(fqn, local) is None:
            return
        if roles.shard_axis is None:
            raise UnsupportedError(f"'{fqn}' has hooks for its all-gather, but nothing is gathered on {roles.mesh}")
        if not self.allows_extensions:
            raise UnsupportedError(
                f"'{fqn}' has hooks for its all-gather, which work neither with an int for reshard_after_forward nor "
                'with keep_frozen="host"; pass a bool'
            )

    @staticmethod
    def _local(param: nn.Parameter) -> torch.Tensor:
        return (local_tensor(param) if isinstance(param, DTensor) else param).detach()

    def data(self, param: nn.Parameter, plan: Plan) -> torch.Tensor:
        """The parameter's (with tensor parallelism: its local) values, where the sharded parameter will live."""
        data = self._local(param)
        return data if data.is_meta else data.to(plan.home)

    def _placement(self, fqn: str, param: nn.Parameter) -> tuple[int, MeshRoles]:
        """The dim to shard and the mesh."""
        result: Any = self.placement_fn(param) if self.placement_fn is not None else None
        roles = self.roles
        if isinstance(result, ShardPlacementResult):
            roles = roles if result.mesh is None else roles_of(result.mesh)
            result = result.placement
        elif getattr(result, "mesh_info", None) is not None:
            roles, result = _roles_of_info(result.mesh_info), result.placement
        if result is None:
            result = Shard(0)
        if not isinstance(result, Shard):
            raise ArgumentError(
                f"shard_placement_fn: expected a Shard, a ShardPlacementResult or None for '{fqn}', got {result!r}"
            )
        if param.ndim == 0:
            return 0, roles
        dim = result.dim + param.ndim if result.dim < 0 else result.dim
        if not 0 <= dim < param.ndim:
            raise MisuseError(
                f"shard_placement_fn: Shard({result.dim}) for '{fqn}', which has {param.ndim} dims: "
                f"{tuple(param.shape)}"
            )
        return dim, roles

    def _param_dtype(self, fqn: str, param: nn.Parameter) -> torch.dtype | None:
        """The compute dtype; None for the original one."""
        default, override = self.policy.param_dtype, self.policy.param_dtype_override_fn
        if override is None or not param.dtype.is_floating_point:
            return default
        wanted = override(param)
        if wanted is None or wanted == default:
            return default
        if wanted != param.dtype:
            raise ArgumentError(
                f"param_dtype_override_fn: expected None, {default} or the parameter's own {param.dtype} for '{fqn}', "
                f"got {wanted!r}"
            )
        return None


def _roles_of_info(info: Any) -> MeshRoles:
    """The roles in an `FSDPMeshInfo`, the object that names the mesh in torch's `ShardPlacementResult`. Its class is
    private in torch; torchtitan passes such objects for experts."""
    if getattr(info, "dp_mesh_dims", None) is not None:
        dims = info.dp_mesh_dims
        return roles_from_dims(info.spmd_mesh, DataParallelMeshDims(dims.shard, dims.replicate))
    return MeshRoles(info.mesh, replicate_axis=info.replicate_mesh_dim, shard_axis=info.shard_mesh_dim)
