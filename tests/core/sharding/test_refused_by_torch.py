"""Parameters that torch's FSDP2 refuses or breaks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

import fsdp2
from fsdp2 import ArgumentError, fully_shard
from tests.helpers.parity_models import Block, batch, full, local, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    ORDERS,
    Convolutions,
    Experts,
    Packed,
    PackedLinear,
    Scaled,
    Tied,
    shard_in_order,
)
from tests.helpers.trained_alike import SETTINGS, one_step, options, shard_children, train
from tests.helpers.two_layers import X, backward_of

# --- uneven sharding on any dim ---------------------------------------------------------------------------------------


class Cube(nn.Module):
    """A parameter of three dims, none of which divides by two, one smaller than the worlds; and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 7, 1) / 2)
        self.matrix = nn.Parameter(torch.randn(7, 5) / 3)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,ijk->bjk", x[:, :3], self.cube).squeeze(2)
        return torch.tanh(hidden) @ self.matrix + self.bias


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dim", [1, 2, -2])
def test_uneven_dims(rank: int, world_size: int, setting: str, dim: int) -> None:
    """Behaviour 28, 186: `torch.chunk` along any dim, ranks with fewer columns or none included."""
    given = options(setting, world_size)

    def place(param: nn.Parameter) -> Shard:
        return Shard(dim) if -param.ndim <= dim < param.ndim else Shard(param.ndim - 1)

    model = train(rank, world_size, Cube, lambda api, m: api.fully_shard(m, shard_placement_fn=place, **given))
    for param in model.parameters():
        assert local(param).shape == shard_like(full(param), param).shape
        assert param.placements[-1].dim == place(param).dim % param.ndim


# --- memory that is not contiguous ------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize(("setting", "dim"), [("reshard", 0), ("keep", 0), ("int", 1), ("hsdp", 0), ("reshard", 3)])
def test_channels_last(rank: int, world_size: int, setting: str, dim: int) -> None:
    """Behaviour 28, 185: the DTensor and what forward sees have the strides that the parameter had."""
    given = options(setting, world_size)
    given["shard_placement_fn"] = lambda param: Shard(dim if param.ndim == 4 else 0)
    wanted = {name: param.stride() for name, param in Convolutions().named_parameters()}
    assert wanted["first.weight"] == (18, 1, 6, 2) and wanted["out.weight"] == (1, 7)
    model = train(rank, world_size, Convolutions, lambda api, m: shard_children(api, m, **given))
    inside: dict[str, tuple[int, ...]] = {}
    for prefix, child in model.named_children():
        child.register_forward_hook(
            lambda module, *_, prefix=prefix: inside.update(
                {f"{prefix}.{name}": param.stride() for name, param in module.named_parameters()}
            )
        )
    model(batch(0, rank))
    assert inside == wanted
    for unit in (*model.children(), model):
        unit.reshard()
    assert {name: param.stride() for name, param in model.named_parameters()} == wanted
    assert model.second.weight.placements[-1] == Shard(dim)


# --- parameters without dims ------------------------------------------------------------------------------------------


class Scalar(nn.Module):
    """Nothing but a scalar: a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


def scaled() -> nn.Sequential:
    return nn.Sequential(Scaled(), Scalar(), Scaled())


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_scalars(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 184: replicated on every axis of the mesh; the gradient is the mean over all ranks. They are saved, and
    loaded into a model from the meta device."""
    given = options(setting, world_size)
    model = train(rank, world_size, scaled, lambda api, m: shard_children(api, m, **given))
    one_step(model, 0, rank)
    for scalar in (model[0].scale, model[1].value):
        assert isinstance(scalar, nn.Parameter) and isinstance(scalar, DTensor)
        for tensor in (scalar, scalar.grad):
            assert tensor.shape == local(tensor).shape == ()
            assert tensor.placements == (Replicate(),) * tensor.device_mesh.ndim
        assert scalar.device_mesh == model[0].linear.weight.device_mesh
    with torch.device("meta"):
        other = shard_children(fsdp2, scaled(), **given)
    other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch(1, rank)), model(batch(1, rank)))


