"""`torch.compile` of sharded modules, with torch's own backends (Behaviour 173). Ahead-of-time autograd decides what
is saved for backward, and the code is generated anew."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.errors import UnsupportedError
from tests.helpers.parity_models import (
    Block,
    Race,
    Stack,
    assert_gradients,
    batch,
    mean_gradients,
    one_batch,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import ROOT


@contextmanager
def counting(backend: str = "aot_eager") -> Iterator[CompileCounterWithBackend]:
    """A backend that counts the graphs it compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo reports what it does not trace
        torch.compiler.reset()
        try:
            yield CompileCounterWithBackend(backend)
        finally:
            torch.compiler.reset()


def compile_blocks(model: Any, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def compile_model(model: Any, backend: Any) -> None:
    model.compile(backend=backend)


HOW: dict[str, Callable[[Any, Any], None]] = {"blocks": compile_blocks, "model": compile_model}


def race(rank: int, world_size: int, shard: Callable[[Any, Any], Any], **more: Any) -> Any:
    """Three steps against one process, which runs eagerly."""
    build = more.pop("build", partial(Stack, depth=2))
    return Race(rank, world_size, build, shard, torch=False, **more).run(3)


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_training(rank: int, world_size: int, how: str, raf: bool) -> None:
    """Behaviour 173: compiled blocks, or the compiled model, train as one process does; nothing is compiled again after
    the first step, although the module holds other parameters between steps than within one."""
    with counting() as backend:
        counts: list[int] = []

        def backward(model: Any, step: int, rank: int) -> Tensor:
            loss = one_batch(model, step, rank)
            counts.append(backend.frame_count)
            return loss

        def shard(api: Any, model: Any) -> None:
            shard_blocks(api, model, reshard_after_forward=raf)
            HOW[how](model, backend)

        race(rank, world_size, shard, backward=backward)
        assert counts[0] > 0
        assert counts[0] == counts[-1], f"compiled graphs after each backward: {counts}"


@on_ranks(2)
def test_blocks_share_a_graph(rank: int, world_size: int) -> None:
    """Behaviour 173: blocks of one class are compiled once, whatever unit they are."""
    with counting() as backend:
        model: Any = Stack(depth=3)
        shard_blocks(fsdp2, model)
        compile_blocks(model, backend)
        one_batch(model, 0, rank)
        assert backend.frame_count == 1


class Checkpointed(Stack):
    """Dropout and a block in each checkpoint."""

    def __init__(self, use_reentrant: bool, where: str) -> None:
        super().__init__(depth=2)
        self.checkpoint = partial(checkpoint, use_reentrant=use_reentrant)
        if where == "inside":
            self.blocks = nn.ModuleList(Inside(self.checkpoint) for _ in range(2))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.where == "outside" else block(x)
        return self.out(x)


class Inside(Block):
    def __init__(self, run: Any) -> None:
        super().__init__(8, 11)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(super().forward, x)


@on_ranks(2)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointed_blocks(rank: int, world_size: int, use_reentrant: bool, where: str) -> None:
    """Behaviour 173, 175: a checkpoint within what is compiled, or around it."""
    with counting() as backend:

        def shard(api: Any, model: Any) -> None:
            shard_blocks(api, model, reshard_after_forward=True)
            compile_blocks(model, backend)

        race(rank, world_size, shard, build=lambda: Checkpointed(use_reentrant, where))
        assert backend.frame_count > 0


@on_ranks(2)
def test_accumulation(rank: int, world_size: int) -> None:
    """Behaviour 95, 173: compiled backward passes without sync leave their gradients for the last."""

    def backward(model: Any, step: int, rank: int) -> Tensor:
        losses = []
        for microbatch in range(3):
            if isinstance(model, fsdp2.FSDPModule):
                model.set_requires_gradient_sync(microbatch == 2)
            losses.append(one_batch(model, 3 * step + microbatch, rank))
        return torch.stack(losses).sum()

    with counting() as compiled:

        def shard(api: Any, model: Any) -> None:
            shard_blocks(api, model)
            compile_blocks(model, compiled)

        race(rank, world_size, shard, backward=backward)


@on_ranks(2)
def test_dynamic_shapes(rank: int, world_size: int) -> None:
    """Behaviour 173: batches of other sizes, other on each rank: ranks compile at different times and need not
    agree."""
    plain = Stack(depth=2)
    model: Any = copy.deepcopy(plain)
    with counting() as backend:
        shard_blocks(fsdp2, model)
        compile_blocks(model, backend)
        for rows in (3, 5, 9):

            def backward(each: nn.Module, peer: int, rows: int = rows) -> Tensor:
                loss = each(batch(rows, peer).repeat(peer * rows + 1, 1)).square().mean()
                loss.backward()
                return loss

            model.zero_grad()
            backward(model, rank)
            assert_gradients(model, mean_gradients(plain, world_size, backward))


@pytest.mark.exhaustive  # it compiles C++; the others run what dynamo and autograd make of a model
@on_ranks(2, timeout_s=150)
def test_inductor(rank: int, world_size: int) -> None:
    """Behaviour 173: the default backend; generated code reads the unsharded parameters' memory."""
    config = torch._inductor.config
    with config.patch(compile_threads=1, cpp_cache_precompile_headers=False), counting("inductor") as backend:

        def shard(api: Any, model: Any) -> None:
            shard_blocks(api, model, reshard_after_forward=True)
            compile_blocks(model, backend)

        race(rank, world_size, shard)
        assert backend.frame_count == 1


@on_ranks(2)
def test_compiled_autograd(rank: int, world_size: int) -> None:
    """It never calls back at the end of backward. torch's FSDP2 (2.13) then leaves gradients unreduced, silently."""
    model: Any = shard_blocks(fsdp2, Stack(depth=2))

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    compiled, refused = torch.compile(step, backend="eager"), pytest.raises(UnsupportedError, match="compiled autograd")
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings(action="ignore"), refused:
        compiled(batch(0, rank))
    model.reset_iter_state()
    step(batch(0, rank))
    assert all(param.grad is not None for param in model.parameters())


COUNTS = """
import json, sys, torch
from torch import nn, optim
from torch._dynamo.utils import counters

if sys.argv[1] == "with":
    import fsdp2
kinds = [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.AdamW, {}), (optim.Adam, {"foreach": True}),
         (optim.Adam, {"foreach": False}), (optim.AdamW, {"fused": True})]
for kind, options in kinds:
    torch.compiler.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(model.parameters(), **options)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        step()
        optimizer.zero_grad()
    print(counters["frames"]["total"], sum(counters["graph_break"].values()), counters["stats"].get("unique_graphs"))
"""


@pytest.mark.exhaustive
def test_the_import_changes_no_compiled_step() -> None:
    """A program that imports fsdp2 and shards nothing: its optimizers' compiled steps have the same frames, graphs and
    graph breaks as without. (Hooks on all optimizers, installed by the import, made 57 frames of 14.)"""
    jobs = [
        subprocess.Popen([sys.executable, "-c", COUNTS, which], cwd=ROOT, stdout=subprocess.PIPE)
        for which in ("with", "without")
    ]
    found, expected = (job.communicate()[0].decode() for job in jobs)
    assert found == expected and len(found.splitlines()) == 5
