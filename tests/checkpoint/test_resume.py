"""Killed and resumed is the same as never killed, to the last bit."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fsdp2.checkpoint as fc
from fsdp2 import MixedPrecisionPolicy, ZeroPolicy, fully_shard, local_optimizer
from tests.helpers.checkpoint_cases import BF16, DIM, VOCAB, bits, fill, mesh_of, state_of, tensors_of
from tests.helpers.parity_models import batch
from tests.helpers.ranks import run_on_ranks

# --- resume -----------------------------------------------------------------------------------------------------------


class Data:
    """Shuffled rows, each rank its own part: the order is that of a generator, the position is in the middle of it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator().manual_seed(rank)
        self.order: list[int] = []
        self.position = 0

    def next(self) -> Tensor:
        if self.position == len(self.order):
            self.order, self.position = torch.randperm(5, generator=self.generator).tolist(), 0
        self.position += 1
        return batch(self.order[self.position - 1], self.rank, DIM)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order, self.position = state_dict["order"], state_dict["position"]
        self.generator.set_state(state_dict["generator"])


class Average(nn.Module):
    """A buffer that every step changes, alike on all ranks: it damps what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return x * self.mean.to(x.dtype)


class Run:
    """A training run with everything that has a state: dropout, all three generators, a schedule, a loader."""

    def __init__(self, rank: int, world_size: int, kind: str) -> None:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        model = nn.Sequential(nn.Linear(DIM, 9), nn.Dropout(0.3), Average(), nn.Linear(9, VOCAB))
        for name, value in model.named_parameters():
            fill(name, value)
        options: dict[str, dict[str, Any]] = {
            "fsdp": {},
            "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
            "zero2": {"zero": ZeroPolicy(2)},
            "hsdp": {"mesh": mesh_of(2, world_size // 2)} if world_size > 1 else {},
        }
        fully_shard(model[0], **options[kind])
        self.model = fully_shard(model, **options[kind])
        params = [*self.model.parameters()]
        self.optimizer: Any = torch.optim.AdamW(params, lr=0.1, foreach=True)
        if kind == "bf16":
            self.optimizer = local_optimizer(torch.optim.AdamW, params, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.data = Data(rank, world_size)

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.data, "random": fc.RandomState()}

    def save(self, root: str, step: int, **options: Any) -> fc.SaveHandle:
        return fc.save(root, model=self.model, optimizer=self.optimizer, extra=self.extra, step=step, **options)

    def resume(self, root: str) -> int:
        newest = fc.latest(root)
        assert newest is not None
        step = fc.load(newest, model=self.model, optimizer=self.optimizer, extra=self.extra).step
        assert step is not None
        return step

    def train(self, num_steps: int) -> list[Any]:
        """Everything that can differ, of each step and of the end."""
        seen: list[Any] = []
        for _ in range(num_steps):
            rows = self.data.next() + random.random() + float(np.random.rand())
            loss = self.model(rows).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            seen += [float(loss.detach()), self.scheduler.get_last_lr()[0], self.data.order[self.data.position - 1]]
        seen += [bits(value).tolist() for _, value in tensors_of(self.model)]
        seen += [bits(value).tolist() for _, value in state_of(self.model, self.optimizer)]
        seen += [torch.rand(()).item(), random.random(), np.random.rand()]
        return seen


def train_on(rank: int, world_size: int, root: str, kind: str, options: dict[str, Any]) -> list[Any]:
    run = Run(rank, world_size, kind)
    run.train(3)
    handle = run.save(root, 3, **options)
    rest = run.train(6)
    handle.wait()
    return rest


def resume_and_train(rank: int, world_size: int, root: str, kind: str, spare: int) -> list[Any]:
    run = Run(rank, world_size, kind)
    run.train(spare)  # whatever happened before the load is forgotten
    assert run.resume(root) == 3
    return run.train(6)


CASES = [
    (2, "fsdp", {}),
    (2, "bf16", {"async_op": True}),
    (2, "zero2", {"consolidated": True, "async_op": True}),
    (4, "hsdp", {"async_op": True}),
    (1, "fsdp", {}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("world_size", "kind", "options"), CASES, ids=[f"{kind}-{size}" for size, kind, _ in CASES])
def test_resumed_is_as_never_killed(world_size: int, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, learning rates, order of the data, parameters, optimizer state, buffers and random numbers."""
    root = str(tmp_path)
    expected = run_on_ranks(train_on, world_size, root=root, kind=kind, options=options)
    for spare in (0, 2):
        resumed = run_on_ranks(resume_and_train, world_size, root=root, kind=kind, spare=spare)
        assert resumed == expected
