"""`fsdp2.weights` of models with other features: their values are those of `full_tensor()`, before and after a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import Offload, OptionalPolicy, ZeroPolicy, fully_shard, offload_optimizer, tile
from tests.helpers.optional_models import DIM, VisionLanguage
from tests.helpers.ranks import on_ranks


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 14), nn.Linear(14, 8)) for _ in range(2)))


def in_files(rank: int, folder: Path) -> Any:
    policy = Offload(grads=True, params="files", tier=folder / str(rank))
    model = blocks()
    for block in model:
        fully_shard(block, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    return model, (torch.randn(3, 8),), offload_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)


def optional(rank: int, folder: Path) -> Any:
    """Rank 0 alone runs the tower."""
    model = VisionLanguage()
    fully_shard(model.vision, optional=OptionalPolicy(runs_if=lambda text, images=None: images is not None))
    fully_shard(model)
    x = torch.randn(3, DIM)
    return model, (x, x if rank == 0 else None), None


def tiled(rank: int, folder: Path) -> Any:
    model = blocks()
    tile(model[0][0], 3)
    return fully_shard(model), (torch.randn(3, 8),), None


def frozen(rank: int, folder: Path) -> Any:
    model = blocks()
    model[0].requires_grad_(False)
    for block in model:
        fully_shard(block, zero=ZeroPolicy(keep_frozen=True))
    return fully_shard(model), (torch.randn(3, 8),), None


class Halves(nn.Module):
    """Parameters of three dtypes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).bfloat16()
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 7).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x.bfloat16()).float()).half())


def mixed_dtypes(rank: int, folder: Path) -> Any:
    return fully_shard(Halves()), (torch.randn(3, 8),), None


def two_meshes(rank: int, folder: Path) -> Any:
    """Tensor parallelism on the same dim, and on another one: strided and uneven shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = blocks()
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), (torch.ones(3, 8),), None


KINDS = {each.__name__: each for each in (in_files, optional, tiled, frozen, mixed_dtypes, two_meshes)}


@torch.no_grad()
def whole(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies."""
    state = {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.state_dict().items()
    }
    return {name: each.to(dtype or each.dtype, copy=True) for name, each in state.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@on_ranks(4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_slices_and_changes(
    rank: int, world_size: int, kind: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, optimizer = KINDS[kind](rank, tmp_path)
    optimizer = optimizer or torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    plan = fsdp2.weights(model, dtype=dtype)
    held = whole(model, dtype)
    for bucket_bytes in (1, 1000):
        assert_same({n: t.clone() for bucket in plan.full(bucket_bytes) for n, t in bucket}, held)
    known = plan.snapshot()
    for _ in range(2):
        model(*inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(model, dtype)
        for place in plan.boxes():
            box = tuple(slice(s, s + n) for s, n in zip(place.start, place.local_shape, strict=True))
            assert torch.equal(plan.local(place.name), expected[place.name][box])
        changed = [*plan.changes(known)]
        assert changed
        for name, indices, values, _ in changed:
            held[name].view(-1)[indices.long()] = values
        assert_same(held, expected)
        assert_same({name: tensor.clone() for name, tensor in plan}, expected)
