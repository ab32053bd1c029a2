"""Streams and memory on a GPU: nothing waits for the device, results do not depend on which stream is late, and memory
is what the design says, in every step. `tests/core/memory/test_streams.py` proves the same with simulated streams."""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
import fsdp2.comm
from benchmarks.common import synchronize
from benchmarks.gpu import delays, groups
from benchmarks.gpu.model import SHAPES, loss_of
from benchmarks.gpu.variants import Flat, direct

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SHAPE = replace(SHAPES["tiny"], dim=256, blocks=4, hidden=512, length=64, recomputes=False)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    refuse_to_wait(False)


def refuse_to_wait(enabled: bool) -> None:
    """Whether it is an error from now on that the host waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error" if enabled else "default")


@pytest.mark.parametrize("setting", delays.SETTINGS)
def test_no_stream_may_change_the_result_by_being_late(setting: str) -> None:
    """Behaviour 143: delays on any stream, at any point of a step."""
    options = argparse.Namespace(size="tiny", steps=2, delay_ms=2.0, settings=setting)
    with groups.simulated(8):
        report = delays.check_all(options, DEVICE)[setting]
    assert report["changed_by"] == [] and report["repeats"]


def model_and_step(lanes: str = "direct", **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    fsdp2.comm.COMMS[groups.BACKEND] = direct(0) if lanes == "direct" else Flat()
    setting = delays.Setting(direct=lanes == "direct", **options)  # type: ignore[arg-type]
    model = delays.sharded(setting, SHAPE, DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE.type == "cuda")


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()


def some_tokens() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(SHAPE.vocab, (SHAPE.batch, SHAPE.length + 1), device=DEVICE)


@pytest.mark.parametrize("lanes", ["direct", "flat"])
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"reshard": False}, {"lists": True}], ids=str)
def test_a_step_never_waits_for_the_device(lanes: str, options: dict[str, object]) -> None:
    """Behaviour 144."""
    with groups.simulated(8):
        model, optimizer = model_and_step(lanes, **options)
        tokens = some_tokens()
        for _ in range(2):
            one_step(model, optimizer, tokens)
        refuse_to_wait(True)
        one_step(model, optimizer, tokens)
        refuse_to_wait(False)


def test_offload_waits_for_gradients_only() -> None:
    """The gathers of a no_grad forward copy from pinned memory, and do not wait."""
    with groups.simulated(8):
        model, _ = model_and_step(offload=True)
        tokens = some_tokens()
        with torch.no_grad():
            model(tokens)
            refuse_to_wait(True)
            model(tokens)
            refuse_to_wait(False)


@pytest.mark.parametrize("lanes", ["direct", "flat"])
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"keeps_storage": True}, {"offload": True}], ids=str)
def test_memory_does_not_grow(lanes: str, options: dict[str, object]) -> None:
    """Behaviour 191: allocated bytes are the same after each step, and so is the peak, whatever runs ahead of what."""
    with groups.simulated(8):
        model, _ = model_and_step(lanes, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        tokens = some_tokens()
        allocated, peaks = [], []
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        for step in range(7):
            torch.cuda.reset_peak_memory_stats()
            one_step(model, optimizer, tokens)
            if step >= 2:
                allocated.append(torch.cuda.memory_allocated())
                peaks.append(torch.cuda.max_memory_allocated())
        assert len(set(allocated)) == 1, allocated
        assert len(set(peaks)) == 1, peaks
        assert torch.cuda.memory_stats()["num_alloc_retries"] == retries


@pytest.mark.parametrize("is_late", [False, True])
def test_two_units_are_alive(is_late: bool) -> None:
    """Behaviour 189: a forward without gradients takes the memory of two units beside that of tiny activations, also
    when the compute stream is far behind the host."""
    dim, num_units = 1024, 8
    unit_bytes = 4 * dim * dim
    with groups.simulated(8):
        fsdp2.comm.COMMS[groups.BACKEND] = direct(0)
        with DEVICE:
            model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(num_units)])
        mesh = init_device_mesh(DEVICE.type, (8,))
        for layer in model:
            fsdp2.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            if is_late:
                layer.register_forward_pre_hook(lambda *_: groups.occupy(5e-3))
        fsdp2.fully_shard(model, mesh=mesh)
        x = torch.randn(1, dim, device=DEVICE)
        with torch.no_grad():
            model(x)
            synchronize(DEVICE.type)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model(x)
            peak = torch.cuda.max_memory_allocated() - before
            after = torch.cuda.memory_allocated() - before
    assert 1.9 * unit_bytes <= peak <= 2.1 * unit_bytes
    assert after < 0.1 * unit_bytes, "nothing is kept after a forward that has no backward"


def test_a_gather_overlaps_the_compute_before_it() -> None:
    """Behaviour 145: with compute and collectives of equal length, prefetched, a forward takes little more than one of
    the two."""
    dim, num_units, seconds = 1024, 8, 10e-3
    with groups.simulated(8, groups.Wire(bandwidth_bytes=1e15, latency_s=seconds)):
        fsdp2.comm.COMMS[groups.BACKEND] = direct(0)
        with DEVICE:
            model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(num_units)])
        mesh = init_device_mesh(DEVICE.type, (8,))
        for layer in model:
            fsdp2.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            layer.register_forward_pre_hook(lambda *_: groups.occupy(seconds))
        fsdp2.fully_shard(model, mesh=mesh)
        x = torch.randn(1, dim, device=DEVICE)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.no_grad():
            model(x)
            synchronize(DEVICE.type)
            start.record()
            model(x)
            end.record()
            synchronize(DEVICE.type)
    taken = start.elapsed_time(end) / 1e3
    assert (num_units + 1) * seconds * 0.8 < taken < 1.4 * (num_units + 1) * seconds  # 16 one after the other
