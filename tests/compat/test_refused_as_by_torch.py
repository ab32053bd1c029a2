"""Every mistake that FSDP2's documents let a user make, made on torch's FSDP2 and on ours.

Code that caught torch's exception must catch ours: where torch raises, ours raises something of that type, or the table
says why not. Where torch takes a wrong value silently (``mp_policy=torch.bfloat16`` computed in fp32 here, once), ours
raises. Whatever raises has changed nothing.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication

import fsdp2
from fsdp2 import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, ZeroPolicy
from fsdp2.errors import FSDPError
from tests.helpers.parity_models import TORCH_VERSION
from tests.helpers.ranks import on_ranks

Api = Any  # `torch.distributed.fsdp` or `fsdp2`

# The wrong call; the model is two linear layers, not sharded yet.
Make = Callable[[Api, nn.Sequential], Any]


def sharding(**options: Any) -> Make:
    return lambda api, model: api.fully_shard(model, **options)


def with_policy(*args: Any, **options: Any) -> Make:
    return lambda api, model: api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(*args, **options))


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def dims(mesh_of: Callable[[], DeviceMesh], shard: Any = None, replicate: Any = None, **options: Any) -> Any:
    def make(api: Api, model: nn.Sequential) -> Any:
        return api.fully_shard(
            model, mesh=mesh_of(), dp_mesh_dims=api.DataParallelMeshDims(shard, replicate), **options
        )

    return make


def named() -> DeviceMesh:
    return mesh(2, names=("dp",))


def on_spmd_mesh(api: Api, model: nn.Sequential) -> Any:
    spmd = mesh(2, 1, names=("dp", f"tp_of_{api.__name__}".replace(".", "_")))  # DTensors of equal meshes share one
    distribute_module(model, spmd)
    return api.fully_shard(model, mesh=spmd, dp_mesh_dims=api.DataParallelMeshDims("dp"), reshard_after_forward=3)


AS_TORCH: dict[str, Make] = {
    "one module twice": lambda api, model: api.fully_shard([model[0], model[0]]),
    "mesh by position": lambda api, model: api.fully_shard(model, mesh(2)),
    "unknown option": sharding(sync_module_states=True),
    "3-D mesh": lambda api, m: api.fully_shard(m, mesh=mesh(1, 1, 2, names=("a", "b", "c"))),
    "2-D mesh without names": lambda api, m: api.fully_shard(m, mesh=mesh(1, 2)),
    "dims name nothing": dims(named),
    "dims name no axis of the mesh": dims(named, "fsdp"),
    "dims of a mesh without names": dims(lambda: mesh(2), "dp"),
    "dims with plain parameters": dims(named, "dp"),
    "int for reshard_after_forward with dims": on_spmd_mesh,
    **{f"reshard_after_forward={x!r}": sharding(reshard_after_forward=x) for x in (0, -1, 4, 2.0, "yes")},
    "placement returns a number": sharding(shard_placement_fn=lambda param: 0),
    "placement returns Replicate": sharding(shard_placement_fn=lambda param: Replicate()),
    "placement of a dim too many": sharding(shard_placement_fn=lambda param: Shard(2)),
    "cast_forward_inputs='no'": with_policy(cast_forward_inputs="no"),
    "offload_policy of FSDP1": sharding(offload_policy=torch_fsdp.CPUOffload(True)),
    "offload_policy is a class": lambda api, m: api.fully_shard(m, offload_policy=api.CPUOffloadPolicy),
    "ignored_params is a parameter": lambda api, m: api.fully_shard(m, ignored_params=m[0].weight),
    "ignored_params are modules": lambda api, m: api.fully_shard(m, ignored_params={m[0]}),
}
# Torch's type is an accident of its code, some calls later.
OTHERWISE: dict[str, Make] = {
    "module is a name": lambda api, model: api.fully_shard("model"),
    "list with a name": lambda api, model: api.fully_shard([model, "head"]),
    "empty list": lambda api, model: api.fully_shard([]),
    "mesh is a size": sharding(mesh=2),
    "mesh is a process group": lambda api, m: api.fully_shard(m, mesh=torch.distributed.group.WORLD),
    "one axis shards and replicates": dims(named, "dp", "dp"),
    "dims is a tuple": lambda api, m: api.fully_shard(m, mesh=named(), dp_mesh_dims=("dp",)),
    "dims hold numbers": dims(named, 0),
    "placement is no function": sharding(shard_placement_fn=Shard(0)),
    "mp_policy is None": sharding(mp_policy=None),
    "mp_policy is a dict": sharding(mp_policy={"param_dtype": torch.bfloat16}),
    "mp_policy of FSDP1": sharding(mp_policy=torch_fsdp.MixedPrecision(torch.bfloat16)),
    **{
        f"{field}={value!r}": with_policy(**{field: value})
        for field in ("param_dtype", "reduce_dtype", "output_dtype")
        for value in ("bf16", torch.int8)
    },
    "pin_memory='no'": lambda api, m: api.fully_shard(m, offload_policy=api.CPUOffloadPolicy("no")),
    "ignored_params is a name": sharding(ignored_params="weight"),
}
(OTHERWISE if TORCH_VERSION >= (2, 15) else AS_TORCH)["mp_policy is a class"] = lambda api, m: api.fully_shard(
    m, mp_policy=api.MixedPrecisionPolicy
)
ARGUMENTS = AS_TORCH | OTHERWISE
CALLS: dict[str, Make] = {
    "still on meta": lambda api, m: api.fully_shard(m.to("meta"))(torch.ones(1, 4)),
    "custom all-gather and memory of the group": lambda api, m: custom_and_memory(api.fully_shard(m)),
}


def custom_and_memory(model: Any) -> None:
    model.set_custom_all_gather(SimpleNamespace(allocate=torch.empty))
    model.set_allocate_memory_from_process_group_for_comm(True)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def outcome(api: Api, make: Make) -> BaseException | None:
    model = two_layers()
    try:
        make(api, model)
        model(torch.ones(1, 4)).sum().backward()
    except Exception as error:
        return error
    return None


def problem_of(name: str, torchs: BaseException | None, ours: BaseException | None) -> str:
    if ours is None:
        return "no error here"
    if TORCH_VERSION < (2, 13) and isinstance(torchs, AttributeError):
        return ""  # torch's class has no such method yet
    if not isinstance(ours, FSDPError) and not (isinstance(ours, TypeError) and isinstance(torchs, TypeError)):
        return f"an error that is not ours: {ours!r}"
    if torchs is not None and isinstance(ours, type(torchs)) == (name in OTHERWISE):
        return f"torch raises {torchs!r}, here {ours!r}"
    return ""


@on_ranks(2)
def test_each_mistake_is_an_error_of_torchs_type(rank: int, world_size: int) -> None:
    """Behaviour 2, 8, 19, 106, 136, 181, 183, 186: see `ARGUMENTS` and `CALLS`; helpers/parity_rows.py has others."""
    mistakes = ARGUMENTS | CALLS
    problems = {
        name: problem_of(name, outcome(torch_fsdp, make), outcome(fsdp2, make)) for name, make in mistakes.items()
    }
    assert not any(problems.values()), {name: problem for name, problem in problems.items() if problem}


def everything(model: nn.Module) -> list[Any]:
    """What `fully_shard` changes: classes, attributes, hooks, parameters."""
    return [
        (
            type(module),
            sorted(vars(module)),
            [(name, id(param), type(param), param.device, param.dtype) for name, param in module.named_parameters()],
            len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._state_dict_pre_hooks),
        )
        for module in model.modules()
    ]


@on_ranks(2)
def test_a_wrong_argument_changes_nothing(rank: int, world_size: int) -> None:
    problems = []
    for name, make in ARGUMENTS.items():
        if name == "int for reshard_after_forward with dims":
            continue  # the model is distributed before
        model = two_layers()
        before = everything(model)
        with pytest.raises(Exception):  # noqa: B017 - which one is the other test's
            make(fsdp2, model)
        if everything(model) != before:
            problems.append(name)
    assert not problems, problems


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixedPrecisionPolicy(param_dtype_override_fn=torch.bfloat16), "_override_fn: expected a func"),
        (lambda: MixedPrecisionPolicy(all_gather_dtype="int8"), "all_gather_dtype: expected torch.int8 .*int8"),
        (lambda: MixedPrecisionPolicy(reduce_scatter_dtype="bf16"), "reduce_scatter_dtype: expected .*'bf16'"),
        (lambda: ZeroPolicy(stage=True), "stage.*got True"),
        (lambda: ZeroPolicy(shard_size=0), "shard_size: expected a number of ranks or None, got 0"),
        (lambda: ZeroPolicy(keep_frozen=1), "keep_frozen: expected a bool or 'host', got 1"),
    ],
)
def test_policies_of_ours_check_their_fields(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(fsdp2.ArgumentError, match=message):
        make()


@on_ranks(2)
def test_messages_name_what_was_got_and_what_to_pass(rank: int, world_size: int) -> None:
    """`mp_policy=torch.bfloat16` was read as a policy without any field, and the model computed in fp32."""

    def message(**options: Any) -> str:
        with pytest.raises(fsdp2.ArgumentError) as caught:
            fsdp2.fully_shard(nn.Linear(2, 2), **options)
        return str(caught.value)

    assert message(mp_policy=torch.bfloat16) == (
        "fully_shard: mp_policy: expected a MixedPrecisionPolicy, got torch.bfloat16. Pass "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
    )
    assert message(offload_policy=True) == (
        "fully_shard: offload_policy: expected an OffloadPolicy, got True. Pass CPUOffloadPolicy() to offload."
    )
    assert message(zero=2) == "fully_shard: zero: expected a ZeroPolicy or None, got 2. Pass ZeroPolicy(stage=2)."
    if not torch.accelerator.is_available():
        with pytest.raises(fsdp2.UnsupportedError, match=r"Pass CPUOffloadPolicy\(pin_memory=False\)"):
            fsdp2.fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())


@on_ranks(2)
def test_what_torch_takes_is_taken(rank: int, world_size: int) -> None:
    """Clients pass ``offload_policy=None``, torch's own policies, objects with their fields, lists of parameters."""
    fields = {"param_dtype": torch.bfloat16, "reduce_dtype": None, "output_dtype": None, "cast_forward_inputs": True}
    for policy in (torch_fsdp.MixedPrecisionPolicy(torch.bfloat16), SimpleNamespace(**fields)):
        model: Any = fsdp2.fully_shard(two_layers(), mp_policy=policy, offload_policy=None)
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16
    for offload in (torch_fsdp.OffloadPolicy(), torch_fsdp.CPUOffloadPolicy(pin_memory=False)):
        fsdp2.fully_shard(two_layers(), offload_policy=offload)
    for kind in (set, frozenset, list, tuple, iter):
        model = two_layers()
        fsdp2.fully_shard(model, ignored_params=kind(list(model[0].parameters())))
        assert not isinstance(model[0].weight, DTensor) and isinstance(model[1].weight, DTensor)
    spmd = mesh(2, names=("dp_here",))
    model = distribute_module(two_layers(), spmd)
    kind = getattr(torch_fsdp, "DataParallelMeshDims", DataParallelMeshDims)  # torch 2.11 has none
    fsdp2.fully_shard(model, mesh=spmd, dp_mesh_dims=kind(shard="dp_here"))
    assert model[0].weight.to_local().shape == (2, 4)


