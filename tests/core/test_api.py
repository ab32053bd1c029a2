"""The public surface: names, the class swap, policies, and which setters are recursive
(docs/behaviour.md, section A)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    events,
    fully_shard,
)
from tests.helpers.models import (
    error_of,
    is_sharded,
    is_unsharded,
    linears,
    reference_grads,
    run_step,
    sharded_copy,
    units,
)
from tests.helpers.parity_models import assert_gradients, batch
from tests.helpers.ranks import on_ranks

EXPORTED = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
RECURSIVE = [
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
]
NOT_RECURSIVE = [
    "unshard",
    "reshard",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
]


@pytest.mark.parametrize("name", EXPORTED)
def test_name_is_exported(name: str) -> None:
    """Behaviour 1: the names of torch.distributed.fsdp that belong to FSDP2."""
    assert getattr(fsdp2, name) is not None
    assert name in fsdp2.__all__


@on_ranks(2)
def test_arguments_are_keyword_only(rank: int, world_size: int) -> None:
    """Behaviour 2: a positional mesh is a TypeError, and changes nothing."""
    module = nn.Linear(2, 2)
    with pytest.raises(TypeError):
        fully_shard(module, init_device_mesh("cpu", (world_size,)))
    assert type(module) is nn.Linear
    kinds = {p.kind for name, p in inspect.signature(fully_shard).parameters.items() if name != "module"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@on_ranks(2)
def test_the_argument_is_returned(rank: int, world_size: int) -> None:
    """Behaviour 2, 19: module -> same module, list -> same list, tuple -> same tuple."""
    module, in_list, in_tuple = nn.Linear(2, 2), [nn.Linear(2, 2), nn.ReLU()], (nn.Linear(2, 2),)
    assert fully_shard(module) is module
    assert fully_shard(in_list) is in_list
    assert fully_shard(in_tuple) is in_tuple


class Special(nn.Linear):
    """A class of the user's own."""


@on_ranks(2)
def test_class_is_swapped(rank: int, world_size: int) -> None:
    """Behaviour 3, 4: a generated class, one per original class; children keep theirs."""
    model = nn.Sequential(Special(2, 2), Special(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model[1])
    assert type(model) is nn.Sequential
    fully_shard(model)
    assert type(model[0]) is type(model[1])
    assert type(model[0]).__name__ == "FSDPSpecial"
    assert type(model[0]).__bases__ == (FSDPModule, Special)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model).__bases__ == (FSDPModule, nn.Sequential)
    assert isinstance(model[0], Special) and isinstance(model[0], FSDPModule)
    assert type(model[2]) is nn.Linear


@on_ranks(2)
def test_swapped_class_builds_plain_modules(rank: int, world_size: int) -> None:
    """Behaviour 5: slicing a sharded Sequential gives a plain one with the same children."""
    model = fully_shard(linears(3))
    part = model[:2]
    assert type(part) is nn.Sequential
    assert list(part) == list(model)[:2]
    assert type(type(model)(nn.ReLU())) is nn.Sequential


@on_ranks(2)
def test_state(rank: int, world_size: int) -> None:
    """Behaviour 6: None for a plain module, distinct for each call, one for all modules of a list."""
    model = linears(5)
    fully_shard(model[0])
    fully_shard(model[1])
    fully_shard([model[2], model[3]])
    state = fully_shard.state
    assert state(model) is None and state(model[4]) is None
    assert state(model[0]) is not None and state(model[0]) is not state(model[1])
    assert state(model[2]) is not None and state(model[2]) is state(model[3])


@on_ranks(2)
def test_pickling_is_refused(rank: int, world_size: int) -> None:
    """Behaviour 7: pickle fails early, and says what to do."""
    assert "state_dict" in error_of(AssertionError, lambda: pickle.dumps(fully_shard(nn.Linear(2, 2))))


