"""Names that the model has: `fully_shard` swaps its class, and hides none of them."""

import ast
import functools
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

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


def with_attribute(name: str, value: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    setattr(model, name, value)
    return model


MAKES: dict[str, Callable[[str], nn.Module]] = {
    "method": lambda name: type("Model", (nn.Linear,), {name: answering(name)})(2, 2),
    "inherited": lambda name: type("Model", (nn.Linear, type("Mixin", (), {name: answering(name)})), {})(2, 2),
    "child": lambda name: with_attribute(name, nn.Linear(2, 2)),
    "parameter": lambda name: with_attribute(name, nn.Parameter(torch.ones(2))),
    "buffer": lambda name: with_attribute(name, nn.Buffer(torch.ones(2))),
    "attribute": lambda name: with_attribute(name, 1),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", MAKES)
def test_a_name_that_would_be_hidden_is_an_error(rank: int, world_size: int, kind: str) -> None:
    """A tokenizer-like `reshard` or a block's own `unshard` would never run again: torch takes it without a word."""
    for name in given_names() - set(dir(nn.Linear)):
        model = MAKES[kind](name)
        before = type(model)
        with pytest.raises(ArgumentError, match=f"'{name}'.*Rename that"):
            fully_shard([nn.Linear(1, 1), model])
        assert type(model) is before and not any(isinstance(param, DTensor) for param in model.parameters())


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
