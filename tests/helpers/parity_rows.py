"""The rows of docs/parity.md: what each public name of FSDP2 does, as claims that run.

A claim is a function of an API (`torch.distributed.fsdp`, or `fsdp2`) that returns what it saw, on two ranks; the row
says what that is on torch and here. `tests/compat/test_parity_table.py` runs them, `docs/make_parity.py` writes the
page. A pair of values is (inner unit, root).
"""

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

from tests.helpers.collectives import Gathers, Scatters

__all__ = ["ABSENT", "ROWS", "Row"]

ABSENT = "(2.15)"  # torch has the name from 2.15 on: checked on ours alone
Check = Callable[[Any], Any]


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
    check: Check
    torch: Any = True
    ours: Any = None
    why: str = ""

    @property
    def expected(self) -> Any:
        """What `check` returns here."""
        return self.torch if self.ours is None else self.ours


ROWS: list[Row] = []


def claim(name: str, aspect: str, text: str, *values: Any, why: str = "") -> Callable[[Check], Check]:
    """Adds a row with this check. `values`: what it returns on torch's, and here where it differs."""

    def add(check: Check) -> Check:
        ROWS.append(Row(name, aspect, text, check, *values, why=why))
        return check

    return add


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


def three_units(api: Any) -> Any:
    model = linears(3)
    for layer in model:
        api.fully_shard(layer)
    return api.fully_shard(model)


