"""`fsdp2.AdamW8bit`: the same steps, bit by bit, on any mesh and through checkpoints; how far from AdamW in fp32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import AdamW8bit, checkpoint
from fsdp2._torch import make_dtensor, make_spec, shard_dim, split_factor, strided_shard
from fsdp2.errors import ArgumentError, MismatchError, UnsupportedError
from fsdp2.init.owned import Cut, Owned
from fsdp2.optim import adopt_optimizer, local_optimizer, offload_optimizer, step_in_backward
from fsdp2.optim.eight_bits import BLOCK, SIGNED, UNSIGNED, Code
from fsdp2.optim.rounding import key_of, round_to_bfloat16
from tests.helpers.optimizers import Optim, assert_same, params_in
from tests.helpers.parity_models import batch, local, mesh_2d, shard_blocks, shard_like
from tests.helpers.ranks import on_ranks, run_on_ranks
from tests.helpers.tp_models import dp_tp, mesh_of

# Even and uneven rows, fewer rows than ranks, several spans of rows, blocks that are not full, moments in fp32.
SHAPES = [(8, 700), (5, 1000), (1, 5000), (300, 512), (70, 64), (32, 20, 3, 3), (9, 100), (4500, 1), (33,), ()]


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Over several orders of magnitude, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator) * torch.randn(tuple(shape), generator=generator).exp()
    return drawn * (torch.rand(tuple(shape), generator=generator) > 0.05)


# --- codes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_code(code: Code) -> None:
    """The relative error that the module promises, over 15 binary orders; what is smaller; and the same rows alone."""
    x = values((6, 3 * BLOCK + 10), 0)
    x = x if code.is_signed else x.abs()
    codes, scales = code.encode(x)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, x.shape, (6, 4))
    for row in range(6):
        alone = code.encode(x[row : row + 1])
        assert torch.equal(alone[0][0], codes[row]) and torch.equal(alone[1][0], scales[row])
    decoded = code.decode(codes, scales)
    assert torch.equal(decoded.abs().amax(1), x.abs().amax(1)), "the largest of a block is exact"
    largest = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    is_normal = x.abs() > largest * 2.0**-15
    error = (decoded - x).abs() / x.abs()
    assert error[is_normal].max() <= (1 / 16 if code.is_signed else 1 / 32) * 1.001
    small = decoded[~is_normal].abs() / largest[~is_normal]
    assert small.max() <= 2.0**-15
    assert (decoded == 0).any() if code.is_signed else small.min() > 0
    assert not code.is_signed or torch.equal(decoded[is_normal].sign(), x[is_normal].sign())
    zeros = torch.zeros(2, 300)
    assert torch.equal(code.decode(*code.encode(zeros)), zeros)
    assert torch.equal(code.encode(decoded)[0], codes), "a decoded number keeps its code"
    for bad in (torch.inf, torch.nan):
        broken = torch.ones(1, 2 * BLOCK)
        broken[0, 3] = bad
        again = code.decode(*code.encode(broken))[0]
        assert not again[:BLOCK].isfinite().any() and torch.equal(again[BLOCK:], broken[0, BLOCK:])


def test_stochastic_rounding() -> None:
    """To one of the two neighbours, right on average; the parts of a tensor get the bits of the whole; never another
    kind of number."""
    x = torch.full((64, 512), 1 + 0.3 * 2.0**-7)
    whole = Owned.of(x.shape, [])
    rounded = round_to_bfloat16(x.clone(), whole, 0, key_of(0, 0, 1))
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert abs((rounded > 1).float().mean().item() - 0.3) < 0.01  # four standard deviations
    part = Owned(whole.shape, (((10, 20),), ((0, 512),)))
    assert torch.equal(round_to_bfloat16(x[12:15].clone(), part, 2, key_of(0, 0, 1)), rounded[12:15])
    others = [key_of(1, 0, 1), key_of(0, 1, 1), key_of(0, 0, 2)]
    assert all(not torch.equal(round_to_bfloat16(x.clone(), whole, 0, key), rounded) for key in others)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.5, torch.finfo(torch.float32).max])
    got = round_to_bfloat16(special.clone(), Owned.of((7,), []), 0, 5)
    assert torch.equal(got[:2].float(), special[:2]) and got[2].isnan() and torch.equal(got[3:6].float(), special[3:6])


# --- one step on many ranks -------------------------------------------------------------------------------------------


def placed(whole: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> nn.Parameter:
    if mesh is None:
        return nn.Parameter(whole.clone())
    if not whole.ndim:
        placements = [Replicate()] * mesh.ndim
    return nn.Parameter(distribute_tensor(whole.clone(), mesh, placements))


def optimizer_of(mesh: DeviceMesh | None, placements: Sequence[Placement], dtype: torch.dtype, **options: Any) -> Any:
    wholes = [values(shape, index).to(dtype) for index, shape in enumerate(SHAPES)]
    params = [placed(whole, mesh, placements) for whole in wholes]
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1}]
    return AdamW8bit(groups, lr=1e-2, **options)


def step(optimizer: Optim, steps: range) -> None:
    """With gradients that depend on the step and the parameter only; some are missing."""
    for number in steps:
        for index, param in enumerate(params_in(optimizer)):
            if index == number % 3:
                param.grad = None
                continue
            whole = values(param.shape, 100 * number + index).to(param.dtype)
            param.grad = (
                distribute_tensor(whole, param.device_mesh, param.placements) if isinstance(param, DTensor) else whole
            )
        optimizer.step()


def assert_equal(optimizer: Optim, plain: Optim) -> None:
    """Parameters and states of this rank are its parts of those of one process."""
    for param, other in zip(params_in(optimizer), params_in(plain), strict=True):
        assert torch.equal(local(param.detach()), shard_like(other.detach(), param))
        state, wanted = optimizer.state[param], plain.state[other]
        assert state.keys() == wanted.keys()
        for key, value in state.items():
            assert isinstance(value, DTensor) == (isinstance(param, DTensor) and key != "step")
            assert value.dtype == wanted[key].dtype and value.shape == wanted[key].shape
            assert torch.equal(local(value), shard_like(wanted[key], value)), key


def meshes(kind: str, world_size: int) -> tuple[DeviceMesh, list[Placement]]:
    if kind == "hsdp":
        return mesh_2d(2, world_size // 2), [Replicate(), Shard(0)]
    mesh = mesh_of((world_size,), ("shard",))
    return mesh, [Replicate() if kind == "replicated" else Shard(0)]


@on_ranks(2, 1, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "replicated"])
def test_equals_one_process(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """bf16 with stochastic rounding."""
    if kind == "hsdp" and world_size % 2:
        pytest.skip("needs an even number of ranks")
    options = {"rounding_seed": 3 if dtype == torch.bfloat16 else None}
    ours = optimizer_of(*meshes(kind, world_size), dtype, **options)
    plain = optimizer_of(None, [], dtype, **options)
    for each in (ours, plain):
        step(each, range(4))
    assert_equal(ours, plain)
    quantised = {tuple(param.shape) for param in params_in(ours) if "exp_avg_code" in ours.state[param]}
    assert quantised == {shape for shape in SHAPES if shape not in ((9, 100), (4500, 1), (33,), ())}
    if dtype == torch.bfloat16:
        nearest = optimizer_of(None, [], dtype)
        step(nearest, range(4))
        assert not torch.equal(params_in(nearest)[0], params_in(plain)[0])


def cut_to(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """As `distribute_tensor`, which knows no strided shards."""
    spec = make_spec(mesh, placements, whole.shape, whole.stride(), whole.dtype)
    cuts = [
        Cut(shard_dim(placement), mesh.size(axis), mesh.get_local_rank(axis), before_of(placement))
        for axis, placement in enumerate(placements)
    ]
    box = Owned.of(whole.shape, cuts)
    own = whole.new_empty(box.local_shape)
    for there, here in box.within(tuple((0, size) for size in whole.shape)):
        own[here] = whole[there]
    return make_dtensor(own, spec)


def before_of(placement: Placement) -> int | None:
    factor = split_factor(placement)
    return None if factor == 1 else factor


@on_ranks(2, 4)
def test_other_dims(rank: int, world_size: int) -> None:
    """A cut of dim 1 between blocks is right; one within a block is an error on every rank, so that none waits."""
    mesh = mesh_of((world_size,), ("shard",))
    layouts: list[tuple[DeviceMesh, list[Placement]]] = [(mesh, [Shard(1)])]
    if world_size == 4:
        layouts += [(mesh_2d(2, 2), [Shard(0), Shard(1)]), (mesh_2d(2, 2), [strided_shard(0, 2), Shard(0)])]
    whole, grads = values((31, 512 * world_size), 0), [values((31, 512 * world_size), index) for index in (1, 2)]
    for where in layouts:
        param, plain = nn.Parameter(cut_to(whole, *where)), nn.Parameter(whole.clone())
        optimizers = [AdamW8bit([param]), AdamW8bit([plain])]
        for grad in grads:
            param.grad, plain.grad = cut_to(grad, *where), grad
            for optimizer in optimizers:
                optimizer.step()
        assert_equal(*optimizers)
    cut = nn.Parameter(distribute_tensor(values((32, 600), 0), mesh, [Shard(1)]))
    cut.grad = torch.ones_like(cut)
    with pytest.raises(UnsupportedError, match="blocks of 256 elements of its rows would be cut"):
        AdamW8bit([cut]).step()
    AdamW8bit([cut], min_quantised_numel=10**6).step()


# --- saved and resumed ------------------------------------------------------------------------------------------------


class Matrices(nn.Module):
    """Uneven rows; a bias and a small matrix with moments in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(300, 37), nn.Linear(600, 5, bias=False), nn.Linear(8, 8)])


