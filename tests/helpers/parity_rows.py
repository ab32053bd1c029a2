"""The rows of docs/parity.md: what each public name of FSDP2 does, as claims that run.

A claim is a function of an API (`torch.distributed.fsdp`, or `fsdp2`) that returns what it saw, on two ranks; the row
says what that is on torch and here. `tests/compat/test_parity_table.py` runs them, `docs/make_parity.py` writes the
page.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.profiler import ProfilerActivity, profile

__all__ = ["ABSENT", "ROWS", "Row"]

ABSENT = "(2.15)"  # torch has the name from 2.15 on: checked on ours alone


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        name: the public name.
        aspect: touches, recursion, order, interplay, returns or errors.
        claim: what is claimed, as the page says it.
        check: sees whether it is so.
        torch: what `check` returns on torch's FSDP2.
        ours: the same here, where it differs.
        why: why it differs.
    """

    name: str
    aspect: str
    claim: str
    check: Callable[[Any], Any]
    torch: Any = True
    ours: Any = None
    why: str = ""

    @property
    def expected(self) -> Any:
        """What `check` returns here."""
        return self.torch if self.ours is None else self.ours


# --- what claims are made of ------------------------------------------------------------------------------------------


def linears(num: int = 2) -> Any:
    """Layers of 4 x 4, the same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(num)])


def two_units(api: Any, **options: Any) -> Any:
    """Unit "0", and the root, which has layer 1."""
    model = linears()
    api.fully_shard(model[0], **options)
    return api.fully_shard(model, **options)


def batch() -> torch.Tensor:
    return torch.full((2, 4), float(dist.get_rank() + 1))


def backward(model: Any) -> None:
    model(batch()).sum().backward()


def is_sharded(layer: Any) -> bool:
    return isinstance(layer.weight, DTensor)


def forms(model: Any) -> tuple[bool, ...]:
    """For each layer, whether it is sharded."""
    return tuple(is_sharded(layer) for layer in model)


def graded(model: Any) -> tuple[bool, ...]:
    """For each layer, whether its sharded parameter has a gradient."""
    for layer in model:
        if hasattr(layer, "reshard"):
            layer.reshard()
    model.reshard()
    return tuple(layer.weight.grad is not None for layer in model)


def error(call: Callable[[], Any]) -> str:
    """The built-in type of what `call` raises, "" where it does not."""
    try:
        call()
    except Exception as caught:
        return next(cls.__name__ for cls in type(caught).__mro__ if cls.__module__ == "builtins")
    return ""


def warned(call: Callable[[], Any]) -> bool:
    """Whether `call` warns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return bool(found)


def phases(model: Any, name: str) -> list[str]:
    """The ranges of the profiler with this name, in one step."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        backward(model)
    return sorted({event.name for event in trace.events() if event.name.startswith(name)})


def after(*calls: tuple[str, Any], model: Any, recurse: bool | None = None) -> Any:
    """`model` after calls of its setters."""
    for method, value in calls:
        getattr(model, method)(value) if recurse is None else getattr(model, method)(value, recurse=recurse)
    return model


def hsdp(api: Any) -> Any:
    """Two replicas of one rank each."""
    return two_units(api, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def row_sum(model: Any) -> float:
    """The first element of the last layer's bias gradient."""
    return float(model[-1].bias.grad.full_tensor()[0])


