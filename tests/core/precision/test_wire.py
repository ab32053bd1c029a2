"""What travels in fewer bits than it is kept in (int8 gathers, 16-bit reduce-scatters): as one process that rounds."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

import fsdp2
from fsdp2 import MixedPrecisionPolicy, ZeroPolicy, events, fully_shard
from tests.helpers.models import error_of
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Block, Stack, TiedLm, batch, full, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.refused_by_torch import Convolutions
from tests.helpers.two_layers import X, backward_of, sharded_layers, zero_shards

BLOCK = 256
BF16 = torch.bfloat16
INT8 = MixedPrecisionPolicy(all_gather_dtype=torch.int8)
WIRE = MixedPrecisionPolicy(reduce_scatter_dtype=BF16)
BOTH = MixedPrecisionPolicy(all_gather_dtype=torch.int8, reduce_scatter_dtype=BF16)


def in_memory(tensor: Tensor) -> Tensor:
    """1-D, in the order in which the elements lie in memory."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def scales_of(flat: Tensor) -> Tensor:
    """For each element of one rank's shard the scale of its block."""
    scales = [part.abs().max().expand(part.numel()) / 127 for part in flat.float().split(BLOCK) if part.numel()]
    return torch.cat(scales) if scales else flat.float()


def rounded(whole: Tensor, num_shards: int) -> Tensor:
    """What a parameter sharded on dim 0 looks like after an int8 all-gather: each shard in blocks of its own."""
    shards = []
    for shard in whole.chunk(num_shards):
        scales = scales_of(shard.flatten())
        q = torch.where(scales > 0, (shard.flatten().float() / scales).round(), 0)
        shards.append((q * scales).view(shard.shape))
    return torch.cat(shards)


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]


