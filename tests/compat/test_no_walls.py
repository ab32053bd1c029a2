"""Six things that FSDP2 of torch 2.13 refuses or breaks, and that train here (Behaviour 87, 119, 120, 184-186).

Each has tests of several Adam steps against one process, and one that pins what torch does, so that we notice when that
changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from tests.helpers.parity_models import Block, Race, batch, full, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import (
    ORDERS,
    Convolutions,
    Experts,
    Packed,
    PackedLinear,
    Scaled,
    Tied,
    packed_refused_by_torch,
    shard_in_order,
    tied_refused_by_torch,
)

SETTINGS = ["reshard", "keep", "int", "hsdp"]


def options(setting: str, world_size: int) -> dict[str, Any]:
    """Arguments of `fully_shard`. "int" gathers over pairs in backward, "hsdp" has two replicas."""
    if setting == "hsdp":
        return {"mesh": mesh_2d(2, world_size // 2), "reshard_after_forward": True}
    return {"reshard_after_forward": {"reshard": True, "keep": False, "int": 2}[setting]}


def one_step(model: nn.Module, step: int, rank: int) -> Tensor:
    """The `backward` of a `Race` for models of eight input features."""
    loss = model(batch(step, rank)).float().square().mean()
    loss.backward()
    return loss.detach()


def shard_children(api: ModuleType, model: nn.Module, **given: Any) -> Any:
    """Every child that has parameters is a unit, and then the root."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            api.fully_shard(child, **given)
    return api.fully_shard(model, **given)


def train(rank: int, world_size: int, build: Callable[[], nn.Module], shard: Any, **given: Any) -> Any:
    """Four Adam steps, compared to one process at each."""
    race = Race(rank, world_size, build, shard, given.pop("backward", one_step), torch=False, **given)
    return race.run(4)