class Gather:
    """An all-gather of the user's own."""

    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    """A reduce-scatter of the user's own."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


# --- the claims -------------------------------------------------------------------------------------------------------


def returns_the_argument(api: Any) -> bool:
    arguments = nn.Linear(2, 2), [nn.Linear(2, 2), nn.ReLU()], (nn.Linear(2, 2),)
    return all(api.fully_shard(each) is each for each in arguments)


def swaps_classes(api: Any) -> tuple[str, bool]:
    model = api.fully_shard(nn.Linear(4, 4))
    return type(model).__name__, isinstance(model, api.FSDPModule) and isinstance(model, nn.Linear)


def makes_dtensors(api: Any) -> tuple[str, str]:
    model = api.fully_shard(linears())
    return str(model[0].weight.placements), str(tuple(name for name, _ in model.named_parameters()))


def takes_all_below(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model.unshard()
    return forms(model)


def child_after_parent(api: Any) -> str:
    model = api.fully_shard(linears())
    return error(lambda: (api.fully_shard(model[0]), backward(model)))


def mesh_2d(api: Any) -> str:
    return str(hsdp(api)[0].weight.placements)


def reshards(value: Any) -> Callable[[Any], tuple[bool, ...]]:
    def check(api: Any) -> tuple[bool, ...]:
        model = two_units(api, reshard_after_forward=value)
        model(batch())
        return forms(model)

    return check


def places(api: Any) -> str:
    return str(api.fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda _: Shard(1)).weight.placements)


def places_unevenly(api: Any) -> str:
    return error(lambda: api.fully_shard(nn.Linear(5, 3, bias=False), shard_placement_fn=lambda _: Shard(1)))


def computes_in(api: Any) -> tuple[str, str]:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = api.fully_shard(nn.Linear(4, 4), mp_policy=policy)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, _args, _out: seen.append(module.weight.dtype), prepend=True)
    return str(model(batch()).dtype), str(seen[0])


def reduces_in(api: Any, **dtypes: Any) -> float:
    """The mean over the ranks of 1 and 2**-9, which bfloat16 cannot hold exactly."""
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **dtypes)
    model = api.fully_shard(nn.Linear(1, 2, bias=False), mp_policy=policy)
    model(torch.full((1, 1), 1.0 if dist.get_rank() == 0 else 2.0**-9)).sum().backward()
    return float(model.weight.grad.full_tensor()[0, 0])


def offloads(api: Any) -> str:
    model = api.fully_shard(nn.Linear(4, 4), offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    backward(model)
    return str(model.weight.device)


def ignores(api: Any) -> tuple[bool, float]:
    model = linears()
    api.fully_shard(model, ignored_params={model[1].bias})
    backward(model)
    return isinstance(model[1].bias, DTensor), float(model[1].bias.grad[0])


def replicates(api: Any) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"dp_{api.__name__}".replace(".", "_"),))
    model = distribute_module(nn.Linear(4, 4), mesh)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(replicate=mesh.mesh_dim_names[0]))
    return str(model.weight.placements)


def unshards(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model[0].unshard()
    return forms(model)


def unshard_returns(api: Any) -> tuple[bool, bool]:
    model = two_units(api)
    handle = model.unshard(async_op=True)
    handle.wait()
    handle.wait()
    return model[0].unshard() is None, isinstance(handle, api.UnshardHandle) and not is_sharded(model[1])


def reshard_one(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model.unshard()
    model[0].unshard()
    model.reshard()
    return forms(model)


def stays_unsharded(api: Any) -> tuple[bool, ...]:
    """`unshard` before a forward that reshards."""
    model = two_units(api, reshard_after_forward=True)
    model.unshard()
    model[0].unshard()
    model(batch())
    return forms(model)


def resets(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model(batch())
    model.reset_iter_state()
    backward(model)
    return graded(model)


def resets_inner(api: Any) -> str:
    model = two_units(api)
    model(batch())
    return error(model[0].reset_iter_state)


def not_last(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model.set_is_last_backward(False)
    backward(model)
    backward(model)
    model.set_is_last_backward(True)
    backward(model)
    return graded(model)


def not_last_once(which: str) -> Callable[[Any], tuple[bool, ...]]:
    """Whether gradients are there after a backward that is not the last, as `which` unit was told."""

    def check(api: Any) -> tuple[bool, ...]:
        model = two_units(api)
        model(batch()).sum().backward()
        model.zero_grad()
        (model if which == "root" else model[0]).set_is_last_backward(False)
        backward(model)
        seen = forms(model)
        model.set_is_last_backward(True)
        backward(model)
        return seen

    return check


def all_reduce_of_a_sum(api: Any) -> float:
    model = hsdp(api)
    model.set_requires_all_reduce(False)
    backward(model)
    model.set_requires_all_reduce(True)
    backward(model)
    return row_sum(model)


def hook_without_sync(api: Any) -> tuple[int, ...]:
    model, seen = two_units(api), []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    model.set_requires_gradient_sync(False)
    backward(model)
    return tuple(seen)


def reshards_without_sync(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model.set_requires_gradient_sync(False)
    backward(model)
    return forms(model)


def computes_per_unit(api: Any) -> tuple[str, ...]:
    model, seen = linears(), list[str]()
    api.fully_shard(model[0])
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, _args: seen.append(str(layer.weight.dtype)))
    error(lambda: model(batch()))
    return tuple(seen)


def does_not_cast_inputs(api: Any) -> str:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    return error(lambda: two_units(api, mp_policy=policy)(batch()))


def setters_return_none(api: Any) -> bool:
    model = two_units(api)
    switches = [
        name for name in vars(api.FSDPModule) if name.startswith("set_") and name.endswith(("_sync", "_backward"))
    ]
    switches += ["set_requires_all_reduce", "set_reshard_after_forward", "set_reduce_scatter_unused_params"]
    returned = [getattr(model, name)(True) for name in switches if "manual" not in name]
    returned += [model.set_reduce_scatter_max_input_buffers(1), model.set_modules_to_forward_prefetch([])]
    returned += [model.set_all_reduce_hook(lambda flat: None), model.set_force_sum_reduction_for_comms(True)]
    returned += [model.set_separate_reduce_scatter_group(False), model.set_modules_to_backward_prefetch([])]
    return returned == [None] * len(returned) and len(returned) >= 9


def syncs(recurse: bool) -> Callable[[Any], tuple[bool, ...]]:
    def check(api: Any) -> tuple[bool, ...]:
        model = after(("set_requires_gradient_sync", False), model=two_units(api), recurse=recurse)
        backward(model)
        return graded(model)

    return check


def accumulates(api: Any) -> float:
    model = two_units(api)
    model.set_requires_gradient_sync(False)
    backward(model)
    model.set_requires_gradient_sync(True)
    backward(model)
    return row_sum(model)


def sync_after_all_reduce(api: Any) -> tuple[bool, ...]:
    calls = ("set_requires_all_reduce", False), ("set_requires_gradient_sync", True)
    model = after(*calls, model=hsdp(api))
    backward(model)
    return graded(model)


def all_reduce_after_sync(api: Any) -> tuple[bool, ...]:
    calls = ("set_requires_gradient_sync", True), ("set_requires_all_reduce", False)
    model = after(*calls, model=hsdp(api))
    backward(model)
    return graded(model)


def all_reduces(recurse: bool) -> Callable[[Any], tuple[bool, ...]]:
    def check(api: Any) -> tuple[bool, ...]:
        model = after(("set_requires_all_reduce", False), model=hsdp(api), recurse=recurse)
        backward(model)
        return graded(model)

    return check


def sets_reshard_after_forward(recurse: bool) -> Callable[[Any], tuple[bool, ...]]:
    def check(api: Any) -> tuple[bool, ...]:
        model = two_units(api)
        model.set_reshard_after_forward(False, recurse)
        model(batch())
        return forms(model)

    return check


def sets_the_roots_own_choice(api: Any) -> tuple[bool, ...]:
    model = two_units(api)
    model.set_reshard_after_forward(True)
    model(batch())
    return forms(model)


def sets_reshard_after_backward(recurse: bool) -> Callable[[Any], tuple[bool, ...]]:
    def check(api: Any) -> tuple[bool, ...]:
        model = after(("set_reshard_after_backward", False), model=two_units(api), recurse=recurse)
        backward(model)
        return forms(model)

    return check


def three_units(api: Any) -> Any:
    model = linears(3)
    for layer in model:
        api.fully_shard(layer)
    return api.fully_shard(model)


def prefetches(method: str, forget: bool = False) -> Callable[[Any], list[str]]:
    def check(api: Any) -> list[str]:
        model = three_units(api)
        which = "forward" if "forward" in method else "backward"
        source, target = (model[0], model[2]) if which == "forward" else (model[2], model[0])
        getattr(source, method)([target])
        if forget:
            getattr(source, method)([])
        backward(model)
        return phases(model, f"FSDP::{which}_prefetch")

    return check


def prefetch_of_plain(method: str) -> Callable[[Any], str]:
    def check(api: Any) -> str:
        return error(lambda: getattr(two_units(api), method)([nn.Linear(2, 2)]))

    return check


def custom(method: str, comm: type) -> Callable[[Any], tuple[int, float]]:
    def check(api: Any) -> tuple[int, float]:
        model, mine = two_units(api), comm()
        getattr(model[0], method)(mine)
        backward(model)
        return mine.calls, row_sum(model)

    return check


def custom_then_memory(method: str) -> Callable[[Any], str]:
    def check(api: Any) -> str:
        model = two_units(api)
        model.set_custom_all_gather(Gather())
        argument = (True,) if "allocate" in method else ()
        return error(lambda: getattr(model, method)(*argument))

    return check


def hooks(api: Any) -> tuple[int, ...]:
    model, seen = two_units(api), []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    backward(model)
    return tuple(seen)


def hook_changes(api: Any) -> float:
    model = two_units(api)
    model.set_all_reduce_hook(lambda flat: flat.mul_(3))
    backward(model)
    return row_sum(model)


def divides(method: str, force_sum: bool) -> Callable[[Any], Any]:
    def check(api: Any) -> Any:
        model = two_units(api)
        model.set_force_sum_reduction_for_comms(force_sum)
        getattr(model, method)(1.0)
        failed = error(lambda: backward(model))
        return failed or row_sum(model)

    return check


def divides_one(api: Any) -> tuple[float, float]:
    model = two_units(api)
    for unit in (model, model[0]):
        unit.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    backward(model)
    plain = linears()
    backward(plain)
    ratio = model[0].bias.grad.full_tensor()[0] / plain[0].bias.grad[0]
    return row_sum(model), round(float(ratio), 3)


class Branches(nn.Module):
    """Two layers, of which one goes unused."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def unused(enable: bool | None, recurse: bool = True) -> Callable[[Any], tuple[bool, ...]]:
    def check(api: Any) -> tuple[bool, ...]:
        model = nn.Sequential(Branches(), Branches())
        api.fully_shard(model[0])
        api.fully_shard(model)
        if enable is not None:
            model.set_reduce_scatter_unused_params(enable, recurse=recurse)
        backward(model)
        model.reshard()
        return tuple(each.unused.weight.grad is not None for each in model)

    return check


