"""What is done on the lagging device beside training: memory is counted, checkpoints are saved and loaded, failures are
reset. Each takes (rank, world_size, seed) and asserts."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import fsdp2
from fsdp2 import checkpoint
from tests.device import lagging
from tests.device.ranks import DEVICE, late
from tests.device.training import FEATURES, Feature, mesh_of, sharded, train
from tests.helpers.parity_models import batch

__all__ = ["SCENARIOS"]

ADAM = Feature(optimizer=torch.optim.AdamW)


def two_units(rank: int, world_size: int, seed: int) -> None:
    """Behaviour 189, by the allocator's count: the unit that computes and the one that is gathered, and for the flat
    collective its packed buffer. A forward without gradients leaves nothing behind."""
    dim, num_units = 128, 6
    unit_bytes = 4 * dim * dim
    mesh = mesh_of(DEVICE, (world_size,), ("shard",))
    model = nn.Sequential(*[nn.Linear(dim, dim, bias=False, device=DEVICE) for _ in range(num_units)])
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fsdp2.fully_shard(model, mesh=mesh)
    x = torch.randn(1, dim, device=DEVICE)
    with torch.no_grad():
        model(x)
        with late(seed):
            before = lagging.counts()["allocated"]
            torch.accelerator.reset_peak_memory_stats()
            model(x)
            counts = lagging.counts()
    assert 1.9 * unit_bytes <= counts["peak"] - before <= 3.1 * unit_bytes
    assert counts["allocated"] - before < 0.1 * unit_bytes


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """A new folder that all ranks know."""
    made = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(made, 0, device=torch.device("cpu"))
    yield Path(made[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(made[0])


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local().detach().cpu() for param in model.parameters()]  # type: ignore[attr-defined]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, device: str) -> None:
    model(batch(step, rank, 16).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def saves(rank: int, world_size: int, seed: int, in_background: bool) -> None:
    """What is saved are the values of the step before, although the device is late and training goes on."""
    expected = sharded(ADAM, "cpu", world_size)
    expected_optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1, foreach=False)
    one_step(expected, expected_optimizer, 0, rank, "cpu")
    with shared_folder(rank) as folder, late(seed, 1000):
        model = sharded(ADAM, DEVICE, world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        one_step(model, optimizer, 0, rank, DEVICE)
        handle = checkpoint.save(folder / "saved", model=model, optimizer=optimizer, async_op=in_background)
        one_step(model, optimizer, 1, rank, DEVICE)
        handle.wait()
        loaded = sharded(ADAM, "cpu", world_size)
        loaded_optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.1, foreach=False)
        checkpoint.load(folder / "saved", model=loaded, optimizer=loaded_optimizer)
    assert_same(values(loaded), values(expected))
    one_step(loaded, loaded_optimizer, 1, rank, "cpu")
    assert_same(values(loaded), values(model))


def saved(rank: int, world_size: int, seed: int) -> None:
    saves(rank, world_size, seed, in_background=False)


def saved_in_background(rank: int, world_size: int, seed: int) -> None:
    saves(rank, world_size, seed, in_background=True)


def loaded(rank: int, world_size: int, seed: int) -> None:
    """Parameters are filled although the device still writes to them, and the next forward computes with them."""
    expected = sharded(ADAM, "cpu", world_size)
    train(expected, ADAM, "cpu", rank, steps=1)
    with shared_folder(rank) as folder:
        checkpoint.save(folder / "saved", model=expected)
        with late(seed, 1000):
            model = sharded(ADAM, DEVICE, world_size)
            one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, rank, DEVICE)
            checkpoint.load(folder / "saved", model=model)
            assert_same(train(model, ADAM, DEVICE, rank), train(expected, ADAM, "cpu", rank))


def failed(rank: int, world_size: int, seed: int) -> None:
    """A backward raises on all ranks; after `reset_iter_state` training gives what it gives without that."""
    expected = train(sharded(FEATURES["plain"], "cpu", world_size), FEATURES["plain"], "cpu", rank)
    with late(seed):
        model = sharded(FEATURES["plain"], DEVICE, world_size)

        def fail(gradient: torch.Tensor) -> None:
            raise ValueError("on purpose")

        out = model(batch(7, rank, 16).to(DEVICE))
        handle = model.blocks[1].up.register_full_backward_hook(lambda *_: fail(out))
        try:
            model(batch(7, rank, 16).to(DEVICE)).square().mean().backward()
        except ValueError:
            pass
        else:
            raise AssertionError("backward did not raise")
        handle.remove()
        model.reset_iter_state()
        actual = train(model, FEATURES["plain"], DEVICE, rank)
    assert_same(actual, expected)


def activations(rank: int, world_size: int, seed: int) -> None:
    """As many saved activations move to host memory as the budget requires, and none when it suffices. Values are those
    of the CPU. Forwards without gradients, and without a backward, change nothing."""
    feature = FEATURES["mixed precision" if seed % 2 else "plain"]
    expected = train(sharded(feature, "cpu", world_size), feature, "cpu", rank)
    moved = {}
    with late(seed):
        for budget in (1 << 30, 700, 0):
            model = sharded(feature, DEVICE, world_size)
            offload = fsdp2.offload_activations(model.blocks, budget=budget, min_bytes=0)
            with torch.no_grad():
                model(batch(0, rank, 16).to(DEVICE))
            model.reshard()
            actual = train(model, feature, DEVICE, rank)
            assert_same(actual, expected)
            moved[budget] = offload.moved_bytes, offload.saved_bytes
            assert offload.saved_bytes - offload.moved_bytes <= budget
            for _ in range(2):
                model(batch(0, rank, 16).to(DEVICE))  # without a backward
    assert moved[1 << 30][0] == 0 < moved[700][0] < moved[0][0] == moved[0][1], moved


class Recomputed(nn.Module):
    """A block whose call has the checkpoint inside."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = recompute(self.inner, x, use_reentrant=False)
        return out


