"""The arguments of `fully_shard` and the plan for each parameter, checked before anything is changed. torch's own
policies are converted to ours. Layer: api."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2._torch import local_tensor
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.mesh import MeshRoles, ShardPlacementResult, roles_of
from fsdp2.policies import MixedPrecisionPolicy, OffloadPolicy
from fsdp2.runtime import hooks
from fsdp2.runtime.parameter import Plan, extension_of
from fsdp2.specs import specs_of

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

_TORCHS_PRECISION = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}


def unfit(name: str, expected: str, got: object, hint: str = "") -> ArgumentError:
    """The error for an argument of `fully_shard`."""
    what = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
    text = f"fully_shard: {name}: expected {expected}, got {what}"
    return ArgumentError(f"{text}. {hint}" if hint else text)


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
    """These arguments of `fully_shard` as their features have converted them; False and None are left out."""
    chosen = {name: value for name, value in options.items() if value is not False and value is not None}
    for name in chosen.keys() - hooks.options.keys():
        raise UnsupportedError(f"fully_shard: {name}=: the module of fsdp2 that implements it was removed")
    return {name: hooks.options[name](value) for name, value in chosen.items()}


def parameter_set(params: Any) -> set[nn.Parameter]:
    """`ignored_params` as a set, from any collection of parameters. Raises for anything else, such as names."""
    is_one = isinstance(params, (str, torch.Tensor, nn.Module)) or not isinstance(params, Iterable)
    found: list[Any] = [] if params is None else [params] if is_one else list(params)
    for each in found:
        if is_one or not isinstance(each, nn.Parameter):
            raise unfit("ignored_params", "a set of parameters", each, "Pass the parameters: {model.head.weight}.")
    return set(found)


@dataclass
class Placing:
    """How the parameters of one unit are placed; `zero` is a `ZeroPolicy`."""

    roles: MeshRoles
    placement_fn: PlacementFn | None
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_to: bool | int | None = None
    zero: Any = None

    def plan(self, fqn: str, param: nn.Parameter) -> Plan:
        """The plan for one parameter. Raises `ArgumentError` or `MisuseError` if a user's function returned an
        unsuitable value, or if the parameter is a DTensor on an incompatible mesh."""
        dim, roles = self._placement(fqn, param)
        if param.ndim == 0:
            roles = roles.replicated()
        specs = specs_of(fqn, param, dim, roles)
        wanted = self.policy.all_gather_dtype
        if wanted is not None:
            implemented = hooks.implementation(hooks.gather_dtypes, wanted, "all_gather_dtype")
            if not implemented(param, roles) or extension_of(fqn, self.local(param)) is not None:
                wanted = None
        return Plan(roles, specs, dim, self.policy, self._param_dtype(fqn, param), self.offload, wanted)

    @staticmethod
    def local(param: nn.Parameter) -> torch.Tensor:
        """This rank's values of it: with tensor parallelism its local tensor."""
        return (local_tensor(param) if isinstance(param, DTensor) else param).detach()

    def _placement(self, fqn: str, param: nn.Parameter) -> tuple[int, MeshRoles]:
        """The dim to shard and the mesh."""
        result: Any = None if self.placement_fn is None else self.placement_fn(param)
        roles = self.roles
        if isinstance(result, ShardPlacementResult):
            roles, result = roles if result.mesh is None else roles_of(result.mesh), result.placement
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