def same_gradients(method: str, *args: Any) -> Callable[[Any], float]:
    def check(api: Any) -> float:
        model = two_units(api)
        getattr(model, method)(*args)
        backward(model)
        return row_sum(model)

    return check


def not_unsharded_in_backward(api: Any) -> list[str]:
    model = two_units(api, reshard_after_forward=True)
    model[0].set_unshard_in_backward(False)
    model(batch())  # the root is found
    model.reset_iter_state()
    loss = model(batch()).sum()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        error(loss.backward)  # a linear layer needs its weight for the gradient of its input; not the first one
    return sorted({event.name for event in trace.events() if event.name.startswith("FSDP::all_gather (")})


def memory_of_the_group(api: Any) -> bool:
    return warned(lambda: two_units(api).set_allocate_memory_from_process_group_for_comm(True))


def frozen(name: str, field: str) -> Callable[[Any], bool]:
    def check(api: Any) -> bool:
        policy = getattr(api, name)("dp") if name == "DataParallelMeshDims" else getattr(api, name)()
        return error(lambda: setattr(policy, field, None)) != ""

    return check


class Generates(nn.Linear):
    """A second entry point."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def registers(api: Any) -> tuple[str, bool, bool]:
    model = api.fully_shard(Generates(4, 4))
    before = error(lambda: model.generate(batch()))
    returned = api.register_fsdp_forward_method(model, "generate")
    model.generate(batch()).sum().backward()
    model.reshard()
    return before, returned is None, model.weight.grad is not None


def finalizes(api: Any) -> tuple[bool, bool, bool]:
    model = two_units(api)
    model.set_manual_backward_finalization(True)
    backward(model)
    before = model[1].weight.grad is None
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    return before, isinstance(handle, api.GradientReductionHandle), all(graded(model))


def finalizes_inner(api: Any) -> str:
    model = two_units(api)
    model(batch())
    return error(lambda: model[0].set_manual_backward_finalization(True))


def keeps_storage(api: Any) -> bool:
    model = two_units(api)
    model.set_keep_unsharded_storage(True)
    addresses = []
    for _ in range(2):
        model[0].unshard()
        addresses.append(model[0].weight.data_ptr())
        model[0].reshard()
    return addresses[0] == addresses[1]


def predicts(api: Any) -> list[str]:
    model = three_units(api)
    model.set_auto_forward_prefetch()
    for _ in range(3):
        backward(model)
    return phases(model, "FSDP::forward_prefetch")


FS = "fully_shard"

ROWS = [
    Row(FS, "returns", "the argument: the same module, the same list", returns_the_argument),
    Row(
        FS,
        "touches",
        "the class: `FSDPLinear`, which is an `FSDPModule` and the original",
        swaps_classes,
        ("FSDPLinear", True),
    ),
    Row(
        FS,
        "touches",
        "parameters: DTensors, `Shard(0)`, under their names",
        makes_dtensors,
        ("(Shard(dim=0),)", "('0.weight', '0.bias', '1.weight', '1.bias')"),
    ),
    Row(FS, "recursion", "takes all parameters below, but those of earlier calls", takes_all_below, (True, False)),
    Row(
        FS,
        "order",
        "a module after the one that holds it",
        child_after_parent,
        "TypeError",
        "RuntimeError",
        "`OrderError` at the call; torch's is an accident",
    ),
    Row(
        f"{FS}(module)",
        "errors",
        "a second time",
        lambda api: error(lambda: api.fully_shard(api.fully_shard(linears()))),
        "AssertionError",
    ),
    Row(
        f"{FS}(module)",
        "errors",
        "`ModuleList` without forward",
        lambda api: error(lambda: api.fully_shard(nn.ModuleList([linears()]))),
        "ValueError",
    ),
    Row(
        f"{FS}(mesh=)",
        "touches",
        "2-D: replicated over the first axis, sharded over the second",
        mesh_2d,
        "(Replicate(), Shard(dim=0))",
    ),
    Row(
        f"{FS}(mesh=)",
        "errors",
        "by position",
        lambda api: error(lambda: api.fully_shard(linears(), None)),
        "TypeError",
    ),
    Row(
        f"{FS}(reshard_after_forward=)",
        "touches",
        "None: True, but False for the root (sharded after forward: inner unit, root)",
        reshards(None),
        (True, False),
    ),
    Row(f"{FS}(reshard_after_forward=)", "touches", "True: also the root", reshards(True), (True, True)),
    Row(f"{FS}(reshard_after_forward=)", "touches", "False: no unit", reshards(False), (False, False)),
    Row(
        f"{FS}(reshard_after_forward=)",
        "touches",
        "an int, the size of the shard axis: as True",
        reshards(2),
        (True, True),
    ),
    Row(
        f"{FS}(reshard_after_forward=)",
        "errors",
        "no divisor of the shard axis",
        lambda api: error(lambda: two_units(api, reshard_after_forward=3)),
        "ValueError",
    ),
    Row(f"{FS}(shard_placement_fn=)", "touches", "`Shard(1)` cuts columns", places, "(Shard(dim=1),)"),
    Row(f"{FS}(shard_placement_fn=)", "errors", "uneven columns", places_unevenly, "NotImplementedError", "", "padded"),
    Row(
        f"{FS}(mp_policy=)",
        "touches",
        "dtype of outputs, and of parameters in forward",
        computes_in,
        ("torch.float64", "torch.bfloat16"),
    ),
    Row(
        f"{FS}(mp_policy=)",
        "recursion",
        "not to units below (dtype of parameters in forward: inner unit, root)",
        computes_per_unit,
        ("torch.float32", "torch.bfloat16"),
    ),
    Row(
        f"{FS}(mp_policy=)",
        "errors",
        "`cast_forward_inputs=False`, and inputs of another dtype",
        does_not_cast_inputs,
        "RuntimeError",
    ),
    Row(
        f"{FS}(mp_policy=)",
        "interplay",
        "`reduce_dtype=torch.float32`: the mean of 1 and 2^-9",
        lambda api: reduces_in(api, reduce_dtype=torch.float32),
        (1 + 2.0**-9) / 2,
    ),
    Row(
        f"{FS}(mp_policy=)",
        "interplay",
        "`reduce_dtype=None`: the mean of 1 and 2^-9",
        reduces_in,
        0.5,
        (1 + 2.0**-9) / 2,
        "in the parameter's own dtype, as torch 2.15",
    ),
    Row(
        f"{FS}(mp_policy=)",
        "errors",
        "a dtype in place of a policy",
        lambda api: error(lambda: backward(two_units(api, mp_policy=torch.bfloat16))),
        "AttributeError",
        "ValueError",
        "at the call; torch at the first forward",
    ),
    Row(f"{FS}(offload_policy=)", "touches", "sharded parameters live on", offloads, "cpu"),
    Row(
        f"{FS}(offload_policy=)",
        "errors",
        "True in place of a policy",
        lambda api: error(lambda: two_units(api, offload_policy=True)),
        "",
        "ValueError",
        "torch does not offload then",
    ),
    Row(
        f"{FS}(ignored_params=)",
        "touches",
        "not sharded, not reduced (sharded; gradient on each rank, 2 rows)",
        ignores,
        (False, 2.0),
    ),
    Row(
        f"{FS}(ignored_params=)",
        "errors",
        "names in place of parameters",
        lambda api: error(lambda: two_units(api, ignored_params=["weight"])),
        "",
        "ValueError",
        "torch ignores nothing then",
    ),
    Row(f"{FS}(dp_mesh_dims=)", "touches", "a replicate axis alone shards nothing", replicates, "(Replicate(),)"),
    Row(
        "FSDPModule.unshard",
        "touches",
        "the unit of the module, no other (sharded: inner unit, root)",
        unshards,
        (False, True),
    ),
    Row(
        "FSDPModule.unshard", "returns", "None; with `async_op=True` an `UnshardHandle`", unshard_returns, (True, True)
    ),
    Row(
        "FSDPModule.unshard", "interplay", "a forward reshards what was unsharded before", stays_unsharded, (True, True)
    ),
    Row("UnshardHandle.wait", "order", "twice is as once", lambda api: unshard_returns(api)[1], True),
    Row("FSDPModule.reshard", "touches", "the unit of the module, no other", reshard_one, (False, True)),
    Row(
        "FSDPModule.reshard",
        "returns",
        "None, also where nothing is unsharded",
        lambda api: two_units(api).reshard() is None,
    ),
    Row(
        "FSDPModule.reset_iter_state",
        "order",
        "after a forward without backward the next iteration is clean",
        resets,
        (True, True),
    ),
    Row("FSDPModule.reset_iter_state", "errors", "not on the root", resets_inner, "RuntimeError"),
    Row(
        "FSDPModule.set_is_last_backward",
        "order",
        "gradients are there after the last backward",
        not_last,
        (True, True),
    ),
    Row(
        "FSDPModule.set_is_last_backward",
        "touches",
        "False: units reshard all the same (sharded afterwards)",
        not_last_once("root"),
        (True, True),
    ),
    Row(
        "FSDPModule.set_is_last_backward",
        "recursion",
        "the whole tree of the root, on whatever unit it is called (sharded afterwards)",
        not_last_once("inner"),
        (True, True),
    ),
    Row("FSDPModule.set_requires_gradient_sync, and all other setters", "returns", "None", setters_return_none),
    Row(
        "FSDPModule.set_requires_gradient_sync",
        "touches",
        "reductions alone: units reshard without sync too (sharded afterwards)",
        reshards_without_sync,
        (True, True),
    ),
    Row(
        "FSDPModule.set_requires_gradient_sync",
        "errors",
        "a text in place of a bool",
        lambda api: error(lambda: two_units(api).set_requires_gradient_sync("no")),
        "",
        "ValueError",
        "a text is true",
    ),
    Row(
        "FSDPModule.set_requires_gradient_sync",
        "recursion",
        "recursive (gradients after False: inner unit, root)",
        syncs(True),
        (False, False),
    ),
    Row(
        "FSDPModule.set_requires_gradient_sync", "recursion", "`recurse=False`: this unit", syncs(False), (True, False)
    ),
    Row(
        "FSDPModule.set_requires_gradient_sync",
        "order",
        "the next backward with True reduces the sum of all",
        accumulates,
        4.0,
    ),
    Row(
        "FSDPModule.set_requires_gradient_sync",
        "interplay",
        "sets `set_requires_all_reduce` too, if it is called later (HSDP)",
        sync_after_all_reduce,
        (True, True),
    ),
    Row(
        "FSDPModule.set_requires_gradient_sync",
        "interplay",
        "... and not if it is called before",
        all_reduce_after_sync,
        (False, False),
    ),
    Row("FSDPModule.set_requires_all_reduce", "recursion", "recursive (HSDP)", all_reduces(True), (False, False)),
    Row(
        "FSDPModule.set_requires_all_reduce",
        "recursion",
        "`recurse=False`: this unit",
        all_reduces(False),
        (True, False),
    ),
    Row(
        "FSDPModule.set_requires_all_reduce",
        "order",
        "the next backward with True reduces the sum of all (HSDP)",
        all_reduce_of_a_sum,
        4.0,
    ),
    Row(
        "FSDPModule.set_reshard_after_forward",
        "recursion",
        "recursive (sharded after forward with False)",
        sets_reshard_after_forward(True),
        (False, False),
    ),
    Row(
        "FSDPModule.set_reshard_after_forward",
        "recursion",
        "`recurse=False`, also by position: this unit",
        sets_reshard_after_forward(False),
        (True, False),
    ),
    Row(
        "FSDPModule.set_reshard_after_forward",
        "interplay",
        "overrides what the root chose by itself",
        sets_the_roots_own_choice,
        (True, True),
    ),
    Row(
        "FSDPModule.set_reshard_after_backward",
        "recursion",
        "recursive (sharded after backward with False)",
        sets_reshard_after_backward(True),
        (False, False),
    ),
    Row(
        "FSDPModule.set_reshard_after_backward",
        "recursion",
        "`recurse=False`: this unit",
        sets_reshard_after_backward(False),
        (True, False),
    ),
    Row(
        "FSDPModule.set_modules_to_forward_prefetch",
        "touches",
        "one unit",
        prefetches("set_modules_to_forward_prefetch"),
        ["FSDP::forward_prefetch for 2"],
    ),
    Row(
        "FSDPModule.set_modules_to_forward_prefetch",
        "order",
        "an empty list undoes it",
        prefetches("set_modules_to_forward_prefetch", True),
        [],
    ),
    Row(
        "FSDPModule.set_modules_to_forward_prefetch",
        "errors",
        "a module that is not sharded",
        prefetch_of_plain("set_modules_to_forward_prefetch"),
        "ValueError",
    ),
    Row(
        "FSDPModule.set_modules_to_backward_prefetch",
        "touches",
        "one unit, in place of the one before it in forward",
        prefetches("set_modules_to_backward_prefetch"),
        ["FSDP::backward_prefetch for 0"],
    ),
    Row(
        "FSDPModule.set_modules_to_backward_prefetch",
        "order",
        "an empty list restores that",
        prefetches("set_modules_to_backward_prefetch", True),
        ["FSDP::backward_prefetch for 0", "FSDP::backward_prefetch for 1"],
    ),
    Row(
        "FSDPModule.set_modules_to_backward_prefetch",
        "errors",
        "a module that is not sharded",
        prefetch_of_plain("set_modules_to_backward_prefetch"),
        "ValueError",
    ),
    Row(
        "FSDPModule.set_custom_all_gather",
        "touches",
        "one unit: its calls in a step; the gradients stay",
        custom("set_custom_all_gather", Gather),
        (2, 2.0),
    ),
    Row(
        "FSDPModule.set_custom_reduce_scatter",
        "touches",
        "one unit: its calls in a step; the gradients stay",
        custom("set_custom_reduce_scatter", Scatter),
        (1, 2.0),
    ),
    Row(
        "FSDPModule.set_all_reduce_hook",
        "touches",
        "one unit: elements of the flat gradients it gets in a step",
        hooks,
        (10,),
    ),
    Row("FSDPModule.set_all_reduce_hook", "interplay", "is not called without sync", hook_without_sync, ()),
    Row("FSDPModule.set_all_reduce_hook", "interplay", "what it changes in place counts", hook_changes, 6.0),
    Row(
        "FSDPModule.set_post_optim_event",
        "returns",
        "None",
        lambda api: two_units(api).set_post_optim_event(torch.Event("cpu")) is None,
    ),
    Row(
        "FSDPModule.set_gradient_divide_factor",
        "touches",
        "one unit (gradient of the root with factor 1; ratio to one process of the inner)",
        divides_one,
        (4.0, 1.0),
    ),
    Row(
        "FSDPModule.set_gradient_divide_factor",
        "errors",
        "on gloo",
        divides("set_gradient_divide_factor", False),
        "RuntimeError",
        4.0,
        "divided after the sum",
    ),
    Row(
        "FSDPModule.set_gradient_divide_factor",
        "interplay",
        "with `set_force_sum_reduction_for_comms` on gloo",
        divides("set_gradient_divide_factor", True),
        4.0,
    ),
    Row(
        "FSDPModule.set_reduce_scatter_divide_factor",
        "interplay",
        "the older name of it",
        divides("set_reduce_scatter_divide_factor", True),
        4.0,
    ),
    Row(
        "FSDPModule.set_force_sum_reduction_for_comms",
        "touches",
        "one unit; the mean stays the mean",
        same_gradients("set_force_sum_reduction_for_comms", True),
        2.0,
    ),
    Row(
        "FSDPModule.set_reduce_scatter_unused_params",
        "touches",
        "default: a parameter without gradient gets none",
        unused(None),
        (False, False),
    ),
    Row(
        "FSDPModule.set_reduce_scatter_unused_params",
        "recursion",
        "recursive (zeros where True)",
        unused(True),
        (True, True),
    ),
    Row(
        "FSDPModule.set_reduce_scatter_unused_params",
        "recursion",
        "`recurse=False`: this unit",
        unused(True, recurse=False),
        (False, True),
    ),
    Row(
        "FSDPModule.set_reduce_scatter_max_input_buffers",
        "touches",
        "timing only",
        same_gradients("set_reduce_scatter_max_input_buffers", 3),
        2.0,
    ),
    Row(
        "FSDPModule.set_reduce_scatter_max_input_buffers",
        "errors",
        "0",
        lambda api: error(lambda: two_units(api).set_reduce_scatter_max_input_buffers(0)),
        "ValueError",
    ),
    Row(
        "FSDPModule.set_reduce_scatter_max_input_buffers",
        "errors",
        "a text",
        lambda api: error(lambda: two_units(api).set_reduce_scatter_max_input_buffers("2")),
        "TypeError",
    ),
    Row(
        "FSDPModule.set_separate_reduce_scatter_group",
        "touches",
        "where reduce-scatters travel; the gradients stay",
        same_gradients("set_separate_reduce_scatter_group"),
        2.0,
    ),
    Row(
        "FSDPModule.set_unshard_in_backward",
        "touches",
        "one unit: its all-gathers in backward, after False",
        not_unsharded_in_backward,
        [],
    ),
    Row(
        "FSDPModule.set_allocate_memory_from_process_group_for_comm",
        "errors",
        "warns on gloo, which has no such memory",
        memory_of_the_group,
        False,
        True,
        "it has no effect",
    ),
    Row(
        "FSDPModule.set_allocate_memory_from_process_group_for_comm",
        "interplay",
        "after a custom collective",
        custom_then_memory("set_allocate_memory_from_process_group_for_comm"),
        "AssertionError",
    ),
    Row(
        "FSDPModule.set_symm_mem_for_comm",
        "errors",
        "on gloo",
        lambda api: error(lambda: two_units(api).set_symm_mem_for_comm()),
        "RuntimeError",
        "NotImplementedError",
        "a `RuntimeError` too",
    ),
    Row(
        "FSDPModule.set_symm_mem_for_comm",
        "interplay",
        "after a custom collective",
        custom_then_memory("set_symm_mem_for_comm"),
        "AssertionError",
    ),
    Row(
        "FSDPModule.set_manual_backward_finalization, finalize_backward, GradientReductionHandle",
        "order",
        "no gradients before `finalize_backward`; its handle; gradients after",
        finalizes,
        ABSENT,
        (True, True, True),
    ),
    Row(
        "FSDPModule.set_manual_backward_finalization",
        "errors",
        "not on the root",
        finalizes_inner,
        ABSENT,
        "RuntimeError",
    ),
    Row(
        "FSDPModule.set_keep_unsharded_storage",
        "touches",
        "unsharded parameters keep their address",
        keeps_storage,
        ABSENT,
        True,
    ),
    Row(
        "FSDPModule.set_auto_forward_prefetch",
        "touches",
        "after two equal iterations each unit prefetches the next",
        predicts,
        ABSENT,
        ["FSDP::forward_prefetch for 0", "FSDP::forward_prefetch for 1", "FSDP::forward_prefetch for 2"],
    ),
    Row("MixedPrecisionPolicy", "touches", "frozen", frozen("MixedPrecisionPolicy", "param_dtype")),
    Row(
        "MixedPrecisionPolicy",
        "errors",
        "`param_dtype='bf16'`",
        lambda api: error(lambda: api.MixedPrecisionPolicy(param_dtype="bf16")),
        "",
        "ValueError",
        "torch fails at the first forward",
    ),
    Row("CPUOffloadPolicy", "touches", "pins by default", lambda api: api.CPUOffloadPolicy().pin_memory),
    Row(
        "CPUOffloadPolicy",
        "touches",
        "frozen",
        frozen("CPUOffloadPolicy", "pin_memory"),
        False,
        True,
        "all policies are",
    ),
    Row(
        "CPUOffloadPolicy",
        "errors",
        "pinned memory without an accelerator",
        lambda api: error(lambda: two_units(api, offload_policy=api.CPUOffloadPolicy())),
        "RuntimeError",
        "NotImplementedError",
        "a `RuntimeError` too, which names `pin_memory=False`",
    ),
    Row("OffloadPolicy", "touches", "equal to another", lambda api: api.OffloadPolicy() == api.OffloadPolicy()),
    Row(
        "DataParallelMeshDims",
        "touches",
        "frozen",
        frozen("DataParallelMeshDims", "shard"),
        False,
        True,
        "all policies are",
    ),
    Row(
        "register_fsdp_forward_method",
        "touches",
        "the method unshards, and its backward reduces (before: error)",
        registers,
        ("RuntimeError", True, True),
    ),
    Row(
        "register_fsdp_forward_method",
        "touches",
        "nothing on a module that is not sharded",
        lambda api: api.register_fsdp_forward_method(nn.Linear(2, 2), "generate") is None,
    ),
    Row(
        "register_fsdp_forward_method",
        "errors",
        "no such method",
        lambda api: error(lambda: api.register_fsdp_forward_method(two_units(api), "generate")),
        "ValueError",
    ),
    Row(
        "share_comm_ctx",
        "returns",
        "None, also for an empty list",
        lambda api: api.share_comm_ctx([]) is None and api.share_comm_ctx([two_units(api), two_units(api)]) is None,
    ),
    Row(
        "share_comm_ctx",
        "errors",
        "a module that is not sharded",
        lambda api: error(lambda: api.share_comm_ctx([nn.Linear(2, 2)])),
        "ValueError",
    ),
]