def test_mixed_precision_policy() -> None:
    """Behaviour 8: frozen, hashable, with this positional order."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False)
    assert policy.param_dtype == torch.bfloat16
    assert policy.reduce_dtype == torch.float32
    assert policy.output_dtype == torch.float16
    assert policy.cast_forward_inputs is False
    assert MixedPrecisionPolicy() == MixedPrecisionPolicy(None, None, None, True)
    assert {policy: 1}[copy.copy(policy)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = torch.float32  # type: ignore[misc]


def test_offload_policies() -> None:
    """Behaviour 8: CPUOffloadPolicy is an OffloadPolicy, pinned by default."""
    assert issubclass(CPUOffloadPolicy, OffloadPolicy)
    assert CPUOffloadPolicy().pin_memory is True
    assert CPUOffloadPolicy(pin_memory=False).pin_memory is False
    assert CPUOffloadPolicy() == CPUOffloadPolicy() and OffloadPolicy() != CPUOffloadPolicy()


def test_data_parallel_mesh_dims() -> None:
    """Behaviour 8: names as one string or several."""
    assert DataParallelMeshDims(shard="dp").shard_names == ("dp",)
    assert DataParallelMeshDims(shard="dp").replicate_names == ()
    both = DataParallelMeshDims(("a", "b"), "c")
    assert (both.shard_names, both.replicate_names) == (("a", "b"), ("c",))


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursive_setter_signature(name: str) -> None:
    """Behaviour 9: recursive by default, `recurse` keyword-only."""
    recurse = inspect.signature(getattr(FSDPModule, name)).parameters["recurse"]
    assert recurse.default is True and recurse.kind is inspect.Parameter.KEYWORD_ONLY


def test_set_reshard_after_forward_signature() -> None:
    """Behaviour 9: here `recurse` may be positional."""
    recurse = inspect.signature(FSDPModule.set_reshard_after_forward).parameters["recurse"]
    assert recurse.default is True and recurse.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize("name", NOT_RECURSIVE)
def test_other_methods_do_not_recurse(name: str) -> None:
    """Behaviour 10: these act on one module's group only."""
    assert "recurse" not in inspect.signature(getattr(FSDPModule, name)).parameters


def two_units(**options: Any) -> nn.Sequential:
    """Unit "0" and the root, which owns layer 1."""
    model = linears(2)
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


@on_ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_recursion_of_gradient_sync(rank: int, world_size: int, recurse: bool) -> None:
    """Behaviour 9: set_requires_gradient_sync reaches the child unless told not to."""
    model = two_units()
    model.set_requires_gradient_sync(False, recurse=recurse)
    run_step(model, rank)
    assert model[1].weight.grad is None
    assert (model[0].weight.grad is None) == recurse


@on_ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_recursion_of_reshard_after_forward(rank: int, world_size: int, recurse: bool) -> None:
    """Behaviour 9, 43: set_reshard_after_forward, with `recurse` positional; also in place of the root's own choice."""
    model = two_units()
    model.set_reshard_after_forward(False, recurse)
    model(batch(0, rank, 4))
    assert is_unsharded(model[1])
    assert is_unsharded(model[0]) if recurse else is_sharded(model[0])
    model.set_reshard_after_forward(True, recurse)
    model(batch(0, rank, 4))
    assert is_sharded(model)


@on_ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_recursion_of_reshard_after_backward(rank: int, world_size: int, recurse: bool) -> None:
    """Behaviour 9: set_reshard_after_backward."""
    model = two_units()
    model.set_reshard_after_backward(False, recurse=recurse)
    run_step(model, rank)
    assert is_unsharded(model[1])
    assert is_unsharded(model[0]) if recurse else is_sharded(model[0])
    model.reshard()
    model[0].reshard()
    assert is_sharded(model) and model[0].weight.grad is not None and model[1].weight.grad is not None


