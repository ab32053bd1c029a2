"""The arguments of `fully_shard` and the plan for each parameter, checked before anything is changed. torch's own
policies are converted to ours. Layer: api."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2._torch import local_tensor
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.mesh import MeshDims, MeshRoles, ShardPlacementResult, default_mesh, roles_of
from fsdp2.policies import MixedPrecisionPolicy, OffloadPolicy, Sharding
from fsdp2.runtime import hooks
from fsdp2.runtime.extension import extension_of
from fsdp2.runtime.parameter import Plan
from fsdp2.specs import specs_of

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

_TORCHS_PRECISION = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}


def to_precision_policy(policy: Any) -> MixedPrecisionPolicy:
    """`policy` as one of ours; any object with the fields of torch's `MixedPrecisionPolicy` is accepted."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    given = {each.name: getattr(policy, each.name) for each in fields(MixedPrecisionPolicy) if each.name in dir(policy)}
    if not given.keys() >= _TORCHS_PRECISION or isinstance(policy, type):
        hint = f"Pass MixedPrecisionPolicy(param_dtype={policy})." if isinstance(policy, torch.dtype) else ""
        raise unfit("mp_policy", "a MixedPrecisionPolicy", policy, hint)
    return MixedPrecisionPolicy(**given)


def chosen_features(**options: Any) -> dict[str, Any]:
    """What features make of these arguments of `fully_shard`; False leaves a feature out."""
    chosen = {name: value for name, value in options.items() if value is not False}
    for name in chosen.keys() - hooks.options.keys():
        raise UnsupportedError(f"fully_shard: {name}=: the module of fsdp2 that understands it is not there")
    return {name: hooks.options[name](value) for name, value in chosen.items()}


def parameter_set(params: Any) -> set[nn.Parameter]:
    """`ignored_params` as a set, from any collection of parameters. (Names, for example, would have no effect.)"""
    if params is None:
        return set()
    if isinstance(params, (str, torch.Tensor, nn.Module)) or not isinstance(params, Iterable):
        raise unfit("ignored_params", "a set of parameters", params)
    found = set(params)
    for each in found:
        if not isinstance(each, nn.Parameter):
            raise unfit("ignored_params", "a set of parameters", each, "Pass the parameters: {model.head.weight}.")
    return found


def unfit(name: str, expected: str, got: object, hint: str = "") -> ArgumentError:
    """The error for an argument of `fully_shard`."""
    what = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
    text = f"fully_shard: {name}: expected {expected}, got {what}"
    return ArgumentError(f"{text}. {hint}" if hint else text)


def roles_for(mesh: DeviceMesh | None, dims: MeshDims | None, zero: Sharding | None) -> MeshRoles:
    """The roles that the arguments of `fully_shard` give to the axes of the mesh; creates the mesh if there is none."""
    mesh = mesh if zero is None else zero.mesh(mesh)
    mesh = default_mesh() if mesh is None else mesh
    roles = roles_of(mesh) if dims is None else dims.roles(mesh)
    return roles if zero is None else zero.roles(roles)


@dataclass
class Placing:
    """How the parameters of one unit are placed."""

    roles: MeshRoles
    placement_fn: PlacementFn | None
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_to: bool | int | None = None
    zero: Sharding | None = None

    def plan(self, fqn: str, param: nn.Parameter) -> Plan:
        """The plan for one parameter. Raises `ArgumentError` or `MisuseError` if a function of the user's returned an
        unsuitable value, or the parameter is a DTensor on a mesh that is incompatible with ours."""
        dim, roles = self._placement(fqn, param)
        if roles.sharded_replicas and self.policy.all_gather_dtype is not None:
            raise UnsupportedError("all_gather_dtype does not go together with shard_replicas")
        if param.ndim == 0:
            roles = roles.replicated()
        specs = specs_of(fqn, param, dim, roles)
        wanted = self.policy.all_gather_dtype
        has_own = extension_of(fqn, self.local(param)) is not None
        converts = wanted is not None and param.dtype.is_floating_point and roles.shard_size > 1 and not has_own
        if converts:
            hooks.implementation(hooks.gather_dtypes, wanted, "all_gather_dtype")
        dtype = self._param_dtype(fqn, param)
        return Plan(roles, specs, dim, self.policy, dtype, self.offload, wanted if converts else None)

    @staticmethod
    def local(param: nn.Parameter) -> torch.Tensor:
        """What this rank has of it, with tensor parallelism its local tensor."""
        return (local_tensor(param) if isinstance(param, DTensor) else param).detach()

    def data(self, param: nn.Parameter, plan: Plan) -> torch.Tensor:
        """The parameter's (with tensor parallelism: its local) values, where the sharded parameter will live."""
        data = self.local(param)
        return data if data.is_meta else data.to(plan.home)

    def _placement(self, fqn: str, param: nn.Parameter) -> tuple[int, MeshRoles]:
        """The dim to shard and the mesh."""
        result: Any = self.placement_fn(param) if self.placement_fn is not None else None
        roles = self.roles
        if isinstance(result, ShardPlacementResult):
            roles = roles if result.mesh is None else roles_of(result.mesh)
            result = result.placement
        elif getattr(result, "mesh_info", None) is not None:
            roles, result = chosen_features(mesh_info=result.mesh_info)["mesh_info"], result.placement
        result = Shard(0) if result is None else result
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
        wanted = override(param) if override is not None and param.dtype.is_floating_point else None
        if wanted is None or wanted == default:
            return default
        if wanted == param.dtype:
            return None
        raise ArgumentError(
            f"param_dtype_override_fn: expected None, {default} or the parameter's own {param.dtype} for '{fqn}', got "
            f"{wanted!r}"
        )