def hsdp(api: Any) -> Any:
    """Two replicas of one rank each."""
    return two_units(api, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def batch() -> torch.Tensor:
    return torch.full((2, 4), float(dist.get_rank() + 1))


def forward(model: Any) -> torch.Tensor:
    return model(batch())


def backward(model: Any) -> None:
    forward(model).sum().backward()


def forms(model: Any) -> tuple[bool, ...]:
    """For each layer, whether it is sharded."""
    return tuple(isinstance(layer.weight, DTensor) for layer in model)


def graded(model: Any) -> tuple[bool, ...]:
    """For each layer, whether its sharded parameter has a gradient."""
    for layer in model:
        if hasattr(layer, "reshard"):
            layer.reshard()
    model.reshard()
    return tuple(layer.weight.grad is not None for layer in model)


def row_sum(model: Any) -> float:
    """The first element of the last layer's bias gradient."""
    return float(model[-1].bias.grad.full_tensor()[0])


def sees(look: Check, *calls: Check, make: Check = two_units, run: Check = backward) -> Check:
    """`look` at a model after these calls on it, and a forward or a step."""

    def check(api: Any) -> Any:
        model = make(api)
        for call in calls:
            call(model)
        run(model)
        return look(model)

    return check


def error(call: Callable[[], Any]) -> str:
    """The built-in type of what `call` raises, "" where it does not."""
    try:
        call()
    except Exception as caught:
        return next(cls.__name__ for cls in type(caught).__mro__ if cls.__module__ == "builtins")
    return ""


def fails(call: Callable[[Any, Any], Any], make: Check = two_units) -> Check:
    """What `call(model, api)` raises."""
    return lambda api: error(lambda: call(make(api), api))


def phases(model: Any, name: str) -> list[str]:
    """The ranges of the profiler with this name, in one step."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        backward(model)
    return sorted({event.name for event in trace.events() if event.name.startswith(name)})


# --- fully_shard ------------------------------------------------------------------------------------------------------

SHARD = "fully_shard"


@claim(SHARD, "returns", "the argument: the same module, the same list")
def _(api: Any) -> bool:
    arguments = nn.Linear(2, 2), [nn.Linear(2, 2), nn.ReLU()], (nn.Linear(2, 2),)
    return all(api.fully_shard(each) is each for each in arguments)


@claim(SHARD, "touches", "the class: `FSDPLinear`, which is an `FSDPModule` and the original", ("FSDPLinear", True))
def _(api: Any) -> tuple[str, bool]:
    model = api.fully_shard(nn.Linear(4, 4))
    return type(model).__name__, isinstance(model, api.FSDPModule) and isinstance(model, nn.Linear)


NAMES = "('0.weight', '0.bias', '1.weight', '1.bias')"


@claim(SHARD, "touches", "parameters: DTensors, `Shard(0)`, under their names", ("(Shard(dim=0),)", NAMES))
def _(api: Any) -> tuple[str, str]:
    model = api.fully_shard(linears())
    return str(model[0].weight.placements), str(tuple(name for name, _ in model.named_parameters()))


claim(SHARD, "recursion", "takes all parameters below, but those of earlier calls", (True, False))(
    sees(forms, lambda m: m.unshard(), run=lambda m: None)
)
claim(
    SHARD,
    "order",
    "a module after the one that holds it",
    *("TypeError", "RuntimeError"),
    why="`OrderError` at the call; torch's is an accident",
)(fails(lambda m, api: (api.fully_shard(m[0]), backward(m)), lambda api: api.fully_shard(linears())))

MODULE = f"{SHARD}(module)"
claim(MODULE, "errors", "a second time", "AssertionError")(fails(lambda m, api: api.fully_shard(m)))

MESH = f"{SHARD}(mesh=)"
claim(MESH, "touches", "2-D: replicated over the first axis, sharded over the second", "(Replicate(), Shard(dim=0))")(
    lambda api: str(hsdp(api)[0].weight.placements)
)

RAF = f"{SHARD}(reshard_after_forward=)"
WHAT = "None: True, but False for the root (sharded after forward: inner unit, root)"
for value, what, seen in (
    (None, WHAT, (True, False)),
    (True, "True: also the root", (True, True)),
    (False, "False: no unit", (False, False)),
    (2, "an int, the size of the shard axis: as True", (True, True)),
):
    claim(RAF, "touches", what, seen)(
        sees(forms, make=lambda api, value=value: two_units(api, reshard_after_forward=value), run=forward)
    )

PLACEMENT = f"{SHARD}(shard_placement_fn=)"


def columns(api: Any, *shape: int) -> str:
    return str(api.fully_shard(nn.Linear(*shape, bias=False), shard_placement_fn=lambda _: Shard(1)).weight.placements)


claim(PLACEMENT, "touches", "`Shard(1)` cuts columns", "(Shard(dim=1),)")(lambda api: columns(api, 4, 4))
claim(PLACEMENT, "errors", "uneven columns", "NotImplementedError", "", why="padded")(
    lambda api: error(lambda: columns(api, 5, 3))
)

POLICY = f"{SHARD}(mp_policy=)"


@claim(POLICY, "touches", "dtype of outputs, and of parameters in forward", ("torch.float64", "torch.bfloat16"))
def _(api: Any) -> tuple[str, str]:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = api.fully_shard(nn.Linear(4, 4), mp_policy=policy)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, _args, _out: seen.append(module.weight.dtype), prepend=True)
    return str(forward(model).dtype), str(seen[0])


def reduces_in(api: Any, **dtypes: Any) -> float:
    """The mean over the ranks of 1 and 2**-9, which bfloat16 cannot hold exactly."""
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **dtypes)
    model = api.fully_shard(nn.Linear(1, 2, bias=False), mp_policy=policy)
    model(torch.full((1, 1), 1.0 if dist.get_rank() == 0 else 2.0**-9)).sum().backward()
    return float(model.weight.grad.full_tensor()[0, 0])


MEAN = (1 + 2.0**-9) / 2
claim(POLICY, "interplay", "`reduce_dtype=torch.float32`: the mean of 1 and 2^-9", MEAN)(
    lambda api: reduces_in(api, reduce_dtype=torch.float32)
)
WHY = "in the parameter's own dtype, as torch 2.15"
claim(POLICY, "interplay", "`reduce_dtype=None`: the mean of 1 and 2^-9", 0.5, MEAN, why=WHY)(reduces_in)
WHY = "at the call; torch at the first forward"
claim(POLICY, "errors", "a dtype in place of a policy", "AttributeError", "ValueError", why=WHY)(
    lambda api: error(lambda: backward(two_units(api, mp_policy=torch.bfloat16)))
)

OFFLOAD = f"{SHARD}(offload_policy=)"
claim(OFFLOAD, "touches", "sharded parameters live on", "cpu")(
    sees(
        lambda m: str(m[0].weight.device),
        make=lambda api: two_units(api, offload_policy=api.CPUOffloadPolicy(pin_memory=False)),
    )
)
claim(OFFLOAD, "errors", "True in place of a policy", "", "ValueError", why="torch does not offload then")(
    fails(lambda m, api: two_units(api, offload_policy=True))
)

IGNORED = f"{SHARD}(ignored_params=)"


@claim(IGNORED, "touches", "not sharded, not reduced (sharded; gradient on each rank, 2 rows)", (False, 2.0))
def _(api: Any) -> tuple[bool, float]:
    model = linears()
    api.fully_shard(model, ignored_params={model[1].bias})
    backward(model)
    return isinstance(model[1].bias, DTensor), float(model[1].bias.grad[0])


claim(IGNORED, "errors", "names in place of parameters", "", "ValueError", why="torch ignores nothing then")(
    fails(lambda m, api: two_units(api, ignored_params=["weight"]))
)


@claim(f"{SHARD}(dp_mesh_dims=)", "touches", "a replicate axis alone shards nothing", "(Replicate(),)")
def _(api: Any) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"dp_{api.__name__}".replace(".", "_"),))
    model = distribute_module(nn.Linear(4, 4), mesh)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(replicate=mesh.mesh_dim_names[0]))
    return str(model.weight.placements)


# --- FSDPModule -------------------------------------------------------------------------------------------------------

UNSHARD = "FSDPModule.unshard"
claim(UNSHARD, "touches", "the unit of the module, no other (sharded: inner unit, root)", (False, True))(
    sees(forms, lambda m: m[0].unshard(), run=lambda m: None)
)


@claim(UNSHARD, "returns", "None; with `async_op=True` an `UnshardHandle`", (True, True))
def unshard_returns(api: Any) -> tuple[bool, bool]:
    model = two_units(api)
    handle = model.unshard(async_op=True)
    handle.wait()
    handle.wait()
    return model[0].unshard() is None, isinstance(handle, api.UnshardHandle) and not forms(model)[1]


claim("UnshardHandle.wait", "order", "twice is as once")(lambda api: unshard_returns(api)[1])

claim("FSDPModule.reshard", "touches", "the unit of the module, no other", (False, True))(
    sees(forms, lambda m: m.unshard(), lambda m: m[0].unshard(), run=lambda m: m.reshard())
)
RESET = "FSDPModule.reset_iter_state"
claim(RESET, "order", "after a forward without backward the next iteration is clean", (True, True))(
    sees(graded, forward, lambda m: m.reset_iter_state())
)
claim(RESET, "errors", "not on the root", "RuntimeError")(fails(lambda m, api: (forward(m), m[0].reset_iter_state())))

LAST = "FSDPModule.set_is_last_backward"
claim(LAST, "order", "gradients are there after the last backward", (True, True))(
    sees(
        graded,
        *(lambda m: m.set_is_last_backward(False), backward, backward),
        lambda m: m.set_is_last_backward(True),
    )
)


SYNC = "FSDPModule.set_requires_gradient_sync"
no_sync: Check = lambda m: m.set_requires_gradient_sync(False)  # noqa: E731
sync: Check = lambda m: m.set_requires_gradient_sync(True)  # noqa: E731
no_all_reduce: Check = lambda m: m.set_requires_all_reduce(False)  # noqa: E731
claim(SYNC, "errors", "a text in place of a bool", "", "ValueError", why="a text is true")(
    fails(lambda m, api: m.set_requires_gradient_sync("no"))
)
claim(SYNC, "recursion", "recursive (gradients after False: inner unit, root)", (False, False))(sees(graded, no_sync))
claim(SYNC, "recursion", "`recurse=False`: this unit", (True, False))(
    sees(graded, lambda m: m.set_requires_gradient_sync(False, recurse=False))
)
claim(SYNC, "order", "the next backward with True reduces the sum of all", 4.0)(sees(row_sum, no_sync, backward, sync))
claim(SYNC, "interplay", "sets `set_requires_all_reduce` too, if it is called later (HSDP)", (True, True))(
    sees(graded, no_all_reduce, sync, make=hsdp)
)
claim(SYNC, "interplay", "... and not if it is called before", (False, False))(
    sees(graded, sync, no_all_reduce, make=hsdp)
)

ALL_REDUCE = "FSDPModule.set_requires_all_reduce"
claim(ALL_REDUCE, "recursion", "recursive (HSDP)", (False, False))(sees(graded, no_all_reduce, make=hsdp))
claim(ALL_REDUCE, "recursion", "`recurse=False`: this unit", (True, False))(
    sees(graded, lambda m: m.set_requires_all_reduce(False, recurse=False), make=hsdp)
)
claim(ALL_REDUCE, "order", "the next backward with True reduces the sum of all (HSDP)", 4.0)(
    sees(row_sum, no_all_reduce, backward, lambda m: m.set_requires_all_reduce(True), make=hsdp)
)

FORWARD = "FSDPModule.set_reshard_after_forward"
claim(FORWARD, "recursion", "recursive (sharded after forward with False)", (False, False))(
    sees(forms, lambda m: m.set_reshard_after_forward(False), run=forward)
)
claim(FORWARD, "recursion", "`recurse=False`, also by position: this unit", (True, False))(
    sees(forms, lambda m: m.set_reshard_after_forward(False, False), run=forward)
)
claim(FORWARD, "interplay", "overrides what the root chose by itself", (True, True))(
    sees(forms, lambda m: m.set_reshard_after_forward(True), run=forward)
)

BACKWARD = "FSDPModule.set_reshard_after_backward"
claim(BACKWARD, "recursion", "recursive (sharded after backward with False)", (False, False))(
    sees(forms, lambda m: m.set_reshard_after_backward(False))
)
claim(BACKWARD, "recursion", "`recurse=False`: this unit", (True, False))(
    sees(forms, lambda m: m.set_reshard_after_backward(False, recurse=False))
)


def prefetches(which: str) -> Check:
    def check(api: Any) -> list[str]:
        model = three_units(api)
        source, target = (model[0], model[2]) if which == "forward" else (model[2], model[0])
        getattr(source, f"set_modules_to_{which}_prefetch")([target])
        backward(model)
        return phases(model, f"FSDP::{which}_prefetch")

    return check


PREFETCH, PREFETCH_BACK = (f"FSDPModule.set_modules_to_{which}_prefetch" for which in ("forward", "backward"))
claim(PREFETCH, "touches", "one unit", ["FSDP::forward_prefetch for 2"])(prefetches("forward"))
claim(PREFETCH, "errors", "a module that is not sharded", "ValueError")(
    fails(lambda m, api: m.set_modules_to_forward_prefetch([*linears()]))
)
BACK = ["FSDP::backward_prefetch for 0"]
claim(PREFETCH_BACK, "touches", "one unit, in place of the one before it in forward", BACK)(prefetches("backward"))
claim(PREFETCH_BACK, "errors", "a module that is not sharded", "ValueError")(
    fails(lambda m, api: m.set_modules_to_backward_prefetch([*linears()]))
)


def custom(method: str, kind: type) -> Check:
    def check(api: Any) -> tuple[int, float]:
        model, mine = two_units(api), kind()
        getattr(model[0], method)(mine)
        backward(model)
        return mine.calls, row_sum(model)

    return check


for method, kind, calls in (("set_custom_all_gather", Gathers, 2), ("set_custom_reduce_scatter", Scatters, 1)):
    claim(f"FSDPModule.{method}", "touches", "one unit: its calls in a step; the gradients stay", (calls, 2.0))(
        custom(method, kind)
    )

HOOK = "FSDPModule.set_all_reduce_hook"
claim(HOOK, "interplay", "what it changes in place counts", 6.0)(
    sees(row_sum, lambda m: m.set_all_reduce_hook(lambda flat: flat.mul_(3)))
)
claim("FSDPModule.set_post_optim_event", "returns", "None")(
    lambda api: two_units(api).set_post_optim_event(torch.Event("cpu")) is None
)

DIVIDE = "FSDPModule.set_gradient_divide_factor"
force_sum: Check = lambda m: m.set_force_sum_reduction_for_comms(True)  # noqa: E731


@claim(DIVIDE, "errors", "on gloo", "RuntimeError", 4.0, why="divided after the sum")
def _(api: Any) -> Any:
    model = two_units(api)
    model.set_gradient_divide_factor(1.0)
    return error(lambda: backward(model)) or row_sum(model)


claim(DIVIDE, "interplay", "with `set_force_sum_reduction_for_comms` on gloo", 4.0)(
    sees(row_sum, force_sum, lambda m: m.set_gradient_divide_factor(1.0))
)
claim("FSDPModule.set_reduce_scatter_divide_factor", "interplay", "the older name of it", 4.0)(
    sees(row_sum, force_sum, lambda m: m.set_reduce_scatter_divide_factor(1.0))
)
claim("FSDPModule.set_force_sum_reduction_for_comms", "touches", "one unit; the mean stays the mean", 2.0)(
    sees(row_sum, force_sum)
)

UNUSED = "FSDPModule.set_reduce_scatter_unused_params"


class Branches(nn.Module):
    """Two layers, of which one goes unused."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def branches(api: Any) -> Any:
    model = nn.Sequential(Branches(), Branches())
    api.fully_shard(model[0])
    return api.fully_shard(model)


def unused_graded(model: Any) -> tuple[bool, ...]:
    model.reshard()
    return tuple(each.unused.weight.grad is not None for each in model)


claim(UNUSED, "touches", "default: a parameter without gradient gets none", (False, False))(
    sees(unused_graded, make=branches)
)
claim(UNUSED, "recursion", "recursive (zeros where True)", (True, True))(
    sees(unused_graded, lambda m: m.set_reduce_scatter_unused_params(True), make=branches)
)
claim(UNUSED, "recursion", "`recurse=False`: this unit", (False, True))(
    sees(unused_graded, lambda m: m.set_reduce_scatter_unused_params(True, recurse=False), make=branches)
)

BUFFERS = "FSDPModule.set_reduce_scatter_max_input_buffers"
claim(BUFFERS, "touches", "timing only", 2.0)(sees(row_sum, lambda m: m.set_reduce_scatter_max_input_buffers(3)))
claim(BUFFERS, "errors", "0", "ValueError")(fails(lambda m, api: m.set_reduce_scatter_max_input_buffers(0)))
GROUP = "FSDPModule.set_separate_reduce_scatter_group"
claim(GROUP, "touches", "where reduce-scatters travel; the gradients stay", 2.0)(
    sees(row_sum, lambda m: m.set_separate_reduce_scatter_group())
)


claim("FSDPModule.set_unshard_in_backward", "returns", "None")(
    lambda api: two_units(api).set_unshard_in_backward(False) is None
)
MEMORY = "FSDPModule.set_allocate_memory_from_process_group_for_comm"
WARNS = "warns on gloo, which has no such memory"


@claim(MEMORY, "errors", WARNS, False, True, why="it has no effect")
def _(api: Any) -> bool:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        two_units(api).set_allocate_memory_from_process_group_for_comm(True)
    return bool(found)


def custom_units(api: Any) -> Any:
    model = two_units(api)
    model.set_custom_all_gather(Gathers())
    return model


claim(MEMORY, "interplay", "after a custom collective", "AssertionError")(
    fails(lambda m, api: m.set_allocate_memory_from_process_group_for_comm(True), custom_units)
)
SYMMETRIC = "FSDPModule.set_symm_mem_for_comm"
claim(SYMMETRIC, "errors", "on gloo", "RuntimeError", "NotImplementedError", why="a `RuntimeError` too")(
    fails(lambda m, api: m.set_symm_mem_for_comm())
)
claim(SYMMETRIC, "interplay", "after a custom collective", "AssertionError")(
    fails(lambda m, api: m.set_symm_mem_for_comm(), custom_units)
)

MANUAL = "FSDPModule.set_manual_backward_finalization"
FINALIZES = "no gradients before `finalize_backward`; its handle; gradients after"


@claim(f"{MANUAL}, finalize_backward, GradientReductionHandle", "order", FINALIZES, ABSENT, (True, True, True))
def _(api: Any) -> tuple[bool, bool, bool]:
    model = two_units(api)
    model.set_manual_backward_finalization(True)
    backward(model)
    before = model[1].weight.grad is None
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    return before, isinstance(handle, api.GradientReductionHandle), all(graded(model))


claim(MANUAL, "errors", "not on the root", ABSENT, "RuntimeError")(
    fails(lambda m, api: (forward(m), m[0].set_manual_backward_finalization(True)))
)


claim("FSDPModule.set_keep_unsharded_storage", "returns", "None", ABSENT, True)(
    lambda api: two_units(api).set_keep_unsharded_storage(True) is None
)
claim("FSDPModule.set_auto_forward_prefetch", "returns", "None", ABSENT, True)(
    lambda api: two_units(api).set_auto_forward_prefetch() is None
)


# --- policies and functions -------------------------------------------------------------------------------------------


def frozen(name: str, field: str, *args: str) -> Check:
    return lambda api: error(lambda: setattr(getattr(api, name)(*args), field, None)) != ""


claim("MixedPrecisionPolicy", "touches", "frozen")(frozen("MixedPrecisionPolicy", "param_dtype"))
WHY = "torch fails at the first forward"
claim("MixedPrecisionPolicy", "errors", "`param_dtype='bf16'`", "", "ValueError", why=WHY)(
    fails(lambda m, api: api.MixedPrecisionPolicy(param_dtype="bf16"))
)
CPU = "CPUOffloadPolicy"
claim(CPU, "touches", "pins by default")(lambda api: api.CPUOffloadPolicy().pin_memory)
claim(CPU, "touches", "frozen", False, True, why="all policies are")(frozen(CPU, "pin_memory"))
WHY = "a `RuntimeError` too, which names `pin_memory=False`"
claim(CPU, "errors", "pinned memory without an accelerator", "RuntimeError", "NotImplementedError", why=WHY)(
    fails(lambda m, api: two_units(api, offload_policy=api.CPUOffloadPolicy()))
)
claim("OffloadPolicy", "touches", "equal to another")(lambda api: api.OffloadPolicy() == api.OffloadPolicy())
DIMS = "DataParallelMeshDims"
claim(DIMS, "touches", "frozen", False, True, why="all policies are")(frozen(DIMS, "shard", "dp"))

REGISTER = "register_fsdp_forward_method"


claim(REGISTER, "touches", "nothing on a module that is not sharded")(
    lambda api: api.register_fsdp_forward_method(linears(), "generate") is None
)
claim(REGISTER, "errors", "no such method", "ValueError")(
    fails(lambda m, api: api.register_fsdp_forward_method(m, "generate"))
)
claim("share_comm_ctx", "returns", "None, also for an empty list")(
    lambda api: api.share_comm_ctx([]) is None and api.share_comm_ctx([two_units(api), two_units(api)]) is None
)
claim("share_comm_ctx", "errors", "a module that is not sharded", "ValueError")(
    fails(lambda m, api: api.share_comm_ctx([*linears()]))
)