def activations_leave_memory(rank: int, world_size: int, seed: int) -> None:
    """At the end of forward the device holds the budget, and what is still under way. Of checkpoints inputs move."""
    size = 1 << 16
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(6)]
    x = torch.randn(size // 512, 128)

    def held(blocks: nn.ModuleList, budget: int | None) -> tuple[int, int, list[torch.Tensor]]:
        """Bytes on the device after the second forward, bytes that blocks save, gradients of both."""
        blocks = copy.deepcopy(blocks).to(DEVICE)
        offload = None if budget is None else fsdp2.offload_activations(blocks, budget=budget)
        given = x.to(DEVICE)
        for _ in range(2):
            before = lagging.counts()["allocated"]
            out = given
            for block in blocks:
                out = block(out)
            after = lagging.counts()["allocated"]
            out.square().sum().backward()
        saved_bytes = 0 if offload is None else offload.saved_bytes
        return (
            after - before,
            saved_bytes,
            [param.grad.cpu() for param in blocks.parameters() if param.grad is not None],
        )

    with late(seed):
        plain, _, expected = held(nn.ModuleList(layers), None)
        most, saved_bytes, gradients = held(nn.ModuleList(layers), 4 * size)
        assert_same(gradients, expected)
        assert saved_bytes == 12 * size, saved_bytes / size
        assert plain - most >= 5 * size, (plain / size, most / size)  # of the 8 that move, some are under way
        checkpointed = nn.ModuleList(map(Recomputed, layers))
        _, saved_bytes, gradients = held(checkpointed, 0)
        assert_same(gradients, expected)
        assert saved_bytes == 6 * size, saved_bytes / size


def activations_changed(rank: int, world_size: int, seed: int) -> None:
    """A saved tensor that is changed in place, which autograd does not see any more, is refused."""
    layer = nn.Linear(128, 128).to(DEVICE)
    fsdp2.offload_activations([layer], min_bytes=0)
    x = torch.randn(4, 128, device=DEVICE)
    out = layer(x)
    x.add_(1)
    with pytest.raises(fsdp2.OrderError, match="changed in place after it was saved"):
        out.sum().backward()


SCENARIOS: dict[str, Callable[[int, int, int], None]] = {
    "activations": activations,
    "activations leave memory": activations_leave_memory,
    "activations changed in place": activations_changed,
    "two units": two_units,
    "saved": saved,
    "saved in the background": saved_in_background,
    "loaded": loaded,
    "failed": failed,
}
