"""What `tests/instruments/device/` trains on the lagging device, on a GPU that two or four ranks share over NCCL."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from benchmarks.gpu import groups
from fsdp2._torch.extras import group_allocates
from fsdp2.comm import comm_for
from fsdp2.comm.flat import FlatComm
from tests.gpu import nccl
from tests.helpers.ranks import on_ranks
from tests.instruments.device.scenarios import SCENARIOS, SCENARIOS_ON_FOUR
from tests.instruments.device.training import FEATURES, ON_FOUR, Feature, expected_of, mesh_of, mixed, sharded, train

pytestmark = pytest.mark.gpu

LEFT_OUT = ("materialized",)  # whose values on the CPU are not those on a GPU: tests/gpu/test_init.py


ROUNDED = ("16 bits", "fp16", "int8", "whole matrices")  # within, though losses are of 32 bits


def check(name: str, rank: int, world_size: int) -> None:
    """Losses and parameters with this feature are near those of the CPU."""
    feature = FEATURES.get(name) or ON_FOUR[name]
    expected = expected_of(name, rank, world_size)
    actual = train(sharded(feature, "cuda", world_size), feature, "cuda", rank)
    nccl.assert_near(actual, expected, 0.2 if any(word in name for word in ROUNDED) else 1e-3)


@on_ranks(2, timeout_s=120, device=nccl.__name__)
@pytest.mark.parametrize("name", FEATURES)
def test_features(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size)


@on_ranks(4, timeout_s=120, device=nccl.__name__)
@pytest.mark.parametrize("name", ["plain", *ON_FOUR])
def test_features_on_four(rank: int, world_size: int, name: str) -> None:
    check(name, rank, world_size)


@on_ranks(2, timeout_s=120, device=nccl.__name__)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in LEFT_OUT])
def test_scenarios(rank: int, world_size: int, name: str) -> None:
    SCENARIOS[name](rank, world_size, 0)


@on_ranks(4, timeout_s=120, device=nccl.__name__)
@pytest.mark.parametrize("name", SCENARIOS_ON_FOUR)
def test_scenarios_on_four(rank: int, world_size: int, name: str) -> None:
    SCENARIOS_ON_FOUR[name](rank, world_size, 0)


def both(feature: Feature, rank: int, world_size: int) -> None:
    """Trained on the CPU and on the GPU."""
    expected, actual = (
        train(sharded(feature, device, world_size), feature, device, rank) for device in ("cpu", "cuda")
    )
    nccl.assert_near(actual, expected)


def from_group(model: Any, device: str) -> None:
    if device == "cuda":
        for unit in [*model.blocks, model]:
            unit.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2, timeout_s=120, device=nccl.__name__)
@pytest.mark.parametrize("options", [{}, mixed()])
def test_memory_of_the_group(rank: int, world_size: int, options: dict[str, Any]) -> None:
    if not group_allocates(dist.group.WORLD, torch.device("cuda", 0)):
        with pytest.warns(UserWarning, match="no effect.*on devices with multicast"):
            both(Feature(options, prepare=from_group), rank, world_size)
    else:
        both(Feature(options, prepare=from_group), rank, world_size)


@on_ranks(2, timeout_s=120, device=nccl.__name__)
def test_symmetric_memory_of_two_machines(rank: int, world_size: int) -> None:
    """These ranks pass for two machines. The first forward raised an error of NCCL's, or ended the process."""
    model = sharded(FEATURES["plain"], "cuda", world_size)
    with pytest.raises(fsdp2.UnsupportedError, match="symmetric memory: the ranks of this group cannot have it"):
        model.set_symm_mem_for_comm()


class Phases(nn.Module):
    """Has parameters of types that NCCL has not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.signs = nn.Parameter(torch.tensor([1, -1, 1, 1, -1, -1], dtype=torch.int16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight.T * self.signs).abs()


@on_ranks(2, timeout_s=120, device=nccl.__name__)
def test_types_that_nccl_has_not(rank: int, world_size: int) -> None:
    values = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = fsdp2.fully_shard(Phases().to(device), mesh=mesh_of(device, (world_size,), ("shard",)))
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(3, 4, generator=generator).to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append([torch.view_as_real(model.weight.to_local().detach()).cpu()])
    nccl.assert_near(values[1], values[0])


@on_ranks(2, timeout_s=120, device=nccl.__name__)
def test_debug_level_detail(rank: int, world_size: int) -> None:
    """What torch puts around a group then has no coalesced collectives in 2.11."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        mesh = init_device_mesh("cuda", (1, world_size), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = fsdp2.fully_shard(nn.Linear(8, 8).cuda(), mesh=mesh)
        assert isinstance(comm_for(mesh.get_group("shard"), torch.device("cuda")), FlatComm)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        assert torch.equal(model.bias.grad.full_tensor(), torch.full((8,), 2.0, device="cuda"))
    finally:
        dist.set_debug_level(level)


