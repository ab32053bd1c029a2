"""Names that the model has: `fully_shard` swaps its class, and hides none of them."""

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


def answering(name: str) -> Any:
    return lambda self: (name, self.out_features)


@on_ranks(2)
def test_attributes_of_any_other_name_stay_the_models(rank: int, world_size: int) -> None:
    """A model may have a `step`, a `config` or a `_unit`: those that we set say whose they are."""
    model = nn.Linear(2, 2)
    before = set(vars(model))
    fully_shard(model)
    model(torch.ones(2, 2)).sum().backward()
    added = set(vars(model)) - before
    assert added and all(name.startswith(("_fsdp2_", "_is_fsdp_", "__composable_")) for name in added), added


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