def unsharded(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all unsharded parameters; the model is sharded again after it."""
    for unit in units_of(model):
        unit.unshard()
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert not any(isinstance(param, DTensor) for param in found.values())
    for unit in units_of(model):
        unit.reshard()
    return found


def same_everywhere(tensor: Tensor) -> bool:
    mine = in_memory(tensor).contiguous()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(other, mine) for other in everyone)


def check_rounding(model: nn.Module, exact: dict[str, Tensor], num_shards: int) -> None:
    """Unsharded parameters are the same on all ranks, and at most half a step of their block from the sharded ones."""
    gathered, worst = unsharded(model), 0.0
    for name, param in model.named_parameters():
        mine = local(param).detach()
        assert torch.equal(mine, shard_like(exact[name], param).to(mine.dtype)), f"the shard of {name} changed"
        assert same_everywhere(gathered[name]), f"{name} differs between ranks"
        flat, got = in_memory(mine), in_memory(shard_like(gathered[name], param)).float()
        # The compute dtype rounds once more.
        bound = scales_of(flat) * 0.50001 + got.abs() * torch.finfo(gathered[name].dtype).eps / 2
        error = (got - flat.float()).abs()
        assert (error <= bound).all(), f"{name}: {error.max()} is more than half a step"
        if flat.numel():
            worst = max(worst, (error / bound.clamp_min(1e-30)).max().item())
    assert worst > 0.4, "nothing was rounded, so nothing was quantised"


# --- what the unsharded parameters are --------------------------------------------------------------------------------


def stack(**sizes: int) -> Stack:
    """A `Stack` with four outputs: no rank has exactly one row (see `test_int8_with_one_row_on_the_last_rank`)."""
    model = Stack(**sizes)
    model.out = nn.Linear(model.out.in_features, 4)
    return model


def shard_dim_1(param: nn.Parameter) -> Shard:
    return Shard(1 if param.dim() > 1 else 0)


def tied() -> nn.Module:
    model = TiedLm(vocab=11)
    model.blocks = nn.ModuleList([Block(6, 7 * 8)])
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "uneven": (stack, {}),
    "dim_1": (lambda: stack(hidden=600), {"shard_placement_fn": shard_dim_1}),
    "channels_last": (Convolutions, {}),
    "tied": (tied, {}),
    "bf16": (stack, {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, all_gather_dtype=torch.int8)}),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_int8_error_is_half_a_step(rank: int, world_size: int, case: str) -> None:
    """For every shape, layout and dtype; before training, and after an optimizer step."""
    build, options = CASES[case]
    plain = build()
    model = in_units(plain, **{"mp_policy": INT8, **options})
    check_rounding(model, dict(plain.named_parameters()), world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, rank)).float().square().mean().backward()
    optimizer.step()
    check_rounding(model, {name: full(param.detach()) for name, param in model.named_parameters()}, world_size)


@on_ranks(2)
def test_int8_with_one_row_on_the_last_rank(rank: int, world_size: int) -> None:
    """Three rows over two ranks. On the second, the scales have one row, as has its shard."""
    plain = nn.Linear(8, 3)
    check_rounding(fully_shard(copy.deepcopy(plain), mp_policy=INT8), dict(plain.named_parameters()), world_size)


@on_ranks(4)
def test_int8_backward_gather_from_the_smaller_mesh(rank: int, world_size: int) -> None:
    """Behaviour 74: it brings what forward computed with, and does not quantise again: the same gradients."""
    plain = stack(hidden=64)
    models = [in_units(plain, mp_policy=INT8, reshard_after_forward=raf) for raf in (2, True)]
    for model, size in zip(models, (2, 4), strict=True):
        loss = model(batch(0, rank)).square().mean()
        with events.record() as log:
            loss.backward()
        assert {event.group_size for event in log if event.kind == "all_gather"} == {size}
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(one.grad), local(other.grad))


@on_ranks(2)
def test_int8_leaves_other_dtypes_alone(rank: int, world_size: int) -> None:
    """Integer parameters travel as they are; a block with a NaN is NaN on every rank, and no other is."""
    model = nn.Linear(64, 32)
    model.table = nn.Parameter(torch.arange(12), requires_grad=False)  # type: ignore[assignment]
    fully_shard(model, mp_policy=INT8)
    with torch.no_grad():
        if rank == 0:
            local(model.weight)[0, 3] = float("nan")
    found = unsharded(model)
    assert torch.equal(found["table"], torch.arange(12))
    bad = found["weight"].isnan().flatten()
    assert bad[:BLOCK].all() and not bad[BLOCK:].any()


# --- training ---------------------------------------------------------------------------------------------------------


def one_process(
    plain: nn.Module, x_of_rank: Callable[[int], list[Tensor]], world_size: int, num_shards: int, policy: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses by rank and mean gradients by name, rounded as `policy` says: gradients after all batches of a rank."""
    params = {name: param.detach() for name, param in plain.named_parameters()}
    if policy.all_gather_dtype is not None:
        params = {name: rounded(value, num_shards) for name, value in params.items()}
    losses, total = [], {name: torch.zeros_like(value) for name, value in params.items()}
    for rank in range(world_size):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        for x in x_of_rank(rank):
            loss = functional_call(plain, leaves, (x,)).square().mean()
            loss.backward()
        losses.append(loss.detach())
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            grad = leaf.grad if policy.reduce_scatter_dtype is None else leaf.grad.to(policy.reduce_scatter_dtype)
            total[name] += grad.float()
    return losses, {name: value / world_size for name, value in total.items()}


@on_ranks(2, 4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["int8", "wire", "both"])
def test_training_is_one_process_that_rounds(rank: int, world_size: int, kind: str, accumulate: int) -> None:
    """But for fp32's own roundings; one of a bf16 gradient may fall on the other side: a step of bf16 / world_size."""
    policy = {"int8": INT8, "wire": WIRE, "both": BOTH}[kind]
    plain = stack(hidden=70)
    model = in_units(plain, mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.5) for each in (model, plain)]

    def batches(of_rank: int) -> list[Tensor]:
        return [batch(index, of_rank) for index in range(accumulate)]

    for step in range(3):
        for index, x in enumerate(batches(rank)):
            model.set_requires_gradient_sync(index == accumulate - 1)
            loss = model(x).square().mean()
            loss.backward()
        losses, wanted = one_process(plain, batches, world_size, world_size, policy)
        assert torch.allclose(loss.detach(), losses[rank], rtol=1e-5)
        for name, param in model.named_parameters():
            plain.get_parameter(name).grad = wanted[name]
            want, got = shard_like(wanted[name], param), local(param.grad)
            ulp = 0.0 if policy.reduce_scatter_dtype is None else torch.finfo(BF16).eps / world_size
            atol = wanted[name].abs().max().item() * (1e-5 + ulp)
            assert torch.allclose(got, want, rtol=0, atol=atol), f"step {step}: {name}"
            if ulp and want.numel() > 50:  # a flip is rare
                assert ((got - want).abs() > 1e-5 * wanted[name].abs().max()).float().mean() < 0.02, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_wire_with_hsdp(rank: int, world_size: int) -> None:
    """bf16 over the shard axis only, fp32 over the replicas; these compute with the same integers."""
    plain = stack()
    model = in_units(plain, mp_policy=BOTH, mesh=mesh_2d(2, 2))
    check_rounding(model, dict(plain.named_parameters()), 2)
    with events.record() as log:
        model(batch(0, rank)).square().mean().backward()
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
    assert {event.dtype for event in log if event.kind == "all_reduce"} == {torch.float32}
    _, wanted = one_process(plain, lambda r: [batch(0, r)], world_size, 2, BOTH)
    for name, param in model.named_parameters():
        atol = wanted[name].abs().max().item() * (1e-5 + torch.finfo(BF16).eps / world_size)
        assert torch.allclose(local(param.grad), shard_like(wanted[name], param), rtol=0, atol=atol), name


