"""What is trained on the lagging device and on the CPU: one small model, sharded with one feature at a time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, Offload, ZeroPolicy, comm
from fsdp2.comm.flat import NcclComm
from tests.helpers.extensions import InPieces
from tests.helpers.meshes import shared_mesh
from tests.helpers.parity_models import Stack, batch
from tests.instruments.device import lagging
from tests.instruments.device.ranks import DEVICE, late
from tests.instruments.races.nets import customise

__all__ = ["ALL", "FEATURES", "ON_FOUR", "Feature", "check", "differs", "expected_of", "mesh_of", "sharded", "train"]

BF16 = torch.bfloat16


class Coalesced(NcclComm):
    """What NCCL is given, for this device: weights on the direct lane, biases on the packed one."""

    direct_min_bytes = 256


@dataclass(frozen=True)
class Feature:
    """How a model is sharded and trained.

    Attributes:
        change: called with the model before it is sharded.
        prepare: called with the sharded model and the kind of device.
        replicas: of the shards, for HSDP.
        tensor: ranks that share a layer.
        coalesced: what NCCL is given, instead of one flat collective for all parameters of a unit.
        sync_each: whether each of the `backwards` of a step reduces.
        on_device: makes the optimizer on the device, where that is another than on the CPU.
        all_reduces_each: whether each of them sums over the replicas.
        of_one_graph: the backwards of a step are all of one forward.
        evaluates: between backward and step there is a forward without gradients, for which the host does not wait.
        zeroes: gradients are kept from step to step.
        finalizes: the program waits for the reductions itself, by a handle.
        aside: the first step of the optimizer runs on a stream of its own, which only the next forward waits for.
    """

    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], object] = lambda model: None
    prepare: Callable[[Any, str], object] = lambda model, device: None
    replicas: int = 1
    tensor: int = 1
    depth: int = 3
    reentrant: bool | None = None
    backwards: int = 1
    sync_each: bool = True
    all_reduces_each: bool = True
    of_one_graph: bool = False
    aside: bool = False
    scaled: bool = False
    coalesced: bool = False
    clips: bool = False
    evaluates: bool = False
    zeroes: bool = False
    finalizes: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    on_device: Callable[..., torch.optim.Optimizer] | None = None


def mixed(**more: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, **more)}


def halves(gradient: torch.Tensor) -> None:
    gradient.div_(2)


def side_stream(device: str) -> Any:
    """A stream of the program's own; None on the CPU. (The race detector has another.)"""
    return None if device == "cpu" else torch.Stream(device)


def record(device: str) -> Any:
    """An event of the current stream."""
    return torch.accelerator.current_stream().record_event()


def hooks_beside(model: Any, device: str) -> None:
    """An all-reduce hook on a stream of its own."""
    stream = side_stream(device)
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


def runs_again(model: Any, device: str) -> None:
    """The first block also comes last."""
    model.blocks.append(model.blocks[0])


def waits_in_backward(model: Any, device: str) -> None:
    """In backward the host waits before each block: the step of the block behind it has been given to the device, and
    could have freed its gradients, before the next reduction takes memory."""
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: time.sleep(0.005))


def freezes_weights(model: Any) -> None:
    """The weights of each block stay as they are; its biases are trained, in the same unit."""
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("weight"))


