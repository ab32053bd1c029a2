"""Clipping, loss scaling, compilation, logging, checkpoint wrappers around sharded modules (Behaviour 171-175)."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.parity_models import (
    Layers,
    Stack,
    assert_gradients,
    batch,
    count,
    full,
    local,
    mean_gradients,
    mesh_2d,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import TpLm, dp_tp, tokens, tp_shard


def step(model: nn.Module, rank: int) -> None:
    model(batch(0, rank)).square().sum().backward()


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [1, 2, 3, float("inf")])
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_clip_grad_norm(rank: int, world_size: int, norm_type: float, hsdp: bool) -> None:
    """Behaviour 171: torch's own function gives the global norm as a DTensor, and clips to it."""
    plain = Layers(3, dim=8)  # no rank without rows: torch's inf-norm cannot take empty shards
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    model: Any = shard_blocks(fsdp2, copy.deepcopy(plain), mesh=mesh)
    step(model, rank)
    for name, grad in mean_gradients(plain, world_size, step).items():
        plain.get_parameter(name).grad = grad
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    assert isinstance(norm, DTensor)
    assert_close(norm.full_tensor(), expected)
    assert_gradients(model, {name: param.grad for name, param in plain.named_parameters()})


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_grad_scaler(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 172: an inf in one shard makes all ranks skip the step and back off; the step after is taken."""
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    num_shards = world_size // 2 if hsdp else world_size
    model: Any = shard_blocks(fsdp2, Stack(depth=1), mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for poisoned in (True, False):
        before = [local(param.detach()).clone() for param in model.parameters()]
        optim.zero_grad()
        scaler.scale(model(batch(0, rank)).square().sum()).backward()
        if poisoned and rank % num_shards == num_shards - 1:  # the last shard, on every replica
            local(model.inp.weight.grad).fill_(float("inf"))
        scaler.step(optim)
        scaler.update()
        changed = [not torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True)]
        assert any(changed) == (not poisoned)
        assert scaler.get_scale() == 2.0


class ScaleFirst(nn.Module):
    """As CLIP: a scalar, which every rank has whole, before all that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(())), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@on_ranks(2, 4)
@pytest.mark.parametrize("unscales", [True, False], ids=["unscaled first", "step alone"])
def test_sharded_grad_scaler(rank: int, world_size: int, unscales: bool) -> None:
    """Behaviour 172: `GradScaler` asks the ranks over which the first gradient is sharded: none for a scalar, and not
    those of the tensor axis for what tensor parallelism leaves whole. torch's scaler for FSDP1 asks all."""
    if world_size == 2:
        model: Any = fsdp2.fully_shard(ScaleFirst())
        poisoned, given = model.linear.weight, batch(0, rank, 4)
    else:
        model = tp_shard(fsdp2, TpLm(), dp_tp())
        poisoned, given = model.blocks[0].up.weight, tokens(0, rank // 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for is_poisoned in (True, False):
        before = [local(param.detach()).clone() for param in model.parameters()]
        optim.zero_grad()
        scaler.scale(model(given).square().sum()).backward()
        if is_poisoned and rank == world_size - 1:
            local(poisoned.grad).fill_(float("inf"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of one element that is taken for a scalar
            if unscales:
                scaler.unscale_(optim)
            scaler.step(optim)
        scaler.update()
        changed = [not torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True)]
        assert any(changed) == (not is_poisoned)
        assert scaler.get_scale() == 2.0


@contextmanager
def compiler() -> Iterator[tuple[Any, list[torch.fx.GraphModule]]]:
    """A backend for `torch.compile` that runs graphs as they are, and the graphs that it got."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo reports what it does not trace
        torch.compiler.reset()
        try:
            yield backend, graphs
        finally:
            torch.compiler.reset()


@on_ranks(2)
@pytest.mark.parametrize("how", ["function", "method", "blocks", "blocks_before"])
def test_compile(rank: int, world_size: int, how: str) -> None:
    """Behaviour 173: a compiled sharded module, or compiled blocks in one, gives the eager gradients."""
    plain = Stack(depth=2)
    model: Any = copy.deepcopy(plain)
    with compiler() as (backend, graphs):
        if how == "blocks_before":
            for block in model.blocks:
                block.compile(backend=backend)
        compiled = shard_blocks(fsdp2, model)
        if how == "function":
            compiled = torch.compile(model, backend=backend)
        elif how == "method":
            model.compile(backend=backend)
        elif how == "blocks":
            for block in model.blocks:
                block.compile(backend=backend)
        for _ in range(2):
            model.zero_grad()
            step(compiled, rank)
            assert_gradients(model, mean_gradients(plain, world_size, step))
        assert graphs


@on_ranks(2)
def test_hooks_are_not_traced(rank: int, world_size: int) -> None:
    """Behaviour 173: no graph holds anything but the module's own computation."""
    model: Any = Stack(depth=1)
    with compiler() as (backend, graphs):
        shard_blocks(fsdp2, model)
        model.blocks[0].compile(backend=backend)
        step(model, rank)
        ops = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")}
    assert len(ops) == 4, f"expected the ops of norm, linear, tanh and add, got {ops}"


@on_ranks(2)
def test_log(rank: int, world_size: int) -> None:
    """Behaviour 174: at DEBUG level the logger "fsdp2" tells what happens, with the units' names."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("fsdp2"), Keep()
    model = shard_blocks(fsdp2, Layers(1))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        model(batch(0, rank, 4)).sum().backward()
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    for kind in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
        assert any(message.startswith(f"{kind} layers.0") for message in messages), kind
    assert any(message.startswith("root_pre_forward") for message in messages)
    assert any(message.startswith("root_post_backward") for message in messages)
    messages.clear()
    model(batch(0, rank, 4))
    assert messages == []


@on_ranks(2)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("how", ["composable", "wrapper", "reentrant_wrapper"])
def test_checkpoint_wrappers(rank: int, world_size: int, how: str, where: str) -> None:
    """Behaviour 175: checkpointing by wrapper or composably, in or around the sharded block: gradients and N
    gathers."""
    plain = Stack(depth=2)
    model: Any = copy.deepcopy(plain)
    for i, block in enumerate(model.blocks):
        if where == "outside":
            fully_shard(block, reshard_after_forward=True)
        if how == "composable":
            checkpoint(block)
        else:
            impl = CheckpointImpl.REENTRANT if how == "reentrant_wrapper" else CheckpointImpl.NO_REENTRANT
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)
        if where == "inside":
            fully_shard(model.blocks[i], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        model.zero_grad()
        loss = model(batch(0, rank)).square().sum()
        with events.record() as log:
            loss.backward()
        assert count(log, "all_gather", "reduce_scatter") == {"all_gather": 3, "reduce_scatter": 3}
        expected = mean_gradients(plain, world_size, step)
        assert {
            name.replace("_checkpoint_wrapped_module.", ""): None for name, _ in model.named_parameters()
        }.keys() == (expected.keys())
        for param, grad in zip(model.parameters(), expected.values(), strict=True):
            assert_close(full(param.grad), grad, rtol=1e-5, atol=1e-6)
