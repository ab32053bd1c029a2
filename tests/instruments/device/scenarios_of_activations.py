"""Scenarios of `offload_activations`."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import fsdp2
from tests.helpers.parity_models import Block, batch
from tests.instruments.device import lagging
from tests.instruments.device.ranks import DEVICE, late
from tests.instruments.device.steps import Scenario, as_on_cpu, assert_same
from tests.instruments.device.training import FEATURES, sharded, train

__all__ = ["SCENARIOS_OF_ACTIVATIONS"]


def activations(rank: int, world_size: int, seed: int) -> None:
    """As many saved activations move to host memory as the budget requires, and none when it suffices. Values are those
    of the CPU. Forwards without gradients, and without a backward, change nothing (modelscope/ms-swift issue 9844)."""
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


def activations_of_microbatches(rank: int, world_size: int, seed: int) -> None:
    """A pipeline begins a forward while others wait for their backward. With a budget of nothing, of what these have
    saved nothing is on the device. (What the last block had saved was.)"""
    size = 1 << 16
    layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(4))
    given = [torch.randn(size // 512, 128) for _ in range(4)]

    def grads(device: str) -> tuple[list[int], list[torch.Tensor]]:
        """What blocks have saved on the device, after each forward; gradients."""
        before = lagging.counts()["allocated"]
        blocks = copy.deepcopy(layers).to(device)
        if device == DEVICE:
            fsdp2.offload_activations(blocks, min_bytes=0)
        inputs, waiting, saved = [each.to(device) for each in given], [], []
        for is_forward in (True, False, True, True, False, True, False, False):
            if not is_forward:
                waiting.pop(0).backward()
                continue
            out = inputs.pop(0)
            for block in blocks:
                out = block(out)
            waiting.append(out.square().sum())  # which saves `out`
            del out
            held = [*blocks.parameters(), *(param.grad for param in blocks.parameters() if param.grad is not None)]
            others = sum(each.nbytes for each in [*held, *inputs]) + size * len(waiting)
            saved.append(lagging.counts()["allocated"] - before - others)
        return saved, [param.grad.cpu() for param in blocks.parameters() if param.grad is not None]

    _, expected = grads("cpu")
    with late(seed):
        saved, found = grads(DEVICE)
    assert_same(found, expected)
    assert all(1.9 * size <= each <= 2.1 * size for each in saved), saved  # of the last block, under way


def activations_of_larger_batches(rank: int, world_size: int, seed: int) -> None:
    """A batch that fits into the budget, one that does not, and the first again."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
    sizes = [8, 8, 8, 32, 32, 8, 8]

    def trained(device: str) -> tuple[list[int], list[torch.Tensor]]:
        """Bytes that stay, and those that move if as many are saved; gradients."""
        copied = copy.deepcopy(blocks).to(device)
        offload = fsdp2.offload_activations(copied, budget=20_000, min_bytes=0)
        moved = []
        for number, size in enumerate(sizes):
            out = batch(number, rank, 64).repeat(size, 1)[:size].to(device)
            for block in copied:
                out = block(out)
            out.square().sum().backward()
            moved.append(offload.moved_bytes)
            assert offload.saved_bytes - offload.moved_bytes <= 20_000
        return moved, [param.grad.cpu() for param in copied.parameters() if param.grad is not None]

    _, expected = trained("cpu")
    with late(seed):
        moved, found = trained(DEVICE)
    assert_same(found, expected)
    assert [each > 0 for each in moved] == [False] * 3 + [True] * 3 + [False], moved  # the sixth as the fifth


def activations_compiled(rank: int, world_size: int, seed: int) -> None:
    """What compiled blocks save moves, too, and the gradients are those of the CPU. (Of a `Sequential` torch compiles
    nothing but what its forward calls, and that were the hooks.)"""
    layers = nn.ModuleList([Recomputed(nn.Tanh()), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), Block(64, 32)])
    given = torch.randn(8, 64)

    def grads(device: str) -> tuple[list[torch.Tensor], fsdp2.ActivationOffload]:
        blocks = copy.deepcopy(layers).to(device)
        offload = fsdp2.offload_activations(blocks, min_bytes=0)
        for block in blocks:
            block.compile(backend="aot_eager")
        for _ in range(2):
            out = given.to(device)
            for block in blocks:
                out = block(out)
            out.square().sum().backward()
        return [param.grad.cpu() for param in blocks.parameters() if param.grad is not None], offload

    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # the compiler looks at `.grad`
        expected, _ = grads("cpu")
        with late(seed):
            found, offload = grads(DEVICE)
    assert_same(found, expected)
    assert 0 < offload.moved_bytes == offload.saved_bytes


def activations_changed(rank: int, world_size: int, seed: int) -> None:
    """A saved tensor that is changed in place, which autograd does not see any more, is refused."""
    layer = nn.Linear(128, 128).to(DEVICE)
    fsdp2.offload_activations([layer], min_bytes=0)
    x = torch.randn(4, 128, device=DEVICE)
    out = layer(x)
    x.add_(1)
    with pytest.raises(fsdp2.OrderError, match="changed in place after it was saved"):
        out.sum().backward()


def activations_in_part(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A backward that ends early leaves copies to the device under way, of which nobody needs the values."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)
    fsdp2.offload_activations(layers, min_bytes=0)
    given, found = torch.randn(32, 64).to(device), []
    for number in range(4):
        out, middle = given, given
        for layer in layers:
            out, middle = layer(out).tanh(), out
        loss = out.square().mean()
        if number % 2:
            found += torch.autograd.grad(loss, middle)
        else:
            loss.backward()
        del out, middle, loss
    return [each.cpu() for each in (*found, *(param.grad for param in layers.parameters()))]


SCENARIOS_OF_ACTIVATIONS: dict[str, Scenario] = {
    "activations": activations,
    "activations leave memory": activations_leave_memory,
    "activations of microbatches": activations_of_microbatches,
    "activations of larger batches": activations_of_larger_batches,
    "activations, compiled": activations_compiled,
    "activations changed in place": activations_changed,
    "activations, in part": as_on_cpu(activations_in_part),
}