# --- frozen integers, and bytes that hold several small numbers -------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("setting", "storage"),
    [
        *((setting, torch.uint8) for setting in SETTINGS),
        *(("int", d) for d in (torch.int32, torch.bfloat16, torch.float32)),
    ],
)
def test_packed(rank: int, world_size: int, setting: str, storage: torch.dtype) -> None:
    """Forward finds class, attribute and every bit of the packed weight, trains what is beside it."""

    def build() -> nn.Module:
        return nn.Sequential(PackedLinear(storage), PackedLinear(storage))

    given = options(setting, world_size)
    plain = build()
    model = train(rank, world_size, lambda: copy.deepcopy(plain), lambda api, m: shard_children(api, m, **given))
    for layer, plain_layer in zip(model, plain, strict=True):
        assert isinstance(layer.weight, DTensor) and layer.weight.dtype == storage
        assert not layer.weight.requires_grad and layer.weight.grad is None
        for _ in range(2):
            layer.unshard()
            assert type(layer.weight) is Packed
            assert layer.weight.quant_state is plain_layer.weight.quant_state
            assert torch.equal(layer.weight.view(torch.uint8), plain_layer.weight.view(torch.uint8))
            assert not layer.weight.requires_grad
            layer.reshard()


@on_ranks(2, 4)
def test_every_bit_pattern_of_a_frozen_float(rank: int, world_size: int) -> None:
    """Packed bits may be NaNs of any kind; gathered beside a parameter of another dtype, all survive."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    model: Any = nn.Linear(8, 8)
    model.bits = nn.Parameter(bits.view(torch.bfloat16).clone(), requires_grad=False)
    fsdp2.fully_shard(model)
    model.unshard()
    assert torch.equal(model.bits.view(torch.int16), bits)
    model.reshard()
    assert torch.equal(full(model.bits).view(torch.int16), bits)


class Table(nn.Module):
    """Frozen integers of several dtypes and sizes beside a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        values = torch.tensor([0, 1, 127, 3, 100])
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
            self.register_parameter(str(dtype)[6:], nn.Parameter(values.to(dtype), requires_grad=False))
        self.large = nn.Parameter(torch.tensor([[2**62 + 1], [-(2**63)], [2**63 - 1]]), requires_grad=False)
        self.offset = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.large.flatten().tolist() == [2**62 + 1, -(2**63), 2**63 - 1]
        assert self.uint8.dtype == torch.uint8 and self.offset.item() == 3
        total = sum(getattr(self, name).sum().to(x.dtype) for name in ("uint8", "int8", "int32", "int64"))
        return torch.tanh(self.linear(x)) * (total + self.offset).to(x.dtype) / 1000


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_integers(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 16, 119, 120: of several sizes, and a 0-dim one; also where a unit has nothing else. Trainable ones of
    two dtypes in a unit get gradients in their own."""
    given = options(setting, world_size)

    def shard(api: Any, model: Any) -> None:
        api.fully_shard(model[0].linear, **given)
        shard_children(api, model, **given)

    model = train(rank, world_size, lambda: nn.Sequential(Table(), Experts(torch.float64, torch.float32)), shard)
    one_step(model, 0, rank)
    assert {param.dtype for param in model[1].parameters()} == {torch.float64, torch.float32}
    assert all(param.grad.dtype == param.dtype for param in model[1].parameters())
    for name, param in Table().named_parameters():
        assert model[0].get_parameter(name).dtype == param.dtype
        if not param.is_floating_point():
            assert torch.equal(full(model[0].get_parameter(name)), param)


# --- weights that are tied over units ---------------------------------------------------------------------------------


def assert_tied(model: Any) -> None:
    """One parameter under two names, and one entry for optimizers."""
    assert model.embed.weight is model.head.weight
    assert sum(param is model.embed.weight for param in model.parameters()) == 1
    assert len(dict(model.named_parameters())) == len(dict(model.named_parameters(remove_duplicate=False))) - 1


def step_and_check_ties(model: Any, step: int, rank: int) -> Tensor:
    """Forward and backward, in which the weights stay tied."""
    assert_tied(model)
    handles = [block.register_forward_hook(lambda *_: assert_tied(model)) for block in model.blocks]
    loss = model(batch(step, rank)).square().mean()
    assert_tied(model)
    loss.backward()
    assert_tied(model)
    for handle in handles:
        handle.remove()
    return loss.detach()


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head", "head_embed", "neither"])
@pytest.mark.parametrize(("root_raf", "recompute"), [(True, False), (None, True)])
def test_tied(rank: int, world_size: int, order: str, root_raf: bool | None, recompute: bool) -> None:
    """Behaviour 87, 88: any order of calls, the root holding one of the names or none."""

    def shard(api: Any, model: nn.Module) -> None:
        shard_in_order(api, model, order, root_raf)
        assert_tied(model)

    model = train(rank, world_size, lambda: Tied(recompute), shard, backward=step_and_check_ties)
    assert_tied(model)
    assert isinstance(model.head.weight, DTensor)


@on_ranks(2)
@pytest.mark.parametrize("order", ORDERS)
def test_tied_states(rank: int, world_size: int, order: str) -> None:
    """Behaviour 87: `unshard` or `reshard` of one, moves, loading, evaluation: the names never point to two tensors.
    Loading by assignment gives each name a parameter of its own, which the next forward refused."""
    model: Any = Tied()
    plain = copy.deepcopy(model)
    shard_in_order(fsdp2, model, order)
    state = {name: nn.Parameter(value * 2) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    plain.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    assert_close(model(batch(0, rank)), plain(batch(0, rank)))
    assert_tied(model)
    for name in ORDERS[order]:
        module = model.get_submodule(name)
        module.unshard()
        assert_tied(model)
        module.reshard()
        assert_tied(model)
    for _ in range(2):
        state = model.state_dict()
        assert state["embed.weight"].to_local().data_ptr() == state["head.weight"].to_local().data_ptr()
        model.load_state_dict(state)
        assert_tied(model)
        model.to(torch.float64)
        model.to(torch.float32)
        assert_tied(model)
        with torch.no_grad():
            model(batch(0, rank))
        assert_tied(model)
        one_step(model, 0, rank)
        model.zero_grad()
        assert_tied(model)


class ThreeNames(nn.Module):
    """An encoder and a decoder, each with blocks and the same embedding, whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(7, 8), Block(8, 5))
        self.decoder = nn.Sequential(nn.Embedding(7, 8), Block(8, 5))
        self.head = nn.Linear(8, 7, bias=False)
        self.decoder[0].weight = self.head.weight = self.encoder[0].weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(100).long() % 7
        return self.head(self.decoder(tokens) + self.encoder(tokens.flip(1)).tanh()).mean(1)


