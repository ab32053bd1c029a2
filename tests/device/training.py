"""What is trained on the lagging device and on the CPU: one small model, sharded with one feature at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, Offload, ZeroPolicy, comm
from fsdp2.comm.nccl import NcclComm
from tests.device.ranks import DEVICE, late
from tests.helpers.meshes import shared_mesh
from tests.helpers.parity_models import Stack, batch

__all__ = ["FEATURES", "Feature", "check", "sharded", "train"]

BF16 = torch.bfloat16


class Coalesced(NcclComm):
    """What NCCL is given, for this device: weights on the direct lane, biases on the packed one."""

    direct_min_bytes = 256


@dataclass(frozen=True)
class Feature:
    """How a model is sharded and trained.

    Attributes:
        prepare: called with the sharded model and the kind of device.
        coalesced: what NCCL is given, instead of one flat collective for all parameters of a unit.
        sync_each: whether each of the `backwards` of a step reduces.
        on_device: makes the optimizer on the device, where that is another than on the CPU.
    """

    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any, str], object] = lambda model, device: None
    depth: int = 3
    reentrant: bool | None = None
    backwards: int = 1
    sync_each: bool = True
    coalesced: bool = False
    clips: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    on_device: Callable[..., torch.optim.Optimizer] | None = None


def mixed(**more: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, **more)}


def halves(gradient: torch.Tensor) -> None:
    gradient.div_(2)


def hooks_beside(model: Any, device: str) -> None:
    """An all-reduce hook on a stream of its own."""
    stream = None if device == "cpu" else torch.Stream(device)
    for unit in [*model.blocks, model]:
        unit.set_all_reduce_hook(halves, stream=stream)


def collects_twice(model: Any, device: str) -> None:
    """Two reductions in flight, in their own process group."""
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group(True)


def prefetches_two(model: Any, device: str) -> None:
    """Each block gathers the next two in forward, and the two before it in backward."""
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])


def in_background(policy: Offload, in_backward: bool = False, clips: bool = True, **more: Any) -> Feature:
    """AdamW behind the next forward, or behind the rest of backward; the CPU steps as ever."""

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = fsdp2.offload_optimizer(torch.optim.AdamW, params, **options)
        if in_backward:
            fsdp2.step_in_backward(optimizer)
        return optimizer

    reference = partial(fsdp2.local_optimizer, torch.optim.AdamW)
    options = {"offload_policy": policy, **more}
    return Feature(options, clips=clips and not in_backward, optimizer=reference, on_device=make)


ALL = Offload(grads=True, params=True)
FEATURES = {
    "plain": Feature(),
    "coalesced": Feature(coalesced=True),
    "stays unsharded": Feature({"reshard_after_forward": False}),
    "keeps storage": Feature(prepare=lambda model, device: model.set_keep_unsharded_storage(True)),
    "mixed precision": Feature(mixed()),
    "mixed precision, coalesced": Feature(mixed(), coalesced=True),
    "16 bits on the wire": Feature(mixed(reduce_scatter_dtype=BF16)),
    "int8 gather": Feature({"mp_policy": MixedPrecisionPolicy(all_gather_dtype=torch.int8)}),
    "accumulation": Feature(backwards=3),
    "accumulation without sync": Feature(backwards=3, sync_each=False),
    "checkpointed": Feature(reentrant=False),
    "checkpointed, reentrant": Feature(reentrant=True),
    "clipped AdamW": Feature(clips=True, optimizer=torch.optim.AdamW),
    "offload": Feature({"offload_policy": CPUOffloadPolicy()}),
    "offload, mixed precision": Feature({"offload_policy": CPUOffloadPolicy(), **mixed()}),
    "states in host memory": in_background(Offload()),
    "states in host memory, stepped in backward": in_background(Offload(), in_backward=True),
    "states in host memory, in part": in_background(Offload(fraction=0.5)),
    "states in host memory, mixed precision": in_background(Offload(), **mixed()),
    "states and gradients in host memory": in_background(Offload(grads=True)),
    "states and gradients in host memory, stepped in backward": in_background(Offload(grads=True), in_backward=True),
    "states and gradients in host memory, mixed precision": in_background(Offload(grads=True), **mixed()),
    "all in host memory": in_background(ALL),
    "all in host memory, stays unsharded": in_background(ALL, reshard_after_forward=False),
    # Not clipped: the norm is summed up in another order where gradients are in two places.
    "half in host memory": in_background(Offload(grads=True, params=True, fraction=0.5), clips=False),
    "not overlapped": in_background(Offload(overlap=False)),
    "stage 1": Feature({"zero": ZeroPolicy(1)}, backwards=2),
    "stage 2": Feature({"zero": ZeroPolicy(2)}, backwards=2),
    "prefetched": Feature(prepare=prefetches_two),
    "predicted": Feature(prepare=lambda model, device: model.set_auto_forward_prefetch()),
    "hook on a stream": Feature(prepare=hooks_beside),
    "two reductions": Feature(prepare=collects_twice),
}


def sharded(feature: Feature, device: str, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(dim=16, hidden=19, depth=feature.depth, use_reentrant=feature.reentrant).to(device)
    options = dict(feature.options)
    if "zero" not in options:
        options["mesh"] = mesh_of(device, (world_size,), ("shard",))
    if device == "cpu" and "offload_policy" in options:
        is_all = isinstance(options["offload_policy"], CPUOffloadPolicy)
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False) if is_all else None
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    fsdp2.fully_shard(model, **options)
    feature.prepare(model, device)
    return model


def mesh_of(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return shared_mesh(sizes, names, device)


def train(model: Any, feature: Feature, device: str, rank: int, steps: int = 3) -> list[torch.Tensor]:
    """Losses, and at the end the local parameters."""
    make = feature.on_device if feature.on_device is not None and device == DEVICE else feature.optimizer
    optimizer = make(model.parameters(), lr=0.1, foreach=False)
    results = []
    for step in range(steps):
        for number in range(feature.backwards):
            model.set_is_last_backward(number == feature.backwards - 1)
            if not feature.sync_each:
                model.set_requires_gradient_sync(number == feature.backwards - 1)
            x = batch(10 * step + number, rank, 16).to(device)
            loss = model(x).square().mean()
            loss.backward()
            results.append(loss.detach())
        if feature.clips:
            fsdp2.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    results += [param.to_local().detach() for param in model.parameters()]
    return [result.cpu() for result in results]


def check(name: str, rank: int, world_size: int, seeds: range) -> None:
    """Train with this feature on the CPU, and once for each seed on the lagging device.

    Raises:
        AssertionError: some loss or parameter differs in a bit.
    """
    feature = FEATURES[name]
    expected = train(sharded(feature, "cpu", world_size), feature, "cpu", rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if feature.coalesced:
            monkeypatch.setitem(comm.COMMS, "laggingccl", Coalesced())
        for seed in seeds:
            with late(seed):
                actual = train(sharded(feature, DEVICE, world_size), feature, DEVICE, rank)
            for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
                assert torch.equal(left, right), f"seed {seed}, number {number}: {left} is not {right}"
