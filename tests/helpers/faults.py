"""Training jobs in which a rank misbehaves, for `tests/core/errors/test_safety.py`."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import checkpoint, fully_shard

GOOD_STEPS = 3


@dataclass(frozen=True)
class Fault:
    """What rank `victim` does in step `GOOD_STEPS`.

    Attributes:
        what: see `Job.misbehave`, and "order", "skip", "micro".
        where: "forward", "backward", "reduction", "clip", "step" (before it), "optimizer" (within it), "between" (two
            steps), "save" (a checkpoint, which only jobs with this fault write).
        mesh: "fsdp", "hsdp", "tp".
        also: other ranks that do the same.
        first: in the first step instead, when no order is known yet.
        default: with the settings that hold if nobody sets any.
        device: where it trains.
    """

    what: str
    where: str = "forward"
    mesh: str = "fsdp"
    ranks: int = 2
    victim: int = 1
    also: tuple[int, ...] = ()
    first: bool = False
    default: bool = False
    device: str = "cpu"

    @property
    def name(self) -> str:
        when = "-first" * self.first + "-default" * self.default
        return f"{self.what}-{self.where}-{self.mesh}{self.ranks}-by{self.victim}{'all' * bool(self.also)}{when}"


class Left(Exception):
    """The rank has left the loop."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Three units of one size, which could be taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.order = [0, 1, 2]
        self.within: Callable[[str], None] = lambda where: None

    def forward(self, x: Tensor) -> Tensor:
        for number, index in enumerate(self.order):
            x = self.blocks[index](x)
            if number == 1:
                self.within("forward")
                if x.requires_grad:
                    x.register_hook(lambda grad: self.within("backward"))
        return x


def build(mesh_kind: str, ranks: int, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return sharded(Model().to(device), mesh_kind, ranks, device)


def sharded(model: Any, mesh_kind: str, ranks: int, device: str = "cpu") -> Any:
    """A model with `blocks` of `up` and `down`, sharded over a mesh that has these ranks."""
    if mesh_kind == "fsdp":
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    elif mesh_kind == "hsdp":
        mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        whole = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = whole["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Job:
    """A rank's training, and what becomes of it."""

    def __init__(self, rank: int, fault: Fault, folder: str):
        self.rank = rank
        self.fault = fault
        self.folder = Path(folder)
        self.model = build(fault.mesh, fault.ranks, fault.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_post_hook(lambda *_: self.at("optimizer"))
        self.model.within = self.at
        weight = self.model.blocks[1].up.weight
        weight.register_post_accumulate_grad_hook(lambda _: self.at("reduction"))
        self.num_steps = 0
        self.is_bad = False

    def at(self, where: str) -> None:
        if self.is_bad and where == self.fault.where:
            self.misbehave()

    def misbehave(self) -> None:
        (self.folder / "fault").write_text(f"{os.getpid()} {time.time()}")
        match self.fault.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("a bad batch")
            case "leave":
                while not (self.folder / "reported").exists():
                    time.sleep(0.05)  # elsewhere
                raise Left
            case "destroy":
                torch.distributed.destroy_process_group()
                time.sleep(3.0)  # elsewhere
                raise Left
            case "sleep":
                time.sleep(2.0)

    def step(self) -> None:
        bad = self.is_bad and self.fault.where == "forward"
        self.model.order = [1, 0, 2] if bad and self.fault.what == "order" else [0, 1, 2]
        if bad and self.fault.what == "skip":
            self.model.order = [0, 2]
        if bad and self.fault.what != "micro":
            (self.folder / "fault").write_text(f"{os.getpid()} {time.time()}")
        for number in range(3 if bad and self.fault.what == "micro" else 2):
            if number == 2:
                (self.folder / "fault").write_text(f"{os.getpid()} {time.time()}")
            torch.manual_seed(100 * self.num_steps + 10 * number + (self.rank if self.fault.mesh != "tp" else 0))
            self.model(torch.randn(4, 8).to(self.fault.device)).square().sum().backward()
        self.at("clip")
        float(fsdp2.clip_grad_norm_(self.model.parameters(), 1.0))  # as a loop that logs it
        self.at("step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        if self.fault.where == "save":
            extra = {"job": Saved(self)}
            checkpoint.save(self.folder / "run", model=self.model, extra=extra, step=self.num_steps, timeout_s=5.0)
        self.at("between")

    def values(self) -> list[Tensor]:
        return [param.to_local().cpu().clone() for param in self.model.parameters() if isinstance(param, DTensor)]


class Saved:
    """A part of a checkpoint."""

    def __init__(self, job: Job):
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        self.job.at("save")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Told(logging.Handler):
    """What the library logs."""

    def __init__(self, told: list[str], file: Path) -> None:
        super().__init__()
        self.told = told
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
        self.file.touch()
