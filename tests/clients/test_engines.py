"""What engines get of `fsdp2.weights` through the adapters of examples/engines.py, with the engines' own classes."""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import fully_shard
from tests.clients.clients import TIMEOUT_S
from tests.clients.training import without
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import ROOT


def engines() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("engines")


def bare(*packages: str) -> None:
    """Packages without what their `__init__` imports, so that single modules of them are found."""
    for name in (each for each in packages if each not in sys.modules):
        spec = find_spec(name)
        assert spec is not None
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = spec.submodule_search_locations  # type: ignore[attr-defined]


def uneven(world_size: int) -> nn.Module:
    """Strided and uneven shards, of which one rank has nothing, and a replicated buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_verl_sends_what_has_changed(rank: int, world_size: int) -> None:
    """verl's delta export and gather, unmodified. It refuses such DTensors itself."""
    without("ray", "tensordict", "tensordict.tensorclass")
    bare("verl.checkpoint_engine", "verl.checkpoint_engine.delta_sync", "verl.workers", "verl.workers.engine")
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
    from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export, prime_delta_snapshots

    model = uneven(world_size)
    plan = fsdp2.weights(model, dtype=torch.bfloat16)
    held = {name: tensor.clone() for name, tensor in plan}
    snapshots: dict[str, Tensor] = {}
    prime_delta_snapshots(engines().verl_shards(plan), snapshots, pin=False)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().view(-1)[::3] += 1  # type: ignore[operator]
    changed = set()
    for slots, _, counts, index, value, group in hf_delta_export(
        engines().verl_shards(plan), snapshots, _hf_entry_identity
    ):
        found = gather_slot_entries_to_rank0(index, value, counts, group)
        for (name, shape), (where, what) in zip(slots, found or (), strict=False):
            assert tuple(shape) == held[name].shape and where.unique().numel() == where.numel()
            held[name].view(-1)[where.long()] = what
            changed |= {name} if where.numel() else set()
    for name, tensor in plan:
        assert rank or torch.equal(tensor, held[name]), name
    assert rank or changed == {name for name, _ in model.named_parameters()}


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_verl_finds_the_same_places(rank: int, world_size: int) -> None:
    """Where verl can tell by itself, from the placements of the parameters, it says what the adapter says."""
    without("ray", "tensordict", "tensordict.tensorclass")
    bare("verl.workers", "verl.workers.engine")
    from verl.workers.engine.spec import ShardSpec, derive_dtensor_placement

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    params = dict(model.named_parameters())
    for name, local, spec in engines().verl_shards(fsdp2.weights(model)):
        place, contributes, _ = derive_dtensor_placement(ShardSpec.from_param(params[name]))
        assert (spec.place, spec.contributes) == (place, contributes), name
        assert torch.equal(local, params[name].to_local().reshape(-1))  # type: ignore[operator]


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_sglang_gets_buckets(rank: int, world_size: int) -> None:
    bare("sglang", "sglang.srt", "sglang.srt.weight_sync")
    model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)))
    plan = fsdp2.weights(model, dtype=torch.bfloat16)
    buckets = [*engines().sglang_buckets(plan, bucket_bytes=32)]
    found = {name: tensor for bucket in buckets for name, tensor in bucket.reconstruct_tensors()}
    expected = {name: tensor.clone() for name, tensor in plan}
    assert len(buckets) > 1 and found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
