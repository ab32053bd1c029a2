"""Methods beside `forward` as entry points (tests/behaviour.md, section V)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, events, fully_shard, register_fsdp_forward_method
from tests.helpers.models import is_sharded, linears, units
from tests.helpers.parity_models import assert_gradients, batch, mean_gradients
from tests.helpers.ranks import on_ranks


class Encoder(nn.Module):
    """One forward, and two methods that compute something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale

    def encode(self, x: Tensor, *, twice: bool = False) -> dict[str, Tensor]:
        """Several layers, keyword arguments, a container out."""
        x = self.layers(x)
        return {"out": self.layers(x) * self.scale if twice else x * self.scale}

    def scaled(self, x: Tensor) -> Tensor:
        """Uses the root's own parameter only."""
        return x * self.scale


def shard_encoder(model: Encoder, **options: Any) -> Encoder:
    """Layers as units, and the root; both methods registered."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "scaled")
    return model


@on_ranks(2)
@pytest.mark.parametrize("raf", [None, True, False])
def test_method_alone(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 177: called alone, and first of all, it unshards; its output drives backward."""
    plain = Encoder()
    model = shard_encoder(copy.deepcopy(plain), reshard_after_forward=raf)

    def backward(module: nn.Module, which: int) -> None:
        module.encode(batch(0, which, 4), twice=True)["out"].square().mean().backward()

    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        assert is_sharded(model)
        assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2)
def test_methods_and_forward_in_one_iteration(rank: int, world_size: int) -> None:
    """Behaviour 177: in any mixture, with one backward."""
    plain = Encoder()
    model = shard_encoder(copy.deepcopy(plain))

    def backward(module: nn.Module, which: int) -> None:
        x = module(batch(0, which, 4))
        (module.encode(x)["out"] + module.scaled(x)).square().mean().backward()

    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        assert is_sharded(model)
        assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2)
def test_method_runs_the_hooks(rank: int, world_size: int) -> None:
    """Behaviour 177: pre- and post-forward, as for forward; unused units are neither gathered nor reduced."""
    model = shard_encoder(Encoder())
    with events.record() as log:
        model.scaled(batch(0, rank, 4)).sum().backward()
    assert units(log, "pre_forward") == units(log, "post_forward") == [""]
    assert units(log, "all_gather") == [""] and units(log, "reduce_scatter") == [""]


@on_ranks(2)
def test_method_stays_a_bound_method(rank: int, world_size: int) -> None:
    """Behaviour 177: with its name, its docstring and its module."""
    model = shard_encoder(Encoder())
    assert model.encode.__self__ is model
    assert model.encode.__func__ is not Encoder.encode
    assert model.encode.__name__ == "encode" and model.encode.__doc__ == Encoder.encode.__doc__


@on_ranks(2)
def test_method_casts_like_forward(rank: int, world_size: int) -> None:
    """Behaviour 177, 116, 117: inputs and outputs are cast by the policy."""
    model = Encoder()
    seen: list[torch.dtype] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    shard_encoder(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    out = model.encode(batch(0, rank, 4))["out"]
    assert seen == [torch.bfloat16] and out.dtype == torch.float64


class Generator(nn.Module):
    """A method that runs forward again and again, one without self, and a callable set on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bound = partial(Generator.twice, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def generate(self, x: Tensor) -> Tensor:
        """A module's own forward inside of one of its methods."""
        for _ in range(3):
            x = self(x)
        return x

    def twice(self, x: Tensor) -> Tensor:
        """Called through `bound`."""
        return self.linear(self.linear(x))

    @staticmethod
    def double(x: Tensor) -> Tensor:
        """Needs no module."""
        return 2 * x


@on_ranks(2)
@pytest.mark.parametrize("raf", [None, True])
def test_method_that_calls_forward(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 177: as `generate` does; without gradients, and with."""
    plain = Generator()
    model = fully_shard(Generator(), reshard_after_forward=raf)
    model.unshard()
    with torch.no_grad():
        plain.linear.weight.copy_(model.linear.weight)
        plain.linear.bias.copy_(model.linear.bias)
    model.reshard()
    register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        torch.testing.assert_close(model.generate(batch(0, rank, 4)), plain.generate(batch(0, rank, 4)))

    def backward(module: nn.Module, which: int) -> None:
        module.generate(batch(0, which, 4)).square().mean().backward()

    backward(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2)
@pytest.mark.parametrize("name", ["double", "bound"])
def test_callables_that_are_not_methods(rank: int, world_size: int, name: str) -> None:
    """Behaviour 177: a static method or a callable set on the instance is an entry point as well."""
    model = fully_shard(Generator())
    expected = model.double(batch(0, rank, 4))
    register_fsdp_forward_method(model, name)
    out = getattr(model, name)(batch(0, rank, 4))
    if name == "double":
        assert torch.equal(out, expected)
    else:
        out.sum().backward()
        assert model.linear.weight.grad is not None


@on_ranks(2)
def test_a_copy_runs_its_own_method(rank: int, world_size: int) -> None:
    """The registered method of a deep copy once ran the original's layers."""
    model = fully_shard(OneLayer())
    register_fsdp_forward_method(model, "encode")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert copied.encode(torch.ones(2, 4)).abs().sum() > 0
    assert model.encode(torch.ones(2, 4)).abs().sum() == 0


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)