class Branches(nn.Module):
    """Two linear layers, of which the second may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@on_ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_recursion_of_reduce_scatter_unused_params(rank: int, world_size: int, recurse: bool) -> None:
    """Behaviour 9, 92: set_reduce_scatter_unused_params."""
    model = nn.Sequential(Branches(), Branches())
    fully_shard(model[0])
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True, recurse=recurse)
    run_step(model, rank)
    assert torch.equal(model[1].unused.weight.grad.to_local(), torch.zeros(2, 4))
    assert (model[0].unused.weight.grad is not None) == recurse


@on_ranks(2)
def test_unshard_and_reshard_act_on_one_unit(rank: int, world_size: int) -> None:
    """Behaviour 10, 80: neither touches the units below."""
    model = two_units()
    model.unshard()
    assert is_unsharded(model[1]) and is_sharded(model[0])
    model[0].unshard()
    model.reshard()
    assert is_sharded(model[1]) and is_unsharded(model[0])


@on_ranks(2)
@pytest.mark.parametrize("setter", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
def test_divide_factor_acts_on_one_unit(rank: int, world_size: int, setter: str) -> None:
    """Behaviour 10, 129: a factor of 1 gives the sum in this unit, and the mean stays in the other."""
    torch.manual_seed(0)
    plain = linears(2)
    model = sharded_copy(plain, lambda m: (fully_shard(m[0]), fully_shard(m)))
    getattr(model, setter)(1.0)
    run_step(model, rank)
    expected = reference_grads(plain, world_size)
    for name in ("1.weight", "1.bias"):
        expected[name] = expected[name] * world_size
    assert_gradients(model, expected)


@on_ranks(2)
def test_force_sum_keeps_the_mean(rank: int, world_size: int) -> None:
    """Behaviour 10, 130: summing and dividing afterwards gives the same gradients."""
    plain = linears(2)
    model = sharded_copy(plain, lambda m: (fully_shard(m[0]), fully_shard(m)))
    model.set_force_sum_reduction_for_comms(True)
    run_step(model, rank)
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(2)
def test_all_reduce_hook_acts_on_one_unit(rank: int, world_size: int) -> None:
    """Behaviour 10: only the root's reduction (4 x 4 weight and bias over 2 ranks) reaches the hook."""
    model = two_units()
    seen: list[int] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    run_step(model, rank)
    assert seen == [10]


@on_ranks(2)
def test_unshard_in_backward_acts_on_one_unit(rank: int, world_size: int) -> None:
    """Behaviour 10: of two units that reshard after forward, only the other one is gathered in backward."""
    model = two_units(reshard_after_forward=True)
    model.set_unshard_in_backward(False)
    loss = model(batch(0, rank, 4)).sum()
    model.unshard()  # a linear layer does read its weight in backward
    with events.record() as log:
        loss.backward()
    assert units(log, "unshard") == ["0"]


@on_ranks(2)
def test_prefetch_lists_act_on_one_unit(rank: int, world_size: int) -> None:
    """Behaviour 10: the list of unit 0 says nothing about unit 1."""
    model = linears(3)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    with events.record() as log:
        model(batch(0, rank, 4))
    order = [(event.kind, event.unit) for event in log if event.kind in ("unshard", "reshard")]
    assert order.index(("unshard", "1")) < order.index(("reshard", "0"))
    assert order.index(("unshard", "2")) > order.index(("reshard", "1"))


@on_ranks(2)
def test_call_compatible_setters_exist(rank: int, world_size: int) -> None:
    """Behaviour 9, 10: all setters of FSDP2 are methods of a sharded module, and those that only tune keep results."""
    plain = linears(1)
    model = sharded_copy(plain, fully_shard)
    model.set_reduce_scatter_max_input_buffers(2)
    model._set_unshard_async_op(True)
    model.set_is_last_backward(True)
    model.set_requires_all_reduce(True)
    run_step(model, rank)
    assert_gradients(model, reference_grads(plain, world_size))
    assert dist.get_world_size() == world_size
