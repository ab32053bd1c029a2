"""What programs do with streams of their own, and what broke offload in other libraries: bit for bit as on the CPU.

The issues are DeepSpeed 7898 (waiting on the default stream, not the current one), 8080 (gradients from several
streams), 8186 (a reload over a live activation), torchtitan 2581 (`current_stream()` within `with stream:`), and
prime-rl 3196 (fresh streams each step make the allocator grow).
"""

import pytest
import torch
from torch import nn

import fsdp2
from tests.helpers.parity_models import batch
from tests.instruments.device.ranks import DEVICE, SEEDS, late, on_device_ranks
from tests.instruments.device.steps import assert_same
from tests.instruments.device.training import FEATURES, Feature, mesh_of, sharded, train

OFFLOADED = ["offload", "states in host memory", "states and gradients in host memory", "all in host memory"]


@on_device_ranks(2)
@pytest.mark.parametrize("name", ["plain", "clipped AdamW", "frozen weights in host memory", *OFFLOADED])
def test_a_program_in_a_stream_of_its_own(rank: int, world_size: int, name: str) -> None:
    """The current stream is not the default one, neither where the model is sharded nor where it is trained."""
    feature = FEATURES[name]
    expected = train(sharded(feature, "cpu", world_size), feature, "cpu", rank)
    for seed in range(SEEDS):
        with late(seed), torch.Stream(DEVICE):
            assert_same(train(sharded(feature, DEVICE, world_size), feature, DEVICE, rank), expected)


def steps_in_fresh_streams(model: nn.Module, feature: Feature, device: str, rank: int) -> list[int]:
    """Each step in a stream that nobody had before, as a program that makes one in its training step. Their numbers."""
    made = []
    make = feature.on_device if feature.on_device is not None and device == DEVICE else feature.optimizer
    optimizer = make(model.parameters(), lr=0.1, foreach=False)
    for step in range(6):
        if device == "cpu":
            model(batch(step, rank, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        before, stream = torch.accelerator.current_stream(), torch.Stream(device)
        start = before.record_event()
        with stream:
            start.wait()
            model(batch(step, rank, 16).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            end = stream.record_event()
        end.wait()
        made.append(stream.stream_id)
    return made


@on_device_ranks(2)
@pytest.mark.parametrize("name", ["plain", *OFFLOADED])
def test_steps_in_fresh_streams(rank: int, world_size: int, name: str) -> None:
    """Right values, and the library makes no streams of its own after the first steps, each with memory of its own."""
    feature = FEATURES[name]
    model = sharded(feature, "cpu", world_size)
    steps_in_fresh_streams(model, feature, "cpu", rank)
    expected = [param.to_local().detach() for param in model.parameters()]
    for seed in range(5):  # a stream of this device is a thread, and lives as long as the process
        with late(seed):
            model = sharded(feature, DEVICE, world_size)
            made = steps_in_fresh_streams(model, feature, DEVICE, rank)
            assert_same([param.to_local().detach().cpu() for param in model.parameters()], expected)
        assert made[2:] == list(range(made[2], made[2] + 4))


class TwoStreams(nn.Module):
    """A unit whose weights are used on the current stream and on a stream of its own, so that the two gradients of each
    come from two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return self.layer(x) + self.layer(2 * x).tanh()
        ready = torch.accelerator.current_stream().record_event()
        with torch.Stream(x.device) as stream:
            ready.wait()
            other = self.layer(2 * x).tanh()
            done = stream.record_event()
        own = self.layer(x)
        done.wait()
        return own + other


@on_device_ranks(2)
@pytest.mark.parametrize("name", ["plain", "accumulation", *OFFLOADED])
def test_gradients_from_two_streams(rank: int, world_size: int, name: str) -> None:
    feature = FEATURES[name]

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(TwoStreams(), TwoStreams(), TwoStreams()).to(device)
        options = {**feature.options, "mesh": mesh_of(device, (world_size,), ("shard",))}
        if device == "cpu":
            options.pop("offload_policy", None)
        for block in model:
            fsdp2.fully_shard(block, **options)
        fsdp2.fully_shard(model, **options)
        return train(model, feature, device, rank)

    expected = trained("cpu")
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # it is so on purpose
    try:
        for seed in range(SEEDS):
            with late(seed):
                assert_same(trained(DEVICE), expected)
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


@on_device_ranks(2)
def test_activations_that_the_program_keeps(rank: int, world_size: int) -> None:
    """A reload does not write over an activation that somebody still holds, nor over what got its memory since."""

    def seen(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)
        fsdp2.offload_activations(layers, min_bytes=0)
        found = []
        for _ in range(2):
            kept = [torch.randn(32, 64).to(device)]
            for layer in layers:
                kept.append(layer(kept[-1]).tanh())
            others = [torch.full((32, 64), float(number), device=device) for number in range(4)]
            kept[-1].square().mean().backward()
            found += [*(each.detach() for each in kept), *others, *(param.grad for param in layers.parameters())]
        return [each.cpu() for each in found]

    expected = seen("cpu")
    for seed in range(SEEDS):
        with late(seed):
            assert_same(seen(DEVICE), expected)