# --- bytes ------------------------------------------------------------------------------------------------------------


def nbytes(log: Iterable[events.Event], kind: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in log:
        if event.kind == kind:
            found[event.unit] = found.get(event.unit, 0) + event.nbytes
    return found


@on_ranks(2, 4)
@pytest.mark.parametrize("param_dtype", [None, BF16])
def test_bytes_on_the_wire(rank: int, world_size: int, param_dtype: torch.dtype | None) -> None:
    """The int8 gather sends 1 + 4/256 bytes an element and padding; the bf16 wire 2 in place of 4."""
    logs = {}
    for name, more in {"plain": {}, "int8": {"all_gather_dtype": torch.int8, "reduce_scatter_dtype": BF16}}.items():
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, **more)
        model = fully_shard(nn.Linear(96, 1024), mp_policy=policy)
        with events.record() as logs[name]:
            model(torch.ones(2, 96)).sum().backward()
    numels = [1024 * 96 // world_size, 1024 // world_size]  # of a shard
    exact = world_size * sum(numel + 4 * -(-numel // BLOCK) for numel in numels)
    slack = world_size * 16  # packed tensors are aligned
    assert exact <= nbytes(logs["int8"], "all_gather")[""] <= exact + slack
    itemsize = 4 if param_dtype is None else 2
    assert nbytes(logs["plain"], "all_gather")[""] == world_size * sum(numels) * itemsize
    assert nbytes(logs["int8"], "reduce_scatter")[""] == sum(numels) * 2
    assert nbytes(logs["plain"], "reduce_scatter")[""] == sum(numels) * 4


# --- limits -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_fp16_on_the_wire_overflows_visibly(rank: int, world_size: int) -> None:
    """A sum beyond fp16's range is formed in fp32; a single gradient beyond it is inf, for the scaler to see."""
    model = nn.Linear(1, 4, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_scatter_dtype=torch.float16))
    model.set_gradient_divide_factor(1.0)
    model(torch.full((1, 1), 60000.0)).sum().backward()  # which fp16 has
    assert local(model.weight.grad).flatten().tolist() == [120000.0] * 2
    model.weight.grad = None
    model(torch.full((1, 1), 70000.0 if rank else 1.0)).sum().backward()
    assert local(model.weight.grad).isinf().all()


@on_ranks(2)
def test_options_that_torch_does_not_have(rank: int, world_size: int) -> None:
    """torch's FSDP2 has neither field; ours reject what they cannot do, and what contradicts them."""
    for option in ({"all_gather_dtype": torch.int8}, {"reduce_scatter_dtype": BF16}):
        assert "unexpected keyword" in error_of(TypeError, lambda o=option: torch_fsdp.MixedPrecisionPolicy(**o))
    assert "torch.int8" in error_of(ValueError, lambda: MixedPrecisionPolicy(all_gather_dtype=torch.uint8))
    assert "bfloat16" in error_of(ValueError, lambda: MixedPrecisionPolicy(reduce_scatter_dtype=torch.float8_e5m2))
    model: Any = fully_shard(Block(8, 4), mp_policy=WIRE)
    assert "reduce_scatter_dtype" in error_of(ValueError, lambda: model.set_custom_reduce_scatter(object()))


# --- int8 with other features -----------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("original_lives", [True, False])
def test_a_copy_gathers_its_own_weights(rank: int, world_size: int, original_lives: bool) -> None:
    """It computed with the original's weights, or failed when that is gone (an EMA, a teacher)."""
    model = sharded_layers(mp_policy=INT8)
    backward_of(model)
    copied = copy.deepcopy(model)
    if original_lives:
        model.reshard()
        zero_shards(model)
    else:
        del model
    assert copied(X).abs().sum() > 0


@on_ranks(4)
def test_int8_with_a_secondary_shard(rank: int, world_size: int) -> None:
    """qwZ and hpZ are two halves of ZeRO++: together, backward failed."""
    model = sharded_layers(mp_policy=INT8, zero=ZeroPolicy(secondary_shard_size=2))
    backward_of(model)


@on_ranks(2)
def test_int8_after_a_first_forward_in_inference_mode(rank: int, world_size: int) -> None:
    """Plain parameters can do this: validate before the first step."""
    model = sharded_layers(mp_policy=INT8)
    with torch.inference_mode():
        model(X)
    backward_of(model)


@on_ranks(2)
def test_int8_follows_a_conversion(rank: int, world_size: int) -> None:
    """Behaviour 33, 35: a conversion between steps, with `all_gather_dtype`."""
    model = sharded_layers(mp_policy=INT8)
    backward_of(model)
    model.zero_grad()
    model.to(torch.bfloat16)
    backward_of(model, X.bfloat16())