def tiles_layers(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fsdp2.tile(module, 3)


def in_background(
    policy: Offload, in_backward: bool = False, clips: bool = True, zeroes: bool = False, **more: Any
) -> Feature:
    """AdamW behind the next forward, or behind the rest of backward; the CPU steps as ever."""

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = fsdp2.offload_optimizer(torch.optim.AdamW, params, **options)
        if in_backward:
            fsdp2.step_in_backward(optimizer)
        return optimizer

    reference = partial(fsdp2.local_optimizer, torch.optim.AdamW)
    options = {"offload_policy": policy, **more}
    return Feature(options, clips=clips and not in_backward, zeroes=zeroes, optimizer=reference, on_device=make)


def stepped_in_backward(params: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = fsdp2.local_optimizer(torch.optim.AdamW, params, **options)
    fsdp2.step_in_backward(optimizer)
    return optimizer


def with_matrices(params: Any, lr: float, foreach: bool) -> torch.optim.Optimizer:
    """Muon for the matrices, on their owners."""
    held = list(params)
    groups = [
        {"params": [param for param in held if param.ndim == 2]},
        {"params": [param for param in held if param.ndim != 2], "kind": torch.optim.AdamW, "lr": lr},
    ]
    return fsdp2.optim.matrix_optimizer(torch.optim.Muon, groups, lr=lr)


ALL = Offload(grads=True, params=True)
FOLDER = lagging.BUILT.with_name("offloaded")  # files there have no names
ON_DISK = Offload(tier=FOLDER)
GRADS_ON_DISK = Offload(grads=True, tier=FOLDER)
ALL_ON_DISK = Offload(grads=True, params=True, tier=FOLDER)
IN_FILES = Offload(grads=True, params="files", tier=FOLDER)
FROZEN_ON_HOST = ZeroPolicy(keep_frozen="host")


def adapts_tiles(model: Any) -> None:
    """A frozen base in tiles, with trained biases."""
    freezes_weights(model)
    tiles_layers(model)


def in_pieces(model: Any) -> None:
    """Weights that say themselves what is gathered."""
    for block in model.blocks:
        block.up.weight = nn.Parameter(InPieces(block.up.weight.detach(), {}))


FEATURES = {
    "plain": Feature(),
    "coalesced": Feature(coalesced=True),
    "a block again": Feature(prepare=runs_again, depth=2),
    "stays unsharded": Feature({"reshard_after_forward": False}),
    "keeps storage": Feature(
        prepare=lambda model, device: model.set_keep_unsharded_storage(True),
        change=lambda model: model.blocks[0].requires_grad_(False),
    ),
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
    "offload, evaluated": Feature({"offload_policy": CPUOffloadPolicy()}, evaluates=True),
    "states in host memory": in_background(Offload()),
    "states in host memory, stepped in backward": replace(
        in_background(Offload(), in_backward=True), prepare=waits_in_backward, depth=4
    ),
    "states in host memory, zeroed": in_background(Offload(), clips=False, zeroes=True),
    "states and gradients in host memory": in_background(Offload(grads=True)),
    "states and gradients in host memory, mixed precision": in_background(Offload(grads=True), **mixed()),
    "states and gradients in host memory, accumulation without sync": replace(
        in_background(Offload(grads=True)), backwards=3, sync_each=False
    ),
    "states in host memory, scaled": replace(in_background(Offload(), clips=False), scaled=True),
    "all in host memory": in_background(ALL),
    "all in host memory, stage 2": replace(in_background(ALL, zero=ZeroPolicy(2)), backwards=2),
    "all in host memory, stays unsharded": in_background(ALL, reshard_after_forward=False),
    # Not clipped: the norm is summed up in another order where gradients are in two places.
    "half in host memory": in_background(Offload(grads=True, params=True, fraction=0.5), clips=False),
    "not overlapped": in_background(Offload(overlap=False)),
    "states on disk": in_background(ON_DISK),
    "states on disk, all else in host memory": in_background(ALL_ON_DISK),
    "states on disk, all else in host memory, stepped in backward": in_background(ALL_ON_DISK, in_backward=True),
    "states and parameters in files": in_background(IN_FILES),
    "stepped in backward": Feature(optimizer=stepped_in_backward),
    "whole matrices": Feature(optimizer=with_matrices),
    "stage 0": Feature({"zero": ZeroPolicy(0)}, backwards=2),
    "stage 2": Feature({"zero": ZeroPolicy(2)}, backwards=2),
    "frozen weights in host memory": Feature({"zero": FROZEN_ON_HOST}, change=freezes_weights),
    "frozen weights in host memory, mixed precision": Feature(
        {"zero": FROZEN_ON_HOST, **mixed()}, change=freezes_weights, backwards=2
    ),
    "frozen tiles in host memory": Feature({"zero": FROZEN_ON_HOST}, change=adapts_tiles, backwards=2, depth=1),
    "layers in tiles": Feature(change=tiles_layers, backwards=2),
    "prefetched": Feature(prepare=prefetches_two),
    "predicted": Feature(prepare=lambda model, device: model.set_auto_forward_prefetch()),
    "hook on a stream": Feature(prepare=hooks_beside),
    "two reductions": Feature(prepare=collects_twice),
    "reduced in 16 bits": Feature({"mp_policy": MixedPrecisionPolicy(BF16, BF16)}),
    "reduced in fp16": Feature({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}),
    "two backwards of a graph": Feature(backwards=2, of_one_graph=True),
    "optimizer on a stream": Feature(aside=True),
    "extension": Feature(change=in_pieces),
    "custom collectives": Feature(prepare=lambda model, device: customise(model)),
    "finalized": Feature(
        prepare=lambda model, device: model.set_manual_backward_finalization(True), finalizes=True, backwards=2
    ),
}

ON_FOUR = {
    "replicas": Feature(replicas=2),
    "replicas, mixed precision": Feature(mixed(), replicas=2),
    "replicas, reduced in 16 bits": Feature(
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)}, prepare=collects_twice, replicas=2
    ),
    "replicas, accumulation": Feature(replicas=2, backwards=3, all_reduces_each=False),
    "replicas, frozen weights in host memory": Feature({"zero": FROZEN_ON_HOST}, change=freezes_weights, replicas=2),
    "replicas, all in host memory": replace(in_background(ALL), replicas=2),
    # Of the output layer, the last of four ranks has nothing.
    "empty shards, states and parameters in files": in_background(IN_FILES),
    "smaller mesh": Feature({"reshard_after_forward": 2}),
    "secondary shards": Feature({"zero": ZeroPolicy(3, secondary_shard_size=2)}),
    "sharded replicas, mixed precision": Feature(
        {"zero": ZeroPolicy(3, shard_size=2, shard_replicas=True), **mixed()}, prepare=collects_twice
    ),
    "tensor parallel": Feature(tensor=2),
    "tensor parallel, states and gradients in host memory": replace(in_background(Offload(grads=True)), tensor=2),
}


