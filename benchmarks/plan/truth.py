"""What really happens in a later step: the same workload on real ranks, with bytes counted and events recorded."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.memory.tracking import Kind, Moment, Tracker, timeline
from benchmarks.plan.cases import Case
from fsdp2 import events
from fsdp2.optim.background import submit
from fsdp2.optim.pending import PendingTensor
from fsdp2.parallel import parallelize

# A thread of gloo may hold what a collective used for a moment after the wait for it has returned. So of some steps the
# one with the least memory counts.
_STEPS = 3


class Counter(Tracker):
    """The tracker of `benchmarks/memory`; counts messages, too, and sees the thread of `offload_optimizer`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __enter__(self) -> Counter:
        super().__enter__()
        submit(super().__enter__, None).result()  # modes are a thread's own
        return self

    def __exit__(self, *error: Any) -> None:
        submit(lambda: super(Counter, self).__exit__(*error), None).result()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types or PendingTensor in types:
            return NotImplemented  # it becomes operators of local tensors, which come here too
        name = function.__name__.partition(".")[0]
        if function.namespace == "c10d" and name == "send":
            self.sent += sum(tensor.nbytes for tensor in args[0])
        return super().__torch_dispatch__(function, types, args, kwargs)

    def forget_aliases(self) -> None:
        """Shards that stand together have a storage each, on the memory of another one (`carving.py`). It counts
        once."""
        alive = [(storage, holding) for ref, holding in self._alive.values() if (storage := ref()) is not None]
        spans = [(each.data_ptr(), -each.nbytes(), holding) for each, holding in alive if each.nbytes()]
        end, aliases = 0, set()
        for address, negative, holding in sorted(spans, key=lambda span: span[:2]):
            if address - negative <= end:
                aliases.add(id(holding))
            end = max(end, address - negative)
        self.holdings = [holding for holding in self.holdings if id(holding) not in aliases]


@dataclass(frozen=True)
class Truth:
    """One rank's step.

    Attributes:
        events: the collectives, in order.
        sent: bytes in messages (without those of DTensor).
        peak: largest sum of bytes at any time.
        peaks: of each kind.
    """

    events: list[events.Event]
    sent: int
    peak: int
    peaks: dict[str, int]


def measure(case: Case) -> Truth:
    """Run the case; every rank calls it."""
    with Counter() as tracker, events.record() as log:
        torch.manual_seed(0)
        model = case.workload.build()
        parallelize(model, case.config, **case.options)
        tracker.follow(model)
        for param in model.parameters():
            tracker.mark(param, Kind.SHARD)
        optimizer = case.workload.optimizer(param for param in model.parameters() if param.requires_grad)
        batches = [case.workload.batch(case.workload.batch_size) for _ in range(case.workload.microbatches)]
        step(case, model, optimizer, batches)
        gc.collect()
        torch.zeros(())  # an operator, so that this moment is noted
        tracker.forget_aliases()
        found = []
        for _ in range(_STEPS):
            since, first, tracker.sent = tracker.now, len(log), 0
            step(case, model, optimizer, batches)
            moments = timeline(tracker, since, tracker.now)
            collectives = [event for event in log[first:] if event.group_size]
            peaks = {kind.name.lower(): max(moment.nbytes[kind] for moment in moments) for kind in Kind}
            found.append(Truth(collectives, tracker.sent, _peak(moments), peaks))
    return min(found, key=lambda truth: truth.peak)


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        case.workload.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _peak(moments: list[Moment]) -> int:
    return max(sum(moment.nbytes) for moment in moments)