# --- groups that have NCCL alone, which no pool has ------------------------------------------------------------------


def layers(device: str | torch.device = "cuda") -> nn.Sequential:
    """One row of the last layer's bias is nobody's on the last of four ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def shard(model: nn.Sequential, **options: Any) -> Any:
    fsdp2.fully_shard(model[0], **options)
    return fsdp2.fully_shard(model, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, clip: Callable[..., Any]) -> list[float]:
    """Losses and norms."""
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.item(), float(clip(model.parameters(), 0.01))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def inputs(world_size: int) -> torch.Tensor:
    """A row for each rank."""
    return torch.randn(world_size, 8, generator=torch.Generator().manual_seed(1)).cuda()


def trains(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """As one process does, with the norm of all gradients."""
    x = inputs(world_size)
    plain = layers()
    norms = steps(plain, torch.optim.AdamW(plain.parameters()), x, nn.utils.clip_grad_norm_)[1::2]
    model = shard(layers(), **options)
    if isinstance(options.get("offload_policy"), fsdp2.Offload):
        optimizer: torch.optim.Optimizer = fsdp2.offload_optimizer(torch.optim.AdamW, model.parameters())
    else:
        optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters())
    found = steps(model, optimizer, x[rank : rank + 1], fsdp2.clip_grad_norm_)[1::2]
    assert found == pytest.approx(norms, rel=1e-4)
    with fsdp2.full_params(model):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach().cuda(), expected.detach(), rtol=1e-4, atol=1e-6)


def step_of(model: nn.Module, x: torch.Tensor, fails: bool) -> None:
    loss = model(x).square().mean()
    if fails:
        raise ValueError("a bad batch")
    loss.backward()


def agrees(rank: int, world_size: int, _: Any) -> None:
    """A batch fails on one rank: no rank has gradients of it, and those of the next are those of one process."""
    whole, plain, model = inputs(world_size), layers(), shard(layers())
    plain(whole).square().mean().backward()
    x = whole[rank : rank + 1]
    model(x).square().mean().backward()
    model.zero_grad()
    with pytest.raises(fsdp2.StepError, match="a bad batch"), fsdp2.agree_on_step(model):
        step_of(model, x, fails=rank == 1)
    assert all(param.grad is None for param in model.parameters())
    with fsdp2.agree_on_step(model):
        model(x).square().mean().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


def alone(rank: int, world_size: int, meeting: str, is_bound: bool, body: Callable[..., None], argument: Any) -> None:
    """A rank's process."""
    groups.take_gpu()
    groups.share_gpu()
    device = torch.device("cuda", 0) if is_bound else None
    options = {"rank": rank, "world_size": world_size, "device_id": device}
    dist.init_process_group("nccl", init_method=f"file://{meeting}", **options)
    body(rank, world_size, argument)
    dist.destroy_process_group()


def with_nccl_alone(world_size: int, body: Callable[..., None], argument: Any, is_bound: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"{folder}/meeting", is_bound, body, argument)
        torch.multiprocessing.start_processes(alone, arguments, nprocs=world_size, start_method="forkserver")


ALL = fsdp2.Offload(grads=True, params=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"offload_policy": fsdp2.CPUOffloadPolicy()}, {"offload_policy": ALL}, {"zero": fsdp2.ZeroPolicy(1)}],
    ids=["sharded", "offloaded", "offloaded in the background", "stage 1"],
)
def test_training(options: dict[str, Any]) -> None:
    with_nccl_alone(2, trains, options)


def test_agreement() -> None:
    with_nccl_alone(2, agrees, None)


def meshes(rank: int, world_size: int, _: Any) -> None:
    """Groups that are made of a part of the ranks, each connected at once where the world is bound to a device."""
    mesh = init_device_mesh("cuda", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for options in ({"mesh": mesh}, {"mesh": init_device_mesh("cuda", (world_size,)), "reshard_after_forward": 2}):
        x = inputs(world_size)
        plain = layers()
        plain(x).square().mean().backward()
        model = shard(layers(), **options)
        model.set_separate_reduce_scatter_group(True)
        model(x[rank : rank + 1]).square().mean().backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("is_bound", [False, True])
def test_groups(is_bound: bool) -> None:
    with_nccl_alone(4, meshes, None, is_bound)