# --- trainable parameters of several dtypes ---------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_mixed_dtypes(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 120: each parameter is kept, computed with, and gets its gradient in its own dtype."""

    def build() -> nn.Module:
        return nn.Sequential(*[Experts(torch.float64, torch.float32) for _ in range(2)])

    model = train(rank, world_size, build, lambda api, m: shard_children(api, m, **options(setting, world_size)))
    one_step(model, 0, rank)
    dtypes = {param.dtype for param in model[0].parameters()}
    assert dtypes == {torch.float64, torch.float32}
    assert all(param.grad.dtype == param.dtype for param in model.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_fp32_router_beside_bf16_experts(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 120, 121: the same for the usual pair; bf16 sums are only so exact."""

    def build() -> nn.Module:
        return nn.Sequential(*[Experts(torch.float32, torch.bfloat16) for _ in range(2)])

    train(
        rank,
        world_size,
        build,
        lambda api, m: shard_children(api, m, **options(setting, world_size)),
        by_norm=True,
        rtol=4e-2,
        atol=1e-2,
        optim=lambda params: torch.optim.Adam(params, lr=1e-3),
    )


@on_ranks(2, 4)
def test_mixed_dtypes_under_a_policy(rank: int, world_size: int) -> None:
    """Behaviour 113, 114, 120: param_dtype and reduce_dtype hold for all; the sharded side keeps its dtypes."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fsdp2.fully_shard(Experts(torch.float32, torch.bfloat16), mp_policy=policy)
    seen: set[torch.dtype] = set()
    model.router.register_forward_hook(lambda *_: seen.update(param.dtype for param in model.parameters()))
    model(batch(0, rank)).sum().backward()
    assert seen == {torch.bfloat16}
    assert [param.grad.dtype for param in model.parameters()] == [param.dtype for param in model.parameters()]
    assert {param.dtype for param in model.parameters()} == {torch.float32, torch.bfloat16}


@on_ranks(2)
def test_torch_and_mixed_dtypes(rank: int, world_size: int) -> None:
    """Behaviour 120: torch refuses at the first forward."""
    model = torch_fsdp.fully_shard(Experts(torch.float32, torch.bfloat16))
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(batch(0, rank))


# --- 0-dim parameters -------------------------------------------------------------------------------------------------


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
    """Behaviour 184: replicated on every axis of the mesh; the gradient is the mean over all ranks."""
    given = options(setting, world_size)
    model = train(rank, world_size, scaled, lambda api, m: shard_children(api, m, **given))
    one_step(model, 0, rank)
    for scalar in (model[0].scale, model[1].value):
        assert isinstance(scalar, nn.Parameter) and isinstance(scalar, DTensor)
        for tensor in (scalar, scalar.grad):
            assert tensor.shape == local(tensor).shape == ()
            assert tensor.placements == (Replicate(),) * tensor.device_mesh.ndim
        assert scalar.device_mesh == model[0].linear.weight.device_mesh


def accumulate(model: Any, step: int, rank: int, mode: str) -> Tensor:
    """Three microbatches; only the last one reduces (all the way)."""
    for micro in range(3):
        if isinstance(model, fsdp2.FSDPModule):
            setter = model.set_requires_gradient_sync if mode == "no_sync" else model.set_requires_all_reduce
            setter(micro == 2)
        loss = one_step(model, 3 * step + micro, rank)
    return loss


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", ["reshard", "hsdp"])
@pytest.mark.parametrize("mode", ["no_sync", "no_all_reduce"])
def test_scalars_accumulate(rank: int, world_size: int, setting: str, mode: str) -> None:
    """Behaviour 96, 107, 184: with gradients that wait for sync, or for the all-reduce of HSDP."""
    given = options(setting, world_size)
    train(
        rank,
        world_size,
        scaled,
        lambda api, m: shard_children(api, m, **given),
        backward=lambda model, step, which: accumulate(model, step, which, mode),
    )


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", ["reshard", "hsdp"])
def test_scalars_are_clipped_saved_and_loaded(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 184: `clip_grad_norm_`, `state_dict` and meta init treat them as any other parameter."""
    plain = scaled()
    given = options(setting, world_size)
    model = shard_children(fsdp2, copy.deepcopy(plain), **given)
    one_step(model, 0, rank)
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        plain_param.grad = full(param.grad).clone()  # that of a scalar is the local tensor itself
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(full(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    torch.testing.assert_close(full(model[0].scale.grad), plain[0].scale.grad)
    with torch.device("meta"):
        other = shard_children(fsdp2, scaled(), **given)
    other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert set(other[0].scale.placements) == {Replicate()}
    assert torch.equal(other(batch(1, rank)), model(batch(1, rank)))


@on_ranks(2)
def test_torch_and_scalars(rank: int, world_size: int) -> None:
    """Behaviour 184: torch refuses."""
    with pytest.raises(ValueError, match="scalar"):
        torch_fsdp.fully_shard(Scaled())


# --- parameters that are not contiguous -------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_channels_last(rank: int, world_size: int, setting: str) -> None:
    """Behaviour 185: the DTensor and what forward sees have the strides that the parameter had."""
    given = options(setting, world_size)
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
    model.reshard()
    assert {name: param.stride() for name, param in model.named_parameters()} == wanted


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_channels_last_on_any_dim(rank: int, world_size: int, dim: int) -> None:
    """Behaviour 28, 185: sharded over other dims, too, of which most do not divide by the number of ranks."""

    def shard(api: Any, model: nn.Module) -> None:
        shard_children(api, model, shard_placement_fn=lambda param: Shard(dim if param.ndim == 4 else 0))

    model = train(rank, world_size, Convolutions, shard)
    weight = model.second.weight
    assert weight.placements == (Shard(dim),) and weight.stride() == (54, 1, 18, 6)


@on_ranks(2, 4)
def test_channels_last_state_dict(rank: int, world_size: int) -> None:
    """Behaviour 185: values go out and in by position, whatever the strides of the other side."""
    plain = Convolutions()
    model = shard_children(fsdp2, copy.deepcopy(plain))
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), plain.state_dict()[name])
    other = shard_children(fsdp2, Convolutions())
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(batch(0, rank)), plain(batch(0, rank)))


@on_ranks(2)
def test_torch_and_channels_last(rank: int, world_size: int) -> None:
    """Behaviour 185: torch refuses."""
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        torch_fsdp.fully_shard(Convolutions().second)


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


@on_ranks(4)
def test_torch_and_uneven_dims(rank: int, world_size: int) -> None:
    """Behaviour 186: torch refuses."""
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        torch_fsdp.fully_shard(Cube(), shard_placement_fn=lambda param: Shard(param.ndim - 1 and 1))


# --- integer and packed parameters ------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_packed_in_mixed_precision(rank: int, world_size: int, storage: torch.dtype) -> None:
    """Behaviour 113, 119: what is packed in integers, or in param_dtype, is not touched by the cast of its
    neighbours."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = PackedLinear(storage, rows=10)
    model: Any = fsdp2.fully_shard(copy.deepcopy(plain), mp_policy=policy)
    for step in range(2):
        model(batch(step, rank)).sum().backward()
        model.unshard()
        assert torch.equal(model.weight.view(torch.uint8), plain.weight.view(torch.uint8))
        assert model.lora_a.dtype == torch.bfloat16
        model.reshard()
    assert model.lora_b.grad.dtype == torch.float32


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

    def __init__(self, *more: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        values = torch.tensor([0, 1, 127, 3, 100])
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, *more):
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
    """Behaviour 16, 119: of several sizes, and a 0-dim one; also where a unit has nothing else."""
    given = options(setting, world_size)

    def shard(api: Any, model: Any) -> None:
        api.fully_shard(model[0].linear, **given)
        shard_children(api, model, **given)

    model = train(rank, world_size, lambda: nn.Sequential(Table(), Table()), shard)
    for name, param in Table().named_parameters():
        assert model[0].get_parameter(name).dtype == param.dtype
        if not param.is_floating_point():
            assert torch.equal(full(model[0].get_parameter(name)), param)


@on_ranks(2, 4)
def test_rare_integers(rank: int, world_size: int) -> None:
    """Behaviour 119: dtypes of which gloo's own collectives know nothing: bytes are bytes."""
    rare = (torch.int16, torch.bool, torch.uint16, torch.uint32, torch.uint64)
    model: Any = fsdp2.fully_shard(Table(*rare))
    one_step(model, 0, rank)
    model.unshard()
    for name, param in Table(*rare).named_parameters():
        assert model.get_parameter(name).dtype == param.dtype
        assert param.is_floating_point() or torch.equal(model.get_parameter(name), param)


@on_ranks(2)
def test_torch_and_packed(rank: int, world_size: int) -> None:
    """torch makes a plain parameter of it, so that forward does not find what it needs."""
    with packed_refused_by_torch():
        torch_fsdp.fully_shard(PackedLinear(torch.uint8))(batch(0, rank))


# --- tied weights -----------------------------------------------------------------------------------------------------


def assert_tied(model: Any) -> None:
    """One parameter under two names, and one entry for optimizers."""
    assert model.embed.weight is model.head.weight
    assert sum(param is model.embed.weight for param in model.parameters()) == 1
    assert len(dict(model.named_parameters())) == len(dict(model.named_parameters(remove_duplicate=False))) - 1


def step_and_check_ties(model: Any, step: int, rank: int) -> Tensor:
    """Forward and backward, in which the weights stay tied."""
    assert_tied(model)
    handles = [
        module.register_forward_hook(lambda *_: assert_tied(model)) for module in (model.blocks[0], model.blocks[1])
    ]
    loss = model(batch(step, rank)).square().mean()
    assert_tied(model)
    loss.backward()
    assert_tied(model)
    for handle in handles:
        handle.remove()
    return loss.detach()


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head", "head_embed", "neither"])
@pytest.mark.parametrize(
    ("root_raf", "recompute"), [(True, False), (False, False), (None, False), (True, True), (None, True)]
)
def test_tied(rank: int, world_size: int, order: str, root_raf: bool | None, recompute: bool) -> None:
    """Behaviour 87, 88: any order of calls, the root holding one of the names or none, resharding after forward or
    not."""

    def shard(api: Any, model: nn.Module) -> None:
        shard_in_order(api, model, order, root_raf)
        assert_tied(model)

    model = train(rank, world_size, lambda: Tied(recompute), shard, backward=step_and_check_ties)
    assert_tied(model)
    assert isinstance(model.head.weight, DTensor)


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("order", ["embed", "head_embed"])
def test_tied_settings(rank: int, world_size: int, setting: str, order: str) -> None:
    """Behaviour 72, 87, 106: under every way to reshard, and with replicas."""
    given = options(setting, world_size)
    train(
        rank,
        world_size,
        Tied,
        lambda api, m: shard_in_order(api, m, order, **given),
        backward=step_and_check_ties,
    )


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["embed", "embed_head"])
def test_tied_accumulation(rank: int, world_size: int, order: str) -> None:
    """Behaviour 87, 96: two uses a microbatch, three microbatches, one reduction."""
    train(
        rank,
        world_size,
        Tied,
        lambda api, m: shard_in_order(api, m, order),
        backward=lambda model, step, which: accumulate(model, step, which, "no_sync"),
    )


@on_ranks(2)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head"])
def test_tied_states(rank: int, world_size: int, order: str) -> None:
    """Behaviour 87: `unshard` or `reshard` of one, moves, loading, evaluation: the names never point to two tensors."""
    model: Any = Tied()
    shard_in_order(fsdp2, model, order)
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


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head", "neither"])
def test_tied_on_meta(rank: int, world_size: int, order: str) -> None:
    """Behaviour 31, 87: built on meta and given memory, still one weight; then it trains."""
    plain = Tied()

    def shard(api: Any, model: Any) -> None:
        model.to("meta")
        model.head.weight = model.embed.weight  # `.to` of a plain module tears them apart
        shard_in_order(api, model, order)
        assert_tied(model)
        model.to_empty(device="cpu")
        assert_tied(model)
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            local(param).detach().copy_(shard_like(value.detach(), param))

    train(rank, world_size, lambda: plain, shard, backward=step_and_check_ties)


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
@pytest.mark.parametrize("root_raf", [True, False])
def test_three_names(rank: int, world_size: int, units: list[str], root_raf: bool) -> None:
    """Behaviour 87: nested units hold two of the names, the root or a unit beside them the third."""

    def shard(api: Any, model: Any) -> None:
        for name in units:
            api.fully_shard(model.get_submodule(name))
        api.fully_shard(model, reshard_after_forward=root_raf)
        assert model.encoder[0].weight is model.decoder[0].weight is model.head.weight

    model = train(rank, world_size, ThreeNames, shard)
    assert model.encoder[0].weight is model.decoder[0].weight is model.head.weight
    assert len(list(model.parameters())) == len(list(ThreeNames().parameters()))


@on_ranks(2)
def test_tied_in_mixed_precision(rank: int, world_size: int) -> None:
    """Behaviour 87, 113: gradients are those of a model that has one unit for everything."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = Tied()
    models: list[Any] = [copy.deepcopy(plain), copy.deepcopy(plain)]
    fsdp2.fully_shard(models[0], mp_policy=policy)
    shard_in_order(fsdp2, models[1], "embed_head", mp_policy=policy)
    for model in models:
        model(batch(0, rank)).float().square().mean().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


@on_ranks(2)
@pytest.mark.parametrize("order", ["embed", "head", "embed_head"])
def test_torch_and_tied(rank: int, world_size: int, order: str) -> None:
    """Behaviour 87: torch tears the names apart, and refuses at the first forward."""
    model: Any = Tied()
    shard_in_order(torch_fsdp, model, order)
    assert model.embed.weight is not model.head.weight
    with tied_refused_by_torch():
        model(batch(0, rank)).sum().backward()