def resumable(kind: str, world_size: int) -> tuple[nn.Module, Any]:
    model = Matrices()
    if kind != "plain":
        shard_blocks(fsdp2, model, **({"mesh": mesh_2d(2, world_size // 2)} if kind == "hsdp" else {}))
    return model, AdamW8bit(model.parameters(), lr=1e-2, min_quantised_numel=2000)


def save_at(rank: int, world_size: int, kind: str, folder: Path) -> None:
    model, optimizer = resumable(kind, world_size)
    step(optimizer, range(3))
    checkpoint.save(folder, model=model, optimizer=optimizer)


def resume_at(rank: int, world_size: int, kind: str, folder: Path, late: bool) -> None:
    model, optimizer = resumable(kind, world_size)
    if late:
        step(optimizer, range(1))  # it has state already, which the saved one replaces
    checkpoint.load(folder, model=model, optimizer=optimizer)
    step(optimizer, range(3, 6))
    _, uninterrupted = resumable("plain", 1)
    step(uninterrupted, range(6))
    assert_equal(optimizer, uninterrupted)


@on_ranks(4)
def test_new_state_is_cut_as_its_parameter(rank: int, world_size: int, tmp_path: Path) -> None:
    """Of a parameter whose rows tensor parallelism cuts, too: its scales were made whole on each data rank, and the
    next step gathered them."""

    def make() -> tuple[nn.Module, AdamW8bit]:
        torch.manual_seed(0)
        net = parallelize_module(nn.Linear(600, 64, bias=False), dp_tp()["tp"], ColwiseParallel())
        return fsdp2.fully_shard(net, mesh=dp_tp()["dp"]), AdamW8bit(net.parameters(), lr=1e-2)

    model, optimizer = make()
    other, fresh = make()
    step(optimizer, range(2))
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "a", model=other, optimizer=fresh)
    for (param, state), (_, wanted) in zip(fresh.state.items(), optimizer.state.items(), strict=True):
        for key in ("exp_avg_scale", "exp_avg_code"):
            assert state[key].placements == wanted[key].placements == param.placements
            assert torch.equal(local(state[key]), local(wanted[key]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", 2), ("hsdp", 4)),
        pytest.param(("hsdp", 2), ("fsdp", 3), marks=pytest.mark.exhaustive),
        pytest.param(("fsdp", 3), ("fsdp", 2), marks=pytest.mark.exhaustive),
        pytest.param(("fsdp", 4), ("fsdp", 1), marks=pytest.mark.exhaustive),
        pytest.param(("plain", 1), ("fsdp", 2), marks=pytest.mark.exhaustive),
        pytest.param(("hsdp", 4), ("plain", 1), marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_on_other_ranks(before: tuple[str, int], after: tuple[str, int], tmp_path: Path) -> None:
    """Bit for bit what an uninterrupted run in one process gives."""
    run_on_ranks(save_at, before[1], kind=before[0], folder=tmp_path / "saved")
    for late in (False, True):
        run_on_ranks(resume_at, after[1], kind=after[0], folder=tmp_path / "saved", late=late)


@on_ranks(2)
def test_state_dicts(rank: int, world_size: int, tmp_path: Path) -> None:
    """Also for bf16 parameters: torch's `load_state_dict` casts all state to the parameter's dtype. AdamW's state does
    not fit."""
    for dtype in (torch.float32, torch.bfloat16):
        made = [optimizer_of(*meshes("fsdp", 2), dtype, rounding_seed=1) for _ in range(2)]
        step(made[0], range(3))
        made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
        for param, other in zip(params_in(made[1]), params_in(made[0]), strict=True):
            local(param.detach()).copy_(local(other.detach()))
        for optimizer in made:
            step(optimizer, range(3, 5))
        assert_same(*made)
    model, optimizer = resumable("fsdp", 2)
    step(optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "dcp")
    again, other = resumable("fsdp", 2)
    loaded = get_optimizer_state_dict(again, other)
    dcp.load({"optimizer": loaded}, checkpoint_id=tmp_path / "dcp")
    set_optimizer_state_dict(again, other, loaded)
    for param, value in zip(params_in(other), params_in(optimizer), strict=True):
        local(param.detach()).copy_(local(value.detach()))
    for each in (optimizer, other):
        step(each, range(2, 4))
    assert_same(optimizer, other)
    checkpoint.save(tmp_path / "adamw", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(MismatchError, match="optimizer state of AdamW, and this is AdamW8bit"):
        checkpoint.load(tmp_path / "adamw", model=model, optimizer=optimizer)


@on_ranks(2)
def test_made_before_sharding(rank: int, world_size: int) -> None:
    """`adopt_optimizer` takes over its state; the scales, which have another shape than the parameter, follow."""
    model = Matrices()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, min_quantised_numel=2000)
    step(optimizer, range(2))
    shard_blocks(fsdp2, model)
    adopt_optimizer(optimizer)
    step(optimizer, range(2, 4))
    _, plain = resumable("plain", 1)
    step(plain, range(4))
    assert_equal(optimizer, plain)


@on_ranks(2)
def test_random_bits_of_adopted_parameters(rank: int, world_size: int) -> None:
    """In backward the optimizer holds the parameters of one unit at a time. Each unit's were numbered from 0 again, so
    that units shared their random bits, and the step was not that after backward."""
    found = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64)).bfloat16()
        optimizer = AdamW8bit(model.parameters(), lr=1e-3, rounding_seed=5)
        for layer in model:
            fsdp2.fully_shard(layer)
        fsdp2.fully_shard(model)
        adopt_optimizer(optimizer)
        if in_backward:
            step_in_backward(optimizer)
        for seed in range(2):
            model(values((4, 64), seed).bfloat16()).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([local(param).clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def mean_over_ranks(found: Tensor) -> Tensor:
    dist.all_reduce(found)
    return found / dist.get_world_size()


# --- as an optimizer --------------------------------------------------------------------------------------------------


def test_bytes_of_state() -> None:
    """Two bytes and a bit per element, where AdamW has eight."""
    param = nn.Parameter(values((64, 4096), 0))
    param.grad = torch.ones_like(param)
    sizes = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        optimizer = kind([param])
        optimizer.step()
        sizes.append(sum(value.nbytes for key, value in optimizer.state[param].items() if key != "step"))
    assert sizes == [param.numel() * (2 + 8 / BLOCK), param.numel() * 8]


@on_ranks(2)
@pytest.mark.parametrize("in_backward", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_trains_like_adamw(rank: int, world_size: int, in_backward: bool) -> None:
    """The losses of a small net with moments of 8 bits, beside those with fp32. Within backward the same."""

    def losses(kind: Any, **options: Any) -> Tensor:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 1))
        for layer in (model[0], model[2], model[4]):
            fsdp2.fully_shard(layer)
        fsdp2.fully_shard(model)
        optimizer = kind(model.parameters(), lr=6e-3, **options)
        if in_backward:
            step_in_backward(optimizer)
        found = []
        for number in range(24):
            x = batch(number % 4, rank)
            loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return mean_over_ranks(torch.stack(found))

    exact = losses(lambda params, **options: local_optimizer(torch.optim.AdamW, params, fused=True, **options))
    ours = losses(AdamW8bit, min_quantised_numel=1000)
    assert exact[-4:].mean() < 0.3 * exact[:4].mean()
    assert abs(ours[-4:].mean() - exact[-4:].mean()) < 0.1 * exact[:4].mean()
    assert torch.allclose(losses(AdamW8bit, min_quantised_numel=10**9), exact, rtol=1e-3, atol=1e-5)


def test_mistakes() -> None:
    param = nn.Parameter(torch.ones(3))
    wrong = {
        "lr": -1,
        "betas": (0.9, 1.0),
        "eps": -1,
        "weight_decay": -1,
        "min_quantised_numel": 0.5,
        "rounding_seed": 2.0,
    }
    for name, value in wrong.items():
        with pytest.raises(ArgumentError, match=name):
            AdamW8bit([param], **{name: value})
    for make in (local_optimizer, offload_optimizer):
        with pytest.raises(ArgumentError, match=r"decides by the global shape.*Make it directly"):
            make(AdamW8bit, [param], elementwise=True)
    param = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(ArgumentError, match="complex64"):
        AdamW8bit([param]).step()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["8 bits", "fused", "offloaded"])
def test_the_state_of_one_process(rank: int, world_size: int, kind: str) -> None:
    """`load_state_dict` takes whole tensors for sharded parameters. Each rank stepped with the rows of rank 0."""
    made: dict[str, Any] = {
        "8 bits": lambda params: AdamW8bit(params, lr=1e-2),
        "fused": lambda params: local_optimizer(torch.optim.AdamW, params, lr=1e-2, fused=True),
        "offloaded": lambda params: offload_optimizer(torch.optim.AdamW, params, lr=1e-2, fused=True),
    }
    plain, other = (nn.ParameterList([values(shape, 0) for shape in SHAPES]) for _ in range(2))
    alone = AdamW8bit(plain, lr=1e-2) if kind == "8 bits" else torch.optim.AdamW(plain, lr=1e-2, fused=True)

    def step(optimizer: Any, params: Any, seed: int) -> None:
        for param, shape in zip(params, SHAPES, strict=True):
            grad = values(shape, seed)
            is_sharded = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_sharded else grad
        optimizer.step()

    step(alone, plain, 1)
    other.load_state_dict(plain.state_dict())
    policy = {"offload_policy": fsdp2.Offload()} if kind == "offloaded" else {}
    model: Any = fsdp2.fully_shard(Holder(other), **policy)
    optimizer = made[kind](model.parameters())
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    for each, params in ((alone, plain), (optimizer, other)):
        step(each, params, 2)
        step(each, params, 3)
    for param, sharded in zip(plain, other, strict=True):
        torch.testing.assert_close(sharded.full_tensor(), param, rtol=0, atol=0 if kind == "8 bits" else 1e-6)


class Holder(nn.Module):
    """Something to shard."""

    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, x: Tensor) -> Tensor:
        return x
