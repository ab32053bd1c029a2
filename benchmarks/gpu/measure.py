"""What is measured of a trainer: time by the device's clock, memory by its allocator, gaps of kernels by kineto."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import synchronize

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, SXM
COMMUNICATION = ("nccl", "spin_kernel")  # in the names of kernels; all that is on their streams is communication

Interval = tuple[float, float]


def peak_flops(device: torch.device) -> float | None:
    """What the device promises in bf16, where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for model, flops in PEAK_FLOPS.items() if model in name), None)


class Clock:
    """Marks on the current stream; `seconds` waits for the device once, at the end."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now, on the stream."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between neighbouring marks."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._cuda:
            return [after - before for before, after in pairs]
        synchronize("cuda")
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


@dataclass(frozen=True)
class Times:
    """Seconds, of each step: forward and backward, and the optimizer's share."""

    forward_backward: list[float]
    optimizer: list[float]

    @property
    def steps(self) -> list[float]:
        """Both."""
        return [one + other for one, other in zip(self.forward_backward, self.optimizer, strict=True)]


def time_steps(trainer: Any, steps: int, device: torch.device) -> Times:
    """The steps are issued without waiting, as in training."""
    clock = Clock(device)
    clock.mark()
    for _ in range(steps):
        trainer.forward_backward()
        clock.mark()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        clock.mark()
    seconds = clock.seconds()
    return Times(seconds[0::2], seconds[1::2])


def memory_of(step: Callable[[], None], device: torch.device, steps: int = 3) -> dict[str, int] | None:
    """Bytes, over some steps: the peaks, what is held between steps, and how often the allocator had to give memory
    back to find some. None on the CPU."""
    if device.type != "cuda":
        for _ in range(steps):
            step()
        return None
    synchronize("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    between = []
    for _ in range(steps):
        step()
        between.append(torch.cuda.memory_allocated(device))
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "between_steps": between[-1],
        "grew_by": between[-1] - between[0],
        "num_alloc_retries": stats["num_alloc_retries"] - before,
    }


# --- the timeline of the device ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """Seconds a step, of the device.

    Attributes:
        compute: at least one kernel that is not communication runs.
        idle: none does, between the first and the last.
        communication: some communication runs.
        exposed: it runs, and no compute does.
        kernels: of compute, a step.
    """

    compute: float
    idle: float
    communication: float
    exposed: float
    kernels: float


def timeline_of(step: Callable[[], None], device: torch.device, steps: int = 2) -> Timeline | None:
    """By the profiler, which slows the host down: only the device's own times are used. None on the CPU."""
    if device.type != "cuda":
        step()
        return None
    from torch.profiler import ProfilerActivity, profile

    synchronize("cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        synchronize("cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return timeline(trace["traceEvents"], steps)


def timeline(events: Iterable[Mapping[str, Any]], steps: int) -> Timeline | None:
    """From the events of a chrome trace, in which times are in microseconds. None without kernels."""
    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    streams = {_stream(event) for event in on_device if any(part in str(event["name"]) for part in COMMUNICATION)}
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in on_device:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        (communication if _stream(event) in streams else compute).append((start, end))
    if not compute:
        return None
    busy, talk = union(compute), union(communication)
    scale = 1e-6 / steps
    hidden = overlap(busy, talk)
    return Timeline(
        compute=length(busy) * scale,
        idle=(busy[-1][1] - busy[0][0] - length(busy)) * scale,
        communication=length(talk) * scale,
        exposed=(length(talk) - hidden) * scale,
        kernels=len(compute) / steps,
    )


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Of intervals that may overlap: the same times, in order, apart."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def overlap(one: list[Interval], other: list[Interval]) -> float:
    """How long both last; each in order and apart."""
    total, index = 0.0, 0
    for start, end in one:
        while index < len(other) and other[index][1] <= start:
            index += 1
        at = index
        while at < len(other) and other[at][0] < end:
            total += min(end, other[at][1]) - max(start, other[at][0])
            at += 1
    return total


def as_dict(value: Timeline | None) -> dict[str, float] | None:
    """For JSON."""
    return None if value is None else asdict(value)