@on_ranks(2, 4)
@pytest.mark.parametrize("units", [["encoder", "decoder"], ["encoder.0", "decoder.0", "encoder", "decoder", "head"]])
def test_three_names(rank: int, world_size: int, units: list[str]) -> None:
    """Behaviour 87: nested units hold two of the names, the root or a unit beside them the third."""

    def shard(api: Any, model: Any) -> None:
        for name in units:
            api.fully_shard(model.get_submodule(name))
        api.fully_shard(model)
        assert model.encoder[0].weight is model.decoder[0].weight is model.head.weight

    model = train(rank, world_size, ThreeNames, shard)
    assert model.encoder[0].weight is model.decoder[0].weight is model.head.weight
    assert len(list(model.parameters())) == len(list(ThreeNames().parameters()))


def tied() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


@on_ranks(2)
@pytest.mark.parametrize("how", ["unshard", "deepcopy"])
def test_a_borrower_before_its_owner(rank: int, world_size: int, how: str) -> None:
    """`unshard` before the first forward, and a copy of the borrowing module alone."""
    model = tied()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if how == "unshard":
        model[1].unshard()
        assert_close(model[1].weight.detach(), tied()[1].weight.detach())
    else:
        backward_of(model)
        assert_close(copy.deepcopy(model[1])(X), tied()[1](X))


@on_ranks(2)
def test_the_old_weight_assigned_after_sharding(rank: int, world_size: int) -> None:
    """It would train by itself, and on each rank another."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model)
    model[1].weight = weight
    with pytest.raises(ArgumentError, match=r"'1.weight' and '0.weight' are one weight; only the second is sharded"):
        model(torch.ones(2, 4))
