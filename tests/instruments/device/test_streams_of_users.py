"""What programs do with streams of their own, and what broke offload in other libraries: bit for bit as on the CPU.

The issues are DeepSpeed 7898 (waiting on the default stream, not the current one), 8080 (gradients from several
streams), torchtitan 2581 (`current_stream()` within `with stream:`), and
prime-rl 3196 (fresh streams each step make the allocator grow).
"""

import pytest
import torch
from torch import nn

import fsdp2
from tests.helpers.parity_models import batch
from tests.instruments.device.ranks import DEVICE, SEEDS, late, on_device_ranks
from tests.instruments.device.steps import assert_same, one_step, values
from tests.instruments.device.training import FEATURES, mesh_of, sharded, train

NAMES = ["plain", "offload", "states in host memory", "all in host memory"]
FEW = range(SEEDS // 3)


@on_device_ranks(2)
@pytest.mark.parametrize("name", ["frozen weights in host memory", *NAMES])
def test_a_program_in_a_stream_of_its_own(rank: int, world_size: int, name: str) -> None:
    """The current stream is not the default one, neither where the model is sharded nor where it is trained."""
    feature = FEATURES[name]
    expected = train(sharded(feature, "cpu", world_size), feature, "cpu", rank)
    for seed in FEW:
        with late(seed), torch.Stream(DEVICE):
            assert_same(train(sharded(feature, DEVICE, world_size), feature, DEVICE, rank), expected)


def steps_in_fresh_streams(name: str, device: str, rank: int, world_size: int) -> tuple[list[torch.Tensor], list[int]]:
    """Each step in a stream that nobody had before, as a program that makes one in its training step. Parameters, and
    the numbers of streams."""
    feature, made = FEATURES[name], []
    model = sharded(feature, device, world_size)
    make = feature.on_device if feature.on_device is not None and device == DEVICE else feature.optimizer
    optimizer = make(model.parameters(), lr=0.1, foreach=False)
    for x in [batch(step, rank, 16) for step in range(6)]:
        if device == "cpu":
            one_step(model, optimizer, x)
            continue
        stream, start = torch.Stream(device), torch.accelerator.current_stream().record_event()
        with stream:
            start.wait()
            one_step(model, optimizer, x.to(device))
            end = stream.record_event()
        end.wait()
        made.append(stream.stream_id)
    return values(model), made


@on_device_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_steps_in_fresh_streams(rank: int, world_size: int, name: str) -> None:
    """Right values, and the library makes no streams of its own after the first steps, each with memory of its own."""
    expected, _ = steps_in_fresh_streams(name, "cpu", rank, world_size)
    for seed in range(5):  # a stream of this device is a thread, and lives as long as the process
        with late(seed):
            found, made = steps_in_fresh_streams(name, DEVICE, rank, world_size)
            assert_same(found, expected)
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
@pytest.mark.parametrize("name", ["accumulation", *NAMES])
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
        for seed in FEW:
            with late(seed):
                assert_same(trained(DEVICE), expected)
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
