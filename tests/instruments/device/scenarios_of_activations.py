"""Scenarios of `offload_activations`."""

import copy
import warnings
from collections.abc import Iterable

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

SIZE = 1 << 16  # bytes of a tensor between `layers`


def layers(num: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(num))


def batch_of_layers() -> torch.Tensor:
    return torch.randn(SIZE // 512, 128)


def through(blocks: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def gradients(blocks: nn.Module) -> list[torch.Tensor]:
    return [param.grad.cpu() for param in blocks.parameters() if param.grad is not None]


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
    plain, x = layers(6), batch_of_layers()

    def held(blocks: nn.ModuleList, budget: int | None) -> tuple[int, int, list[torch.Tensor]]:
        """Bytes on the device after the second forward, bytes that blocks save, gradients of both."""
        blocks, given = copy.deepcopy(blocks).to(DEVICE), x.to(DEVICE)
        offload = None if budget is None else fsdp2.offload_activations(blocks, budget=budget)
        for _ in range(2):
            before = lagging.counts()["allocated"]
            out = through(blocks, given)
            after = lagging.counts()["allocated"]
            out.square().sum().backward()
        return after - before, 0 if offload is None else offload.saved_bytes, gradients(blocks)

    with late(seed):
        everything, _, expected = held(plain, None)
        most, saved_bytes, found = held(plain, 4 * SIZE)
        assert_same(found, expected)
        assert saved_bytes == 12 * SIZE, saved_bytes / SIZE
        assert everything - most >= 5 * SIZE, (everything / SIZE, most / SIZE)  # of the 8 that move, some are under way
        _, saved_bytes, found = held(nn.ModuleList(map(Recomputed, plain)), 0)
        assert_same(found, expected)
        assert saved_bytes == 6 * SIZE, saved_bytes / SIZE


def activations_of_microbatches(rank: int, world_size: int, seed: int) -> None:
    """A pipeline begins a forward while others wait for their backward. With a budget of nothing, of what these have
    saved nothing is on the device. (What the last block had saved was.)"""
    plain, given = layers(4), [batch_of_layers() for _ in range(4)]

    def trained(device: str) -> tuple[list[int], list[torch.Tensor]]:
        """What blocks have saved on the device, after each forward; gradients."""
        before = lagging.counts()["allocated"]
        blocks = copy.deepcopy(plain).to(device)
        if device == DEVICE:
            fsdp2.offload_activations(blocks, min_bytes=0)
        inputs, waiting, saved = [each.to(device) for each in given], [], []
        for is_forward in (True, False, True, True, False, True, False, False):
            if not is_forward:
                waiting.pop(0).backward()
                continue
            waiting.append(through(blocks, inputs.pop(0)).square().sum())  # which saves its input
            held = [*blocks.parameters(), *(param.grad for param in blocks.parameters() if param.grad is not None)]
            others = sum(each.nbytes for each in [*held, *inputs]) + SIZE * len(waiting)
            saved.append(lagging.counts()["allocated"] - before - others)
        return saved, gradients(blocks)

    _, expected = trained("cpu")
    with late(seed):
        saved, found = trained(DEVICE)
    assert_same(found, expected)
    assert all(1.9 * SIZE <= each <= 2.1 * SIZE for each in saved), saved  # of the last block, under way


def activations_compiled(rank: int, world_size: int, seed: int) -> None:
    """What compiled blocks save moves, too, and the gradients are those of the CPU. (Of a `Sequential` torch compiles
    nothing but what its forward calls, and that were the hooks.)"""
    plain = nn.ModuleList([Recomputed(nn.Tanh()), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), Block(64, 32)])
    given = torch.randn(8, 64)

    def trained(device: str) -> tuple[list[torch.Tensor], fsdp2.ActivationOffload]:
        blocks = copy.deepcopy(plain).to(device)
        offload = fsdp2.offload_activations(blocks, min_bytes=0)
        for block in blocks:
            block.compile(backend="aot_eager")
        for _ in range(2):
            through(blocks, given.to(device)).square().sum().backward()
        return gradients(blocks), offload

    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # the compiler looks at `.grad`
        expected, _ = trained("cpu")
        with late(seed):
            found, offload = trained(DEVICE)
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
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)
    fsdp2.offload_activations(blocks, min_bytes=0)
    given, found = torch.randn(32, 64).to(device), []
    for number in range(4):
        out, middle = given, given
        for block in blocks:
            out, middle = block(out).tanh(), out
        loss = out.square().mean()
        if number % 2:
            found += torch.autograd.grad(loss, middle)
        else:
            loss.backward()
        del out, middle, loss
    return [*(each.cpu() for each in found), *gradients(blocks)]


def activations_kept(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A reload does not write over an activation that somebody still holds, nor over what got its memory since
    (DeepSpeed issue 8186)."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)
    fsdp2.offload_activations(blocks, min_bytes=0)
    found = []
    for _ in range(2):
        kept = [torch.randn(32, 64).to(device)]
        for block in blocks:
            kept.append(block(kept[-1]).tanh())
        others = [torch.full((32, 64), float(number), device=device) for number in range(4)]
        kept[-1].square().mean().backward()
        found += [each.detach() for each in (*kept, *others)]
    return [*(each.cpu() for each in found), *gradients(blocks)]


SCENARIOS_OF_ACTIVATIONS: dict[str, Scenario] = {
    "activations": activations,
    "activations leave memory": activations_leave_memory,
    "activations of microbatches": activations_of_microbatches,
    "activations, compiled": activations_compiled,
    "activations changed in place": activations_changed,
    "activations that the program keeps": as_on_cpu(activations_kept),
    "activations, in part": as_on_cpu(activations_in_part),
}
