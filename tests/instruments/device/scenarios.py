"""What is done on the lagging device beside training: memory is counted, models are initialised, failures are reset.
Each takes (rank, world_size, seed) and asserts."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import fsdp2
from fsdp2 import CPUOffloadPolicy
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.parallel import ring_attention, shard_sequence, unshard_sequence
from tests.helpers.optional_models import POLICIES, VisionLanguage, shard, who_has_images
from tests.helpers.optional_models import inputs as images_of
from tests.helpers.parity_models import Block, Stack, batch, local
from tests.instruments.device import lagging
from tests.instruments.device.ranks import DEVICE, late
from tests.instruments.device.scenarios_of_activations import SCENARIOS_OF_ACTIVATIONS
from tests.instruments.device.scenarios_of_files import SCENARIOS_OF_FILES
from tests.instruments.device.scenarios_of_sleep import SCENARIOS_OF_SLEEP
from tests.instruments.device.steps import (
    ADAM,
    Scenario,
    as_on_cpu,
    assert_same,
    inputs,
    one_step,
    values,
)
from tests.instruments.device.training import ALL, FEATURES, Feature, mesh_of, sharded, train

__all__ = ["SCENARIOS", "SCENARIOS_ON_FOUR"]


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


def states_loaded(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """State that is loaded into a new optimizer, whose own rests in host memory, is that of its next step. (It was
    lost.)"""
    results = []
    for policy in (fsdp2.Offload(), fsdp2.Offload(grads=True), fsdp2.Offload(grads=True, params=True)):
        model = sharded(Feature({"offload_policy": policy}), device, world_size)
        make = fsdp2.local_optimizer if device == "cpu" else fsdp2.offload_optimizer
        first, second = (make(torch.optim.AdamW, model.parameters(), lr=0.1) for _ in range(2))
        one_step(model, first, inputs(rank, device)[0])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        one_step(model, second, inputs(rank, device)[1])
        results += values(model)
    return results


def failed(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A backward raises on all ranks, and after `reset_iter_state` the model trains."""

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    model = sharded(FEATURES["plain"], device, world_size)
    handle = model.blocks[1].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(batch(7, rank, 16).to(device)).square().mean().backward()
    handle.remove()
    model.reset_iter_state()
    return train(model, FEATURES["plain"], device, rank)


def bad_batch(rank: int, world_size: int, seed: int) -> None:
    """A batch fails on one rank, in the second step; training then gives what it gives without either."""
    expected = train(sharded(FEATURES["plain"], "cpu", world_size), FEATURES["plain"], "cpu", rank)
    with late(seed):
        model = sharded(FEATURES["plain"], DEVICE, world_size)
        for fails in (False, True):
            said = ""
            try:
                with fsdp2.agree_on_step(model):
                    loss = model(batch(7, rank, 16).to(DEVICE)).square().mean()
                    if fails and rank == seed % world_size:
                        raise ValueError("on purpose")
                    loss.backward()
            except fsdp2.StepError as error:
                said = str(error)
            assert said == (f"rank {seed % world_size}: ValueError: on purpose" if fails else "")
            model.zero_grad()
        actual = train(model, FEATURES["plain"], DEVICE, rank)
    assert_same(actual, expected)


def repeated(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A second backward of a graph begins to gather while compute is still within the last unit of the first one, whose
    memory it may not get."""
    model = sharded(FEATURES["two backwards of a graph"], device, world_size)
    if device == DEVICE:
        first = model.blocks[0]  # its backward runs last
        first.register_full_backward_pre_hook(lambda *_: lagging.occupy(0.03))
    loss = model(batch(0, rank, 16).to(device)).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
    return [param.grad.to_local().cpu() for param in model.parameters()]


def materialized(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Values of a model that was sharded on the meta device, from the same seed."""
    found = []
    for mode in ("sequential", "blocks"):
        with torch.device("meta"):
            model: Any = Stack(dim=16, hidden=19)
        mesh = mesh_of(device, (world_size,), ("shard",))
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh)
        fsdp2.fully_shard(model, mesh=mesh)
        fsdp2.init.materialize(model, seed=3, mode=mode)  # type: ignore[arg-type]
        found += values(model)
    return found


class Padded(nn.Module):
    """Initialised through slices, indices and plain operands."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 6)

    def reset(self) -> None:
        self.embed.reset_parameters()
        with torch.no_grad():
            self.out.weight.normal_().mul_(torch.linspace(0, 1, 8))
            self.out.weight.index_fill_(0, torch.tensor([1, 4]), 0.5)
            self.out.bias.zero_()[2:4] = 1.0


def materialized_offloaded(rank: int, world_size: int, seed: int) -> None:
    """Parameters rest on the host, whose group another backend may not have: only the rank of the padding row wrote
    into it, from the device, and failed; the others waited for it."""
    with torch.device("meta"):
        whole, model = Padded(), Padded()
    fsdp2.init.materialize(whole.to_empty(device="cpu"), lambda each: each.reset(), seed=3)
    fsdp2.fully_shard(model, mesh=mesh_of(DEVICE, (world_size,), ("shard",)), offload_policy=CPUOffloadPolicy())
    with late(seed):
        fsdp2.init.materialize(model, lambda each: each.reset(), seed=3)
        assert_same([param.to(DEVICE).full_tensor().cpu() for param in model.parameters()], [*whole.parameters()])


def gathered(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """`full_params` right after a step, and a change of a whole parameter."""
    model: Any = sharded(ADAM, device, world_size)
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(rank, device)[0])
    with fsdp2.full_params(model), torch.no_grad():
        whole = [param.detach().clone() for param in model.parameters()]
        model.inp.weight.mul_(2)
    return [*(each.cpu() for each in whole), *values(model)]


def context_parallel(rank: int, world_size: int, seed: int) -> None:
    """Ring attention, gathered, gives what attention of the whole sequence has, and its gradients. (In float64; the
    CPU's own kernel is another one, so that the last bits differ.)"""
    whole = [
        torch.randn(2, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(4)
    ]
    leaves = [each.clone().requires_grad_() for each in whole[:3]]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, whole[3])]
    host, mesh = (mesh_of(device, (world_size,), ("shard",)) for device in ("cpu", DEVICE))
    with late(seed):
        query, key, value, gradient = (shard_sequence(each, host, 2).to(DEVICE) for each in whole)
        parts = [each.requires_grad_() for each in (query, key, value)]
        output = ring_attention(*parts, mesh=mesh, is_causal=True)
        actual = [output.detach(), *torch.autograd.grad(output, parts, gradient)]
        for left, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(unshard_sequence(left, mesh, 2).cpu(), right)


