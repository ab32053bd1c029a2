"""`torch.compile` of sharded modules, with torch's own backends (Behaviour 173). Ahead-of-time autograd decides what
is saved for backward, and the code is generated anew."""

import warnings
from collections.abc import Iterator
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
from tests.helpers.parity_models import Block, Race, Stack, batch, one_batch, shard_blocks
from tests.helpers.ranks import on_ranks


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


def race(rank: int, world_size: int, how: Any = compile_blocks, raf: bool | None = None, **more: Any) -> Any:
    """Three steps against one process, which runs eagerly; what has counted the graphs."""
    options = {"build": partial(Stack, depth=2), **more}
    with counting(options.pop("backend", "aot_eager")) as counted:

        def shard(api: Any, model: Any) -> None:
            shard_blocks(api, model, reshard_after_forward=raf)
            how(model, counted)

        Race(rank, world_size, shard=shard, torch=False, **options).run(3)
        assert counted.frame_count > 0
        return counted


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("how", [compile_blocks, compile_model])
def test_training(rank: int, world_size: int, how: Any, raf: bool) -> None:
    """Behaviour 173: as in one process; nothing is compiled again after the first step."""
    counted: list[Any] = []
    frames: list[int] = []

    def compiled(model: Any, backend: Any) -> None:
        counted.append(backend)
        how(model, backend)

    def backward(model: Any, step: int, rank: int) -> Tensor:
        loss = one_batch(model, step, rank)
        frames.append(counted[0].frame_count)
        return loss

    race(rank, world_size, compiled, raf, backward=backward)
    assert frames[0] > 0 and frames[0] == frames[-1], f"compiled graphs after each backward: {frames}"


class Inside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed_inside() -> Stack:
    model = Stack(depth=2)
    model.blocks = nn.ModuleList(Inside(8, 11) for _ in range(2))
    return model


CHECKPOINTED = {
    "inside": checkpointed_inside,
    "non_reentrant": partial(Stack, depth=2, use_reentrant=False),
    "reentrant": partial(Stack, depth=2, use_reentrant=True),
}


@on_ranks(2)
@pytest.mark.parametrize("where", CHECKPOINTED)
def test_checkpointed_blocks(rank: int, world_size: int, where: str) -> None:
    """Behaviour 173, 175: a checkpoint within what is compiled, or around it."""
    race(rank, world_size, raf=True, build=CHECKPOINTED[where])


@on_ranks(2)
def test_dynamic_shapes(rank: int, world_size: int) -> None:
    """Behaviour 173: ranks with batches of other sizes compile at different times, and need not agree."""

    def backward(model: nn.Module, step: int, rank: int) -> Tensor:
        rows = (3, 5, 9)[step]
        loss = model(batch(rows, rank).repeat(rank * rows + 1, 1)).square().mean()
        loss.backward()
        return loss.detach()

    race(rank, world_size, backward=backward)


@pytest.mark.exhaustive  # it compiles C++; the others run what dynamo and autograd make of a model
@on_ranks(2, timeout_s=150)
def test_inductor(rank: int, world_size: int) -> None:
    """Behaviour 173: the default backend; generated code reads the unsharded parameters' memory."""
    with torch._inductor.config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        assert race(rank, world_size, raf=True, backend="inductor").frame_count == 1


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
