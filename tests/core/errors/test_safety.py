"""Ranks that differ are an error with a name, within seconds, and no parameter is stepped with what they made of it
(docs/launching.md). Real processes, which are forked for one case each and may be killed."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks.fake import FakeRank, in_fake_rank
from fsdp2 import fully_shard
from fsdp2.watch.order import compare_before_step
from fsdp2.watch.watchdog import watchdog
from tests.helpers.fault_runs import LIMIT_S, check_all
from tests.helpers.faults import Fault, build
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.ranks import on_ranks
from tests.helpers.ranks_pool import forking

FAST = [
    Fault("order"),
    Fault("micro"),
    Fault("kill", "backward"),
    Fault("order", mesh="hsdp", ranks=4, victim=2, also=(3,)),
    Fault("sleep", "between"),
    Fault("off"),
]
PLACES = ["forward", "backward", "reduction", "clip", "step", "optimizer", "between"]
WHERE = (
    ("fsdp", 2, 0, PLACES),
    ("fsdp", 4, 2, ["forward", "reduction", "step"]),
    ("hsdp", 4, 1, ["forward", "reduction", "optimizer"]),
    ("tp", 4, 3, ["backward", "clip", "step"]),
)
EXHAUSTIVE = [
    Fault("order", first=True),
    Fault("order", mesh="hsdp", ranks=4, victim=2, also=(3,), first=True),
    *(Fault(what, default=True) for what in ("order", "kill", "stop", "leave")),
    *(Fault("destroy", "between", mesh, 4, 1) for mesh in ("fsdp", "tp")),
    *(Fault(what, "save", "hsdp", 4, 2) for what in ("kill", "stop", "raise")),
    Fault("stop", "reduction", "tp", 4, 2, first=True),
    *(
        Fault("leave", where, mesh, 4, 1)
        for where, mesh in (("backward", "fsdp"), ("between", "hsdp"), ("backward", "tp"))
    ),
    *(Fault(what, "forward", mesh, ranks, bad) for mesh, ranks, bad, _ in WHERE for what in ("order", "skip", "micro")),
    *(
        Fault(what, where, mesh, ranks, bad)
        for mesh, ranks, bad, places in WHERE
        for what in ("kill", "stop", "raise")
        for where in places
    ),
]


def test_faults(tmp_path: Path) -> None:
    """A sample; and what is no fault: a rank that sleeps for many steps, and nobody that watches."""
    check_all(FAST, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["fsdp2", "fsdp4", "hsdp4", "tp4"])
def test_fault_matrix(mesh: str, tmp_path: Path) -> None:
    check_all([fault for fault in EXHAUSTIVE if f"{fault.mesh}{fault.ranks}" == mesh], tmp_path)


@on_ranks(2, 4)
def test_what_all_ranks_do_is_no_fault(rank: int, world_size: int) -> None:
    """Other orders in each step, other numbers of microbatches, evaluations, early exits: alike on all ranks."""
    model = build("fsdp", world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = random.Random(0)
    for number in range(12):
        for _ in range(draw.randint(1, 3)):
            model.order = draw.sample(range(3), draw.randint(1, 3))
            model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 0:
            with torch.no_grad():
                model(torch.randn(4, 8))
    dog = watchdog()
    assert dog is not None and dog.failure is None


def two_gathers_ahead(rank: int, folder: str) -> bool:
    fsdp2.safety(answer_within_s=0.5)
    model = build("fsdp", 2)
    model(torch.randn(4, 8))
    model.reshard()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handles = [block.unshard(async_op=True) for block in model.blocks[:2]]
    with pytest.raises(fsdp2.CollectiveError, match="rank 1 was killed"):
        handles[0].wait()
    model.reset_iter_state()
    return all(isinstance(param, DTensor) for param in model.parameters())


def test_reset_after_a_rank_died(tmp_path: Path) -> None:
    """`reset_iter_state` raised the same error again where another all-gather was under way."""
    survivor, victim = run_cases([Case(two_gathers_ahead, 2, (str(tmp_path),), limit_s=LIMIT_S)])[0]
    assert survivor.value is True and victim.how == "died", survivor


def raises_uncaught(rank: int, folder: str) -> None:
    os.chdir(folder)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    fsdp2.safety(stall_after_s=0.5)
    model = fsdp2.fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    try:
        if rank == 1:
            raise ValueError("a bad batch")
        model(torch.ones(1, 4))
    except fsdp2.CollectiveError as error:
        Path(folder, "message").write_text(str(error))


def test_a_spawned_rank_raises(tmp_path: Path) -> None:
    """multiprocessing handles its exception itself: the message did not name it."""
    ranks = [forking().Process(target=raises_uncaught, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    message = (tmp_path / "message").read_text()
    assert "rank 1 has ended after ValueError: a bad batch" in message
    assert message.startswith("unit '(root)': all-gather failed on rank 0")


def begins_again(rank: int, folder: str) -> bool:
    fsdp2.safety(stall_after_s=0.3)
    model = build("fsdp", 2)
    model.order = [0, 1, 2] if rank == 0 else [1, 0, 2]
    with pytest.raises(fsdp2.CollectiveError, match="did different things"):
        model(torch.randn(4, 8)).sum().backward()
    torch.distributed.destroy_process_group()
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    again = build("fsdp", 2)
    again(torch.randn(4, 8)).sum().backward()
    torch.distributed.barrier()
    dog = watchdog()
    return dog is not None and dog.failure is None


def test_new_process_groups_after_a_fault(tmp_path: Path) -> None:
    """What failed were the old ones. Their watchdog may be about to say so: a race, so several at a time."""
    folders = [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        folder.mkdir()
    for outcomes in run_cases([Case(begins_again, 2, (str(folder),), limit_s=LIMIT_S) for folder in folders]):
        assert all(outcome.ok and outcome.value for outcome in outcomes), outcomes


def on_paper() -> tuple[float, int]:
    """Rank 0 of 8 that do not exist trains a step."""
    fsdp2.safety(stall_after_s=0.1, answer_within_s=0.2)
    start = time.monotonic()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    return time.monotonic() - start, sum(each.name == "fsdp2-watchdog" for each in threading.enumerate())


@pytest.mark.parametrize("backend", ["fake", "silent"])
def test_ranks_on_paper_are_not_waited_for(backend: str) -> None:
    """The first step of one process that plays eight waited a minute for ranks that never come."""
    seconds, num_threads = in_fake_rank(FakeRank(0, 8, backend), on_paper)
    assert seconds < 20 and num_threads == 0, (seconds, num_threads)


@on_ranks(2)
def test_a_step_under_fake_tensors(rank: int, world_size: int) -> None:
    """Fake tensors cannot say which ranks a mesh has: an optimizer that stepped first under them raised."""
    model = build("fsdp", world_size)
    model(torch.randn(4, 8)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        compare_before_step(optimizer)
