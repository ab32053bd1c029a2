"""Methods beside `forward` as entry points (tests/behaviour.md, section V)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, events, fully_shard, register_fsdp_forward_method
from tests.helpers.models import is_sharded, linears, units
from tests.helpers.one_process import check
from tests.helpers.parity_models import batch
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
    """Behaviour 177: called alone, and first of all, it unshards; its output drives backward. So do mixtures."""
    plain = Encoder()
    model = shard_encoder(copy.deepcopy(plain), reshard_after_forward=raf)

    def backward(module: nn.Module, which: int) -> None:
        module.encode(batch(0, which, 4), twice=True)["out"].square().mean().backward()

    def mixed(module: nn.Module, which: int) -> None:
        x = module(batch(0, which, 4))
        (module.encode(x)["out"] + module.scaled(x)).square().mean().backward()

    check(model, plain, rank, world_size, backward, times=2)
    check(model, plain, rank, world_size, mixed)
    assert is_sharded(model)


@on_ranks(2)
def test_method_runs_the_hooks(rank: int, world_size: int) -> None:
    """Behaviour 116, 117, 177: pre- and post-forward, as for forward, with its casts; unused units do nothing. It stays
    a bound method with its name."""
    model = shard_encoder(Encoder(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    with events.record() as log:
        out = model.scaled(batch(0, rank, 4))
        out.sum().backward()
    assert out.dtype == torch.float64 and {e.dtype for e in log if e.kind == "all_gather"} == {torch.bfloat16}
    for kind in ("pre_forward", "post_forward", "all_gather", "reduce_scatter"):
        assert units(log, kind) == [""]
    assert model.encode.__self__ is model and model.encode.__func__ is not Encoder.encode
    assert model.encode.__name__ == "encode" and model.encode.__doc__ == Encoder.encode.__doc__


class Generator(nn.Linear):
    """A method that runs forward again and again, and one without self."""

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self(x)
        return x

    @staticmethod
    def double(x: Tensor) -> Tensor:
        return 2 * x


@on_ranks(2)
@pytest.mark.parametrize("raf", [None, True])
def test_method_that_calls_forward(rank: int, world_size: int, raf: bool | None) -> None:
    """Behaviour 177: as `generate` does; without gradients, and with."""
    plain = Generator(4, 4)
    model = fully_shard(copy.deepcopy(plain), reshard_after_forward=raf)
    register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        torch.testing.assert_close(model.generate(batch(0, rank, 4)), plain.generate(batch(0, rank, 4)))
    check(model, plain, rank, world_size, lambda m, r: m.generate(batch(0, r, 4)).square().mean().backward())


@on_ranks(2)
def test_callables_that_are_not_methods(rank: int, world_size: int) -> None:
    """Behaviour 177: a static method or a callable set on the instance is an entry point as well."""
    model: Any = Generator(4, 4)
    model.bound = lambda x: nn.functional.linear(x, model.weight)
    fully_shard(model)
    for name in ("double", "bound"):
        register_fsdp_forward_method(model, name)
    assert torch.equal(model.double(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    model.bound(batch(0, rank, 4)).sum().backward()
    assert model.weight.grad is not None


@on_ranks(2)
def test_a_copy_runs_its_own_method(rank: int, world_size: int) -> None:
    """The registered method of a deep copy once ran the original's layers."""
    model = fully_shard(Generator(4, 4, bias=False))
    register_fsdp_forward_method(model, "generate")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_()
    assert copied.generate(torch.ones(2, 4)).abs().sum() > 0
    assert model.generate(torch.ones(2, 4)).abs().sum() == 0
