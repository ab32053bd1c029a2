"""`Monitor`: measure steps of a sharded model, and hand the numbers to writers. Layer: monitor.

Steps that are not written cost the events that the runtime reports, and no communication. A written one computes a norm
for each unit and does one small all-reduce for each, and two more.
"""

import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import events
from fsdp2.errors import ArgumentError
from fsdp2.monitor.writers import Writer
from fsdp2.optim.in_backward import is_stepping_in_backward
from fsdp2.optim.norms import norm_of
from fsdp2.runtime.root import units_below

__all__ = ["Monitor"]


class Monitor:
    """Measures a training loop, and writes every `every`-th step.

    Written are ``seconds`` (of a step, on the slowest rank, mean over the steps since the last one that was written),
    ``tokens_per_second`` if the number of tokens is given, ``exposed_seconds`` (of those: how long the host waited for
    communication, mean over ranks; not on an accelerator, whose host waits for nothing), ``memory_bytes`` (the most so
    far, on the rank with most: allocated on the accelerator, or resident in the process), ``grad_norm``, and
    ``grad_norm/UNIT`` for each unit, of the gradient that the optimizer gets, so after clipping (with
    `step_in_backward`, when backward steps the unit).

    Every rank makes one and calls `step` after each step. Collective in written steps: the norms, and what is compared
    over the ranks.

    Args:
        model: sharded.
        optimizer: its step is when gradients are complete.
        writers: of rank 0; on other ranks they may be left out, and are not called.
        every: steps between written ones.

    Raises:
        ArgumentError: nothing in `model` is sharded, or `every` is not 1 or more.

    Example::

        writers = [JsonLines("measured.jsonl"), TensorBoard("runs/first")] if dist.get_rank() == 0 else []
        with Monitor(model, optimizer, writers, every=10) as monitor:
            for step, batch in enumerate(batches, start=1):
                train(batch)  # forward, backward, optimizer.step
                monitor.step(step, tokens=batch.numel() * dist.get_world_size(), loss=loss.item())
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, writers: Sequence[Writer] = (), *, every: int = 1
    ) -> None:
        if every < 1:
            raise ArgumentError(f"every: expected a number of steps, 1 or more; got {every!r}")
        self._units = [unit for unit in units_below(model) if unit.groups]
        if not self._units:
            raise ArgumentError(f"Monitor: nothing in this {type(model).__name__} is sharded; call fully_shard first")
        self._device = self._units[0].device
        self._writers = writers if dist.get_rank() == 0 else ()
        self._every = every
        self._num_steps = 0
        self._tokens = 0
        self._exposed = 0.0
        self._norms: dict[str, torch.Tensor] = {}
        self._stepped: dict[str, torch.Tensor] = {}  # those of what backward has stepped already
        self._since = perf_counter()
        self._stack = ExitStack()
        self._log = self._stack.enter_context(events.record())
        handle = optimizer.register_step_pre_hook(lambda stepped, *_: self._measure_gradients(stepped))
        self._stack.callback(handle.remove)
        for writer in self._writers:
            self._stack.callback(writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the writers; measure no more."""
        self._stack.close()

    def _measure_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if (self._num_steps + 1) % self._every:
            return
        in_backward = is_stepping_in_backward(optimizer)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for unit in self._units:  # which have their names since the first forward
            params = [param.sharded for param in unit.params if not in_backward or id(param.sharded) in held]
            if not params:
                continue
            norm, _ = norm_of(params, [param.grad for param in params], 2.0, True)
            name = unit.fqn or "root"
            norm = norm.float().to(self._device)
            if name in self._stepped:  # what backward has stepped has no gradients any more
                norm = norm.hypot(self._stepped[name])
            if in_backward:
                self._stepped[name] = norm
            self._norms[name] = norm

    def step(self, step: int, tokens: int = 0, **values: float) -> Mapping[str, float]:
        """A step has ended. Every rank calls it.

        Args:
            step: its number, for the writers.
            tokens: those of the step on all ranks together.
            values: more to write.

        Returns:
            What was written; empty in other steps.
        """
        self._num_steps += 1
        self._tokens += tokens
        self._exposed += waited_in(self._log)
        self._log.clear()
        if self._num_steps % self._every:
            return {}
        written = {**values, **self._measured()}
        for writer in self._writers:
            writer.write(step, written)
        self._norms, self._stepped = {}, {}
        self._tokens, self._exposed, self._since = 0, 0.0, perf_counter()
        return written

    def _measured(self) -> dict[str, float]:
        norms: list[float] = (
            torch.stack([*self._norms.values()]).tolist() if self._norms else []
        )  # waits for the device
        passed = perf_counter() - self._since
        most = self._over_ranks([passed, float(_peak_bytes(self._device))], dist.ReduceOp.MAX)
        mean = self._over_ranks([self._exposed], dist.ReduceOp.SUM)[0] / dist.get_world_size()
        seconds = most[0] / self._every
        found: dict[str, float] = {"seconds": seconds, "memory_bytes": most[1]}
        if self._tokens:
            found["tokens_per_second"] = self._tokens / most[0]
        if self._device.type == "cpu":
            found["exposed_seconds"] = mean / self._every
        if norms:
            found["grad_norm"] = sum(norm**2 for norm in norms) ** 0.5
            found |= {f"grad_norm/{name}": norm for name, norm in zip(self._norms, norms, strict=True)}
        return found

    def _over_ranks(self, values: list[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op)
        result: list[float] = tensor.tolist()
        return result


def waited_in(log: Sequence[events.Event]) -> float:
    """Seconds between each ``..._wait`` and the ``..._done`` that follows it."""
    seconds, begin = 0.0, None
    for event in log:
        if event.kind.endswith("_wait"):
            begin = event.at
        elif event.kind.endswith("_done") and begin is not None:
            seconds, begin = seconds + event.at - begin, None
    return seconds


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
