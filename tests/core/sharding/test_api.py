"""The public surface: names, the class swap, policies, and which setters are recursive
(tests/behaviour.md, section A)."""

from __future__ import annotations

import inspect
import pickle

import pytest
from torch import nn

from fsdp2 import (
    DataParallelMeshDims,
    FSDPModule,
    fully_shard,
)
from tests.helpers.models import (
    error_of,
    linears,
)
from tests.helpers.ranks import on_ranks

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