def optional(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Units that some ranks do not run."""
    policy = [*POLICIES.values()][seed % len(POLICIES)]
    torch.manual_seed(0)
    model = shard(VisionLanguage().to(device), policy, mesh=mesh_of(device, (world_size,), ("shard",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    pairs = [images_of(step, rank, ranks) for step, ranks in enumerate(who_has_images(world_size))]
    for given in [[each if each is None else each.to(device) for each in pair] for pair in pairs]:
        model(*given).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [local(param).detach().cpu() for param in model.parameters()]


def pipelined(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """torch's pipeline of two stages, each sharded over two ranks; with activations in host memory, too."""
    mesh = mesh_of(device, (2, 2), ("pipeline", "shard"))
    index, column = mesh.get_local_rank("pipeline"), mesh.get_local_rank("shard")
    torch.manual_seed(0)
    module: Any = [nn.Sequential(Block(16, 11), Block(16, 11)) for _ in range(2)][index].to(device)
    for each in (*module, module):
        fsdp2.fully_shard(each, mesh=mesh["shard"])
    if device == DEVICE and seed % 2:
        fsdp2.offload_activations([*module], min_bytes=0)
    stage = PipelineStage(module, index, 2, torch.device(device), group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    for x in [torch.cat([batch(step, column, 16)] * 4).to(device) for step in range(2)]:
        schedule.step(target=x) if index else schedule.step(x)
        optimizer.step()
        optimizer.zero_grad()
    return values(module)


def other_optimizers(rank: int, world_size: int, seed: int) -> None:
    """They would keep on the device what should be in host memory: an error says which one does not."""
    for kind, way in (
        (torch.optim.AdamW, r"Create it with fsdp2\.offload_optimizer\(torch\.optim\.AdamW"),
        (torch.optim.Adafactor, "an elementwise optimizer of torch.optim, or CPUOffloadPolicy"),
    ):
        model = sharded(Feature({"offload_policy": fsdp2.Offload()}), DEVICE, world_size)
        with pytest.raises(ArgumentError, match=rf"{kind.__name__} would keep its state on .*{way}"):
            one_step(model, kind(model.parameters()), inputs(rank, DEVICE)[0])


def scaled(rank: int, world_size: int, seed: int) -> None:
    """torch's scaler reads its scale on the host too early, where gradients are there. (Training was wrong, and
    nothing said so.)"""
    for unscales in (False, True):
        model = sharded(Feature({"offload_policy": ALL}), DEVICE, world_size)
        optimizer = fsdp2.offload_optimizer(torch.optim.AdamW, model.parameters(), fused=True)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
        scaler.scale(model(inputs(rank, DEVICE)[0]).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(UnsupportedError, match="GradScaler cannot step this OffloadedAdamW: gradients are in host"):
            scaler.step(optimizer)
        torch.amp.GradScaler(DEVICE, enabled=False).step(optimizer)


class Forces(nn.Module):
    """An energy, whose gradient the rest of the forward works with."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.body(x).square().sum(), x, create_graph=True)
        return self.head(force)


def forces(device: str, rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A backward within a forward. Its end runs in a thread of the device, which does not see the forward among its own
    calls."""
    torch.manual_seed(0)
    model: Any = Forces().to(device)
    for unit in (model.body, model):
        fsdp2.fully_shard(unit, mesh=mesh_of(device, (world_size,), ("shard",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        one_step(model, optimizer, batch(step, rank).to(device))
    return values(model)


SCENARIOS: dict[str, Scenario] = {
    "two units": two_units,
    "states in host memory, loaded": as_on_cpu(states_loaded, 3000),  # later than the host, which copies a whole state
    "states in host memory, other optimizers": other_optimizers,
    "gradients in host memory, scaled": scaled,
    "failed": as_on_cpu(failed),
    "bad batch": bad_batch,
    "backward, repeated": as_on_cpu(repeated),
    "backward within a forward": as_on_cpu(forces),
    **SCENARIOS_OF_FILES,
    **SCENARIOS_OF_ACTIVATIONS,
    "materialized": as_on_cpu(materialized),
    "materialized, offloaded": materialized_offloaded,
    "gathered": as_on_cpu(gathered),
    "context parallel": context_parallel,
    "optional units": as_on_cpu(optional),
    **SCENARIOS_OF_SLEEP,
}
SCENARIOS_ON_FOUR = {"pipelined": as_on_cpu(pipelined)}