@on_ranks(2)
def test_axes_in_the_other_order_are_reported(rank: int, world_size: int) -> None:
    """A mesh named ("shard", "replicate") is taken by position, as torch takes it: nothing was sharded."""
    with pytest.warns(UserWarning, match="replicated over 'dp_shard' and sharded over 'dp_replicate' here") as told:
        fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh(2, 1, names=("dp_shard", "dp_replicate")))
    assert told[0].filename == __file__
    fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh(1, 2, names=("dp_replicate", "dp_shard")))
    fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh(1, 2, names=("a", "b")))


@on_ranks(2)
def test_whole_tensors_into_a_sharded_model(rank: int, world_size: int) -> None:
    """`load_state_dict` of a file with whole tensors filled a screen with "got mixed torch.Tensor and DTensor"."""
    plain = two_layers()
    state = plain.state_dict()
    model: Any = fsdp2.fully_shard(two_layers())
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    lines = str(caught.value).splitlines()
    assert lines[1] == "\t'0.weight' is sharded, and the state dict has a plain tensor of shape (4, 4)."
    assert len(lines) == 6 and sum("set_model_state_dict(model, state" in line for line in lines) == 1
    assert str(caught.value).count("mixed torch.Tensor and DTensor") == 1  # for who looks for torch's words
    # Both ways out work.
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(model[1].weight.full_tensor(), state["1.weight"])
    model = fsdp2.fully_shard(two_layers())
    with fsdp2.full_params(model):
        model.load_state_dict(state)
    assert torch.equal(model[1].weight.full_tensor(), state["1.weight"])
    # What torch takes is taken, and other errors stay torch's.
    with implicit_replication():
        assert outcome_of_load(model, {"0.weight": torch.ones(4, 4)}) == ""
    assert "size mismatch for 0.weight" in outcome_of_load(model, {"0.weight": torch.ones(5, 4)})
    model.load_state_dict(fsdp2.fully_shard(two_layers()).state_dict())


def outcome_of_load(model: nn.Module, state: dict[str, torch.Tensor]) -> str:
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return str(error)
    return ""
