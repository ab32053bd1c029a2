"""Initialisation on a GPU: the values are those of one process on that GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks.gpu import groups

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
RANKS = 4

FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": lambda t: t.normal_(0.5, 0.02),
    "uniform": lambda t: t.uniform_(-0.3, 0.7),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "random": lambda t: t.random_(3, 100),
    "exponential": lambda t: t.exponential_(1.7),
    "cauchy": lambda t: t.cauchy_(0.1, 3.0),
    "log normal": lambda t: t.log_normal_(0.3, 0.7),
    "geometric": lambda t: t.geometric_(0.013),
    "truncated": lambda t: nn.init.trunc_normal_(t, std=0.7),
    "xavier": lambda t: nn.init.xavier_uniform_(t),
}


class Weight(nn.Module):
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1003, 259, device=device, dtype=dtype))


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_values_are_those_of_one_process(name: str, dtype: torch.dtype) -> None:
    for mode in ("sequential", "blocks"):
        with torch.no_grad(), fsdp2.init.seeded(7, mode=mode):
            whole = Weight(DEVICE, dtype)
            FILLS[name](whole.weight)
        with groups.simulated(RANKS):
            sharded = Weight(DEVICE, dtype)
            fsdp2.fully_shard(sharded, mesh=init_device_mesh(DEVICE.type, (RANKS,)))
            with torch.no_grad(), fsdp2.init.seeded(7, mode=mode):
                FILLS[name](sharded.weight)
            assert isinstance(sharded.weight, DTensor)
            rows = sharded.weight.to_local()
            assert torch.equal(rows, whole.weight[: rows.shape[0]]), mode


@pytest.mark.parametrize("offload", [False, True])
def test_materialize(offload: bool) -> None:
    """On the meta device, then memory where the parameters belong; replicas are sent over the mesh's own device."""
    with groups.simulated(RANKS):
        mesh = init_device_mesh(DEVICE.type, (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
        options = {"offload_policy": fsdp2.CPUOffloadPolicy()} if offload else {}
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32))
        fsdp2.fully_shard(model, mesh=mesh, **options)
        fsdp2.init.materialize(model, seed=0)
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.to_local().device.type == ("cpu" if offload else DEVICE.type)
        assert all(buffer.device.type == DEVICE.type for buffer in model.buffers())
        assert model(torch.randn(4, 32, device=DEVICE)).isfinite().all()
