"""The models whose host cost is measured, and one rank's measurement of them."""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import common, fake

WIDTH = 16
PROFILED_STEPS = 20


class Units(nn.Module):
    """Units of tiny linear layers, `common.GPT`'s way: the units are its `blocks`."""

    def __init__(self, num_units: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]) for _ in range(num_units)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@dataclass(frozen=True)
class Case:
    """A model with units in `blocks`, and what it is fed."""

    description: str
    build: Callable[[], nn.Module]
    feed: Callable[[], torch.Tensor]


def _floats() -> torch.Tensor:
    return torch.randn(2, WIDTH)


def _tokens() -> torch.Tensor:
    return torch.randint(256, (1, 16))


CASES: dict[str, Case] = {
    "tiny": Case("64 units of 4 linear layers of 16 x 16, 8 parameters each", lambda: Units(64, 4), _floats),
    "wide": Case("1 unit of 100 linear layers of 16 x 16, 200 parameters", lambda: Units(1, 100), _floats),
    "gpt": Case("a GPT of 12 blocks of 12 parameters, width 64", lambda: common.GPT(256, 16, 64, 4, 12), _tokens),
}


def steps_of(model: str, variants: list[str], device: str = "cpu") -> dict[str, Callable[[], None]]:
    """Forward, backward and the gradients dropped, for each variant; no optimizer."""
    case, workload = CASES[model], common.Workload(device=device)
    torch.manual_seed(0)
    feed = case.feed().to(device)

    def step_of(name: str) -> Callable[[], None]:
        trained: Any = common.PEERS[name].wrap(case.build().to(device), workload)  # type: ignore[arg-type]
        params = list(trained.parameters())

        def step() -> None:
            trained(feed).sum().backward()
            for param in params:
                param.grad = None

        return step

    return {name: step_of(name) for name in variants}


def time_steps(model: str, variants: list[str], rounds: int, warmup: int, device: str) -> dict[str, Any]:
    """Wall and processor seconds of every step in every round, in an order drawn anew each round; and of the
    collectives of each variant alone. On an accelerator: until the step has been issued."""
    steps = steps_of(model, variants, device)
    for _ in range(warmup):
        for step in steps.values():
            step()
    alone = {f"{name}, collectives alone": fake.collectives_of(steps[name]) for name in variants if name != "none"}
    steps |= alone
    clocks = {"thread_seconds": time.thread_time, "seconds": time.perf_counter, "cpu_seconds": time.process_time}
    found: dict[str, Any] = {clock: {name: [] for name in steps} for clock in clocks}
    for step in steps.values():
        step()  # after recording
    order, shuffle = list(steps), random.Random(0).shuffle
    gc.collect()
    gc.freeze()  # a step pays for collecting what it leaves behind itself, not for walking over the other models
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            gc.collect()
            common.synchronize(device)
            before = {clock: read() for clock, read in clocks.items()}
            steps[name]()
            for clock, read in clocks.items():
                found[clock][name].append(read() - before[clock])
    return found


def profile(model: str, variant: str, warmup: int, device: str) -> str:
    """Python's functions of one variant by their own and by cumulative time."""
    step = steps_of(model, [variant], device)[variant]
    for _ in range(warmup):
        step()
    python = cProfile.Profile()
    python.enable()
    for _ in range(PROFILED_STEPS):
        step()
    python.disable()
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(python, stream=text).strip_dirs().sort_stats(order).print_stats(45)
    return f"{PROFILED_STEPS} steps\n{text.getvalue()}"