def sharded(feature: Feature, device: str, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = 19 if feature.tensor == 1 else 20
    model = Stack(dim=16, hidden=hidden, depth=feature.depth, use_reentrant=feature.reentrant).to(device)
    feature.change(model)
    options = dict(feature.options)
    if options.get("zero") in (None, FROZEN_ON_HOST):
        options["mesh"] = mesh_for(feature, device, world_size)
    if device == "cpu" and "offload_policy" in options:
        is_all = isinstance(options["offload_policy"], CPUOffloadPolicy)
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False) if is_all else None
    for block in model.blocks:
        if feature.tensor > 1:
            tensor = mesh_of(device, (world_size // feature.tensor, feature.tensor), ("shard", "tensor"))["tensor"]
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fsdp2.fully_shard(block, **options)
    fsdp2.fully_shard(model, **options)
    feature.prepare(model, device)
    return model


def mesh_for(feature: Feature, device: str, world_size: int) -> DeviceMesh:
    if feature.tensor > 1:
        return mesh_of(device, (world_size // feature.tensor, feature.tensor), ("shard", "tensor"))["shard"]
    if feature.replicas > 1:
        return mesh_of(device, (feature.replicas, world_size // feature.replicas), ("replicate", "shard"))
    return mesh_of(device, (world_size,), ("shard",))


def mesh_of(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return shared_mesh(sizes, names, device)


def train(model: Any, feature: Feature, device: str, rank: int, steps: int = 3) -> list[torch.Tensor]:
    """Losses, and at the end the local parameters. The host waits for the device at the end only."""
    inputs = [
        [batch(10 * step + number, rank, 16).to(device) for number in range(feature.backwards)] for step in range(steps)
    ]
    make = feature.on_device if feature.on_device is not None and device == DEVICE else feature.optimizer
    optimizer = make(model.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, enabled=feature.scaled)
    results = []
    for step in range(steps):
        for number in range(feature.backwards):
            is_last = number == feature.backwards - 1
            model.set_is_last_backward(is_last)
            if not feature.sync_each:
                model.set_requires_gradient_sync(is_last)
            if not feature.all_reduces_each:
                model.set_requires_all_reduce(is_last)
            if number == 0 or not feature.of_one_graph:
                loss = model(inputs[step][number]).square().mean()
            scaler.scale(loss).backward(retain_graph=feature.of_one_graph)
            results.append(loss.detach())
        if feature.finalizes:
            handle = model.finalize_backward(async_op=True)
            inputs[step][0].square()  # while gradients are under way
            handle.wait()
        if feature.evaluates:
            with torch.no_grad():
                results.append(model(inputs[step][0]))
            model.reshard()
        if feature.clips:
            fsdp2.clip_grad_norm_(model.parameters(), max_norm=0.1)
        with aside(model, side_stream(device) if feature.aside and step == 0 else None, device):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not feature.zeroes)
    results += [param.to_local().detach() for param in model.parameters()]
    return [result.cpu() for result in results]


@contextmanager
def aside(model: Any, stream: Any, device: str) -> Iterator[None]:
    """The block's work is given to a stream of its own. The next forward waits for that, and nothing else does."""
    if stream is None:
        yield
        return
    ready = record(device)
    with stream:
        ready.wait()
        yield
        done = record(device)
    model.set_post_optim_event(done)


def expected_of(name: str, rank: int, world_size: int) -> list[torch.Tensor]:
    """What training with this feature gives on the CPU."""
    feature = FEATURES.get(name) or ON_FOUR[name]
    return train(sharded(feature, "cpu", world_size), feature, "cpu", rank)


def differs(name: str, rank: int, world_size: int, seed: int, expected: list[torch.Tensor]) -> str:
    """How training with this feature on the lagging device differs from `expected`; "" if in no bit."""
    feature = FEATURES.get(name) or ON_FOUR[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if feature.coalesced:
            monkeypatch.setitem(comm.COMMS, "laggingccl", Coalesced())
        with late(seed):
            actual = train(sharded(feature, DEVICE, world_size), feature, DEVICE, rank)
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        if not torch.equal(left, right):
            return f"seed {seed}, number {number}: {left} is not {right}"
    return ""


def check(name: str, rank: int, world_size: int, seeds: range) -> None:
    """Train with this feature on the CPU, and once for each seed on the lagging device.

    Raises:
        AssertionError: some loss or parameter differs in a bit.
    """
    expected = expected_of(name, rank, world_size)
    for seed in seeds:
        difference = differs(name, rank, world_size, seed, expected)
        assert not difference, difference
