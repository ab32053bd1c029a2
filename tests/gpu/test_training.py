"""Training on a GPU gives what torch's FSDP2 gives there, as rank 0 of 8 of a simulated group, whose copies make the
numbers deterministic (benchmarks/gpu/groups.py). On several ranks: test_nccl.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fsdp2
import fsdp2.comm
from benchmarks.gpu import delays, groups
from benchmarks.gpu.model import SHAPES, Llama, loss_of
from benchmarks.gpu.variants import Flat, direct
from fsdp2.comm.base import Comm

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SHAPE = replace(SHAPES["tiny"], dim=64, blocks=3, hidden=160)


def make_model(seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    with DEVICE:
        return Llama(SHAPE)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.length + 1), generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def shard(library: Any, model: Llama, mesh: DeviceMesh, **options: Any) -> Any:
    options["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, **options)
    return library.fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module) -> list[torch.Tensor]:
    """Losses, and at the end the local parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with delays.deterministic():
        for step in range(3):
            tokens, targets = batch(step)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(local(param) for param in model.parameters())]


def local(param: torch.Tensor) -> torch.Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach().clone()


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Bit for bit."""
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(left, right), f"number {number}: {left} is not {right}"


LANES: dict[str, Comm] = {"direct": direct(0), "both": direct(1024), "flat": Flat()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_lanes_give_what_torch_gives(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 8, or of 2 replicas of 4 shards; the lanes agree bit for bit."""
    with groups.simulated(8):
        mesh = init_device_mesh(DEVICE.type, (8,))
        if replicas > 1:
            mesh = init_device_mesh(DEVICE.type, (2, 4), mesh_dim_names=("replicate", "shard"))
        results = []
        for comm in LANES.values():
            monkeypatch.setitem(fsdp2.comm.COMMS, groups.BACKEND, comm)
            results.append(train(shard(fsdp2, make_model(), mesh)))
        for other in results[1:]:
            assert_same(other, results[0])
        expected = train(shard(torch_fsdp, make_model(), mesh))
        assert_close(results[0], expected, rtol=1e-3, atol=1e-4)


def test_offloaded_memory_is_pinned_again() -> None:
    """`to_empty` gives memory that is not; a gather would wait for each copy from it."""
    with groups.simulated(8):
        with torch.device("meta"):
            model = Llama(SHAPE)
        shard(fsdp2, model, init_device_mesh(DEVICE.type, (8,)), offload_policy=fsdp2.CPUOffloadPolicy())
        model.to_empty(device="cpu")
        fsdp2.init.materialize(model, lambda each: [nn.init.normal_(p, std=0.02) for p in each.parameters()], seed=0)
        model(batch(0)[0])
        model.reshard()  # the root stays gathered
        assert all(param.to_local().is_pinned() for param in model.parameters())


def test_two_compute_dtypes_in_one_unit() -> None:
    """Copies of one list to destinations of two dtypes: some versions of `_foreach_copy_` took the first one's for all
    (https://github.com/pytorch/pytorch/issues/173383)."""
    policy = fsdp2.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda param: torch.float32 if param.ndim == 1 else torch.bfloat16,
    )
    with groups.simulated(4):
        torch.manual_seed(0)
        linear = nn.Linear(64, 64, device=DEVICE)
        expected = {name: local(param) for name, param in linear.named_parameters()}
        fsdp2.fully_shard(linear, mesh=init_device_mesh(DEVICE.type, (4,)), mp_policy=policy)
        linear.unshard()
        for name, dtype in (("weight", torch.bfloat16), ("bias", torch.float32)):
            rows = getattr(linear, name)[:16]
            assert rows.dtype == dtype
            assert torch.equal(rows, expected[name][:16].to(dtype)), name
