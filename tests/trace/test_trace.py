"""Timelines of real steps: what is in them agrees with the events, the clock and the plan; and how they are written."""

import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
from torch import nn

from benchmarks.plan.cases import Case, of_mlps
from fsdp2 import events, trace
from fsdp2.parallel import ParallelConfig, parallelize
from tests.helpers.ranks import on_ranks, run_on_ranks


def prepared(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = parallelize(case.workload.build(), case.config)
    optimizer = case.workload.optimizer(model.parameters())
    return model, optimizer, case.workload.batch(case.workload.batch_size)


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    case.workload.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, 4)
@pytest.mark.parametrize("config", [ParallelConfig(), ParallelConfig(replicate=2)], ids=["fsdp", "hsdp"])
def test_spans_are_the_events(rank: int, world_size: int, config: ParallelConfig) -> None:
    """A span for each collective, from its issue; the lanes of the host never overlap. (That they fill half of the step
    was not so once, on a busy machine.)"""
    case = Case(of_mlps(), config)
    work = prepared(case)
    step(case, *work)
    begin = perf_counter()
    with events.record() as log, trace.record() as timeline:
        step(case, *work)
    took = perf_counter() - begin
    spans = timeline.spans
    issued = [(event.kind.replace("_", "-"), event.unit or "(root)") for event in log if event.group_size]
    found = [(span.lane, span.name) for span in spans if span.lane in ("all-gather", "reduce-scatter", "all-reduce")]
    assert sorted(found) == sorted(issued)
    on_host = sorted((s.begin_s, s.end_s) for s in spans if s.lane in ("compute", "waiting", "optimizer"))
    assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(on_host))
    assert 0 < sum(end - start for start, end in on_host) <= took
    assert {span.name for span in spans if span.lane == "compute"} >= {"forward blocks.0", "backward blocks.2"}
    assert sum(span.lane == "optimizer" for span in spans) == 1


@on_ranks(2)
def test_a_late_rank_is_waited_for(rank: int, world_size: int) -> None:
    """Rank 1 sleeps before its step; rank 0's timeline shows the wait, in the first unit that needs the other."""
    case = Case(of_mlps())
    work = prepared(case)
    step(case, *work)
    with trace.record() as timeline:
        if rank == 1:
            sleep(0.3)
        step(case, *work)
    waits = [span for span in timeline.spans if span.lane == "waiting"]
    longest = max(waits, key=lambda span: span.seconds)
    if rank == 0:
        assert longest.seconds > 0.2 and longest.name == "forward blocks.0"
    else:
        assert sum(span.seconds for span in waits) < 0.2


def recorded(rank: int, world_size: int) -> trace.Timeline:
    case = Case(of_mlps())
    work = prepared(case)
    step(case, *work)
    with trace.record() as timeline:
        step(case, *work)
    return timeline


def test_events_of_a_thread_do_not_overlap(tmp_path: Path) -> None:
    """Chrome's format allows events of a thread to nest or to follow each other: viewers leave out what does neither,
    as collectives that are issued ahead do. All that the format asks of events is there."""
    measured = run_on_ranks(recorded, 2)[0]
    late = [trace.Span("all-gather", name, begin, begin + 2.0) for name, begin in (("a", 0.0), ("b", 1.0), ("c", 2.0))]
    samples = [trace.Sample(0.0, {"x": 2**20}), trace.Sample(0.5, {"x": 2**21})]
    trace.save(tmp_path / "trace.json", measured, trace.Timeline("late", late, samples))
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found["displayTimeUnit"] in ("ms", "ns")
    named = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in found["traceEvents"]
        if "thread_name" in each.values()
    }
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found["traceEvents"]:
        assert event["ph"] in ("M", "X", "C") and isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    named_b = [event for event in found["traceEvents"] if event["ph"] == "X" and event["name"] == "b"]
    assert [(event["ts"], event["dur"]) for event in named_b] == [(pytest.approx(1e6), pytest.approx(2e6))]
    assert [event["args"]["x"] for event in found["traceEvents"] if "x" in event.get("args", {})] == [2**20, 2**21]
    for spans in threads.values():
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(sorted(spans)))
    assert threads.keys() == named.keys() and {"all-gather", "all-gather 2"} <= {*named.values()}
