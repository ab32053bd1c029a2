"""Names that the model has: `fully_shard` swaps its class, and hides none of them.

A model with a method `_set` or `_unit` never had it called again: helpers of the setters stood before it in the swapped
class. Some calls went into ours without a word, others ended in a `TypeError` of a class that the user does not know.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, Self

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp2 import FSDPModule, fully_shard
from fsdp2.errors import ArgumentError
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import modules

# What later versions of torch have and we document beside it.
ADDED = {
    "finalize_backward",
    "set_auto_forward_prefetch",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    *("reset_iter_state", "set_reduce_scatter_max_input_buffers", "set_reduce_scatter_unused_params"),
    *("set_separate_reduce_scatter_group", "set_symm_mem_for_comm"),
}


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def given_names() -> set[str]:
    """What a sharded module has that a module does not."""
    names = set(dir(FSDPModule)) - set(dir(nn.Module))
    return {name for name in names if not is_special(name)}


def test_the_class_has_torchs_names_and_documented_ones() -> None:
    assert given_names() <= {*dir(torch_fsdp.FSDPModule), *ADDED}
    assert {name for name in given_names() - set(dir(torch_fsdp.FSDPModule)) if name.startswith("_")} == set()


@functools.cache
def names_of_the_package() -> set[str]:
    """Every function, method, class, argument and attribute that fsdp2 has anywhere."""
    names: set[str] = set()
    for module in modules().values():
        for node in ast.walk(module.tree):
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Attribute():
                    names.add(node.attr)
                case ast.arg():
                    names.add(node.arg)
                case ast.Name():
                    names.add(node.id)
    return {name for name in names if not is_special(name)}


def plausible_names() -> list[str]:
    helpers = {"_unit", "_units", "_set", "_use_memory", "_groups_of_one_mesh"}  # what the class once had besides
    usual = {"_step", "config", "context", "device", "generate", "group", "params", "root", "setup", "shard", "state"}
    taken = {*dir(nn.Linear(1, 1)), *dir(torch_fsdp.FSDPModule), *ADDED, "_fsdp2_unit", "_fsdp2_owners"}
    return sorted((names_of_the_package() | helpers | usual) - taken)


def answering(name: str) -> Any:
    return lambda self: (name, self.out_features)


@pytest.mark.exhaustive
@on_ranks(2)
def test_methods_of_any_other_name_stay_the_models(rank: int, world_size: int) -> None:
    names = plausible_names()
    assert len(names) > 1000
    cls = type("Named", (nn.Linear,), {name: answering(name) for name in names})
    model = nn.Sequential(cls(4, 4), cls(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    model[0].unshard()
    model[0].reshard()
    assert [getattr(model[0], name)() for name in names] == [(name, 4) for name in names]


@on_ranks(2)
def test_attributes_of_any_other_name_stay_the_models(rank: int, world_size: int) -> None:
    """Set on the object before it is sharded: as values, and as submodules."""
    names = plausible_names()
    model, values = nn.Linear(2, 2), nn.Linear(2, 2)
    for name in names:
        setattr(model, name, nn.Identity())
        setattr(values, name, name)
    children = dict(model.named_children())
    fully_shard(model)
    fully_shard(values)
    model(torch.ones(2, 2)).sum().backward()
    values(torch.ones(2, 2)).sum().backward()
    assert dict(model.named_children()) == children
    assert [getattr(model, name) for name in names] == list(children.values())
    assert [getattr(values, name) for name in names] == names


def as_method(name: str) -> nn.Module:
    return type("Model", (nn.Linear,), {name: answering(name)})(2, 2)


def as_inherited_method(name: str) -> nn.Module:
    return type("Model", (nn.Linear, type("Mixin", (), {name: answering(name)})), {})(2, 2)


def as_child(name: str) -> nn.Module:
    model = nn.Linear(2, 2)
    model.add_module(name, nn.Linear(2, 2))
    return model


def as_parameter(name: str) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    return model


def as_buffer(name: str) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer(name, torch.ones(2))
    return model


def as_attribute(name: str) -> nn.Module:
    model = nn.Linear(2, 2)
    setattr(model, name, 1)
    return model


@on_ranks(2)
@pytest.mark.parametrize(
    "make",
    [as_method, as_inherited_method, as_child, as_parameter, as_buffer, as_attribute],
    ids=lambda make: make.__name__,
)
def test_a_name_that_would_be_hidden_is_an_error(rank: int, world_size: int, make: Any) -> None:
    """A tokenizer-like `reshard` or a block's own `unshard` would never run again: torch takes it without a word."""
    for name in given_names():
        if hasattr(nn.Linear, name):
            continue
        model = make(name)
        before = type(model)
        with pytest.raises(ArgumentError, match=f"'{name}'.*Rename that"):
            fully_shard([nn.Linear(1, 1), model])
        assert type(model) is before and not any(
            isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters()
        )


class Moved(nn.Linear):
    """Counts how often it is moved, and says what it was given."""

    num_applied = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        type(self).num_applied += 1
        return super()._apply(fn, recurse)

    def __repr__(self) -> str:
        return "Moved"


@on_ranks(2)
def test_the_models_apply_is_called(rank: int, world_size: int) -> None:
    """`_apply` is the one name that both have: ours calls the model's, which calls that of `nn.Module`."""
    model = fully_shard(Moved(4, 4))
    before = Moved.num_applied
    model.to(torch.float64)
    assert Moved.num_applied == before  # the class counts by itself
    assert type(model).num_applied == before + 1
    assert model.weight.dtype == torch.float64 and repr(model) == "Moved"
