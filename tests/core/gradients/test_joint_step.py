"""One rank's exception is everybody's, and all go on with the next batch, bit for bit (docs/unequal.md)."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import agree_on_step
from fsdp2.extras.comm_memory import FlatAllGather
from fsdp2.watch import joint_step
from fsdp2.watch import watchdog as watchdog_module
from fsdp2.watch.board import Board
from fsdp2.watch.exchange import Watched
from tests.helpers.faults import sharded
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.ranks import on_ranks

PLACES = ["before", "forward", "backward", "reduction", "second microbatch", "after"]


class Bad(Exception):
    """A batch is bad."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.at: Callable[[str], None] = lambda place: None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                self.at("forward")
                x.register_hook(lambda grad: self.at("backward"))
        return x


def build(kind: str, ranks: int) -> Model:
    torch.manual_seed(0)
    model: Model = sharded(Model(), kind, ranks)
    return model


class Training:
    """One rank's. `failing`: whether it fails in the next step, and where. "around" accumulates, in two roots."""

    def __init__(self, kind: str, rank: int, ranks: int):
        self.replica = rank // 2 if kind == "tp" else rank  # ranks of one tensor-parallel group have the same batches
        self.roots = [build("fsdp", ranks) for _ in range(2)] if kind == "around" else [build(kind, ranks)]
        self.model = self.roots[-1]
        self.whole = nn.Sequential(*self.roots) if kind == "around" else self.model
        self.optimizer = torch.optim.AdamW(self.whole.parameters(), lr=0.1)
        self.model.at = self.at
        self.model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: self.at("reduction"))
        self.failing = ""
        torch.manual_seed(self.replica)

    def at(self, place: str) -> None:
        if place == self.failing:
            raise torch.OutOfMemoryError("too long") if place == "backward" else Bad("too long")

    def step(self, number: int) -> str:
        """The text of the error; "" without one. A parameter is stepped only then."""
        inputs = [torch.full((4, 8), 0.1 * number + 0.01 * self.replica), torch.full((4, 8), 0.2 * number)]
        try:
            with agree_on_step(self.whole):
                self.at("before")
                for root in self.roots:
                    root.set_requires_gradient_sync(len(self.roots) == 1)
                self.whole(inputs[0]).square().sum().backward()
                self.at("second microbatch")
                for root in self.roots:
                    root.set_requires_gradient_sync(True)
                self.whole(inputs[1]).square().sum().backward()
                self.at("after")
        except fsdp2.StepError as error:
            assert all(param.grad is None for param in self.whole.parameters())
            return str(error)
        fsdp2.clip_grad_norm_(self.whole.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return ""

    def values(self) -> list[Tensor]:
        return [param.to_local().clone() for param in self.whole.parameters() if isinstance(param, DTensor)]


def check(kind: str, rank: int, ranks: int, faults: dict[int, tuple[tuple[int, ...], str]]) -> None:
    """Batches that fail on some ranks at a place give what training without them gives."""
    expected = Training(kind, rank, ranks)
    for number in range(6):
        if number not in faults:
            assert expected.step(number) == ""
    found = Training(kind, rank, ranks)
    for number in range(6):
        failing, place = faults.get(number, ((), ""))
        found.failing = place if rank in failing else ""
        message = found.step(number)
        error = "OutOfMemoryError" if place == "backward" else "Bad"
        assert message in ([f"rank {each}: {error}: too long" for each in failing] or [""])
    assert all(torch.equal(one, other) for one, other in zip(found.values(), expected.values(), strict=True))


@on_ranks(2, 4)
def test_bad_batches_are_as_if_they_had_not_been(rank: int, world_size: int) -> None:
    """A rank fails, and others in the next step."""
    everybody = tuple(range(world_size))
    check("fsdp", rank, world_size, {2: ((1,), "forward"), 3: (everybody[-2:], "backward"), 4: ((0,), "after")})


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hsdp", "tp"])
def test_other_meshes(rank: int, world_size: int, kind: str) -> None:
    """Ranks that have failed begin nothing more over the replicas; the others stop at one place."""
    check(kind, rank, world_size, {2: ((2, 3), "forward"), 3: ((0, 1), "backward")})


@on_ranks(2)
def test_a_module_around_the_roots(rank: int, world_size: int) -> None:
    """The gradients of a skipped first microbatch went into the next step."""
    check("around", rank, world_size, {1: ((1,), "second microbatch"), 3: ((1,), "backward")})


@on_ranks(4)
def test_a_rank_goes_on_to_where_its_partner_waits(rank: int, world_size: int) -> None:
    """Rank 0 learns of the failure before rank 1's gather, behind which rank 1 waits for its part of a sum."""
    training = Training("tp", rank, world_size)
    assert training.step(0) == ""
    if rank == 0:
        training.model.at = lambda place: time.sleep(1.0) if place == "forward" else None
    training.failing = "forward" if rank > 1 else ""
    assert training.step(1) in ("rank 2: Bad: too long", "rank 3: Bad: too long")
    training.model.at, training.failing = training.at, ""
    assert training.step(2) == ""


@on_ranks(2)
def test_a_watchdog_looks_while_its_rank_fails(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read that nobody has failed, and must not say so after its rank has failed: the error was "None"."""
    training = Training("fsdp", rank, world_size)
    assert training.step(0) == ""
    looks = threading.Event()
    get = Board.get

    def read_late(board: Board, key: str) -> str | None:
        found = get(board, key)
        if key.endswith("/failed") and threading.current_thread() is not threading.main_thread():
            looks.set()
            time.sleep(0.05)
        return found

    def fail(place: str) -> None:
        if place == "forward":
            assert looks.wait(20)
            raise Bad("too long")

    if rank == 1:
        monkeypatch.setattr(Board, "get", read_late)
        training.model.at = fail
    assert training.step(1) == "rank 1: Bad: too long"
    training.model.at = training.at
    assert training.step(2) == ""


@pytest.mark.exhaustive
@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp"])
@pytest.mark.parametrize("places", [PLACES[:3], PLACES[3:]])
def test_places(rank: int, world_size: int, kind: str, places: list[str]) -> None:
    if kind == "tp":
        who = [(0, 1), (world_size - 2, world_size - 1), (0, 1)]
    else:
        who = [(0,), (1,), (0, world_size - 1)]
    check(kind, rank, world_size, dict(zip((1, 2, 5), zip(who, places, strict=True), strict=True)))


def no_memory(_: Watched) -> Callable[[], None]:
    raise torch.OutOfMemoryError("nothing is left")


def stuck(rank: int, folder: str, what: str) -> tuple[str, bool, bool]:
    """The error, whether parameters are as before, and whether this rank refuses further communication."""
    os.chdir(folder)
    watchdog_module._FAST_S = 0.2  # it would be refused before the error by chance
    joint_step._LIMIT_S = 2.0
    fsdp2.safety(stall_after_s=0.5)
    training = Training("tp" if what == "one of two" else "fsdp", rank, 4)
    if what != "first step":
        assert training.step(0) == ""
    before = [each.tolist() for each in training.values()]
    if rank == 1:
        training.failing = "forward"
    if rank == 1 and what == "no memory":
        Watched.begin_like = no_memory  # type: ignore[method-assign]
    if rank == 1 and what == "killed":
        training.model.at = lambda place: os.kill(os.getpid(), signal.SIGKILL)
    try:
        training.step(1)
    except (fsdp2.CollectiveError, RuntimeError) as error:
        dog = watchdog_module.watchdog()
        is_refused = dog is not None and dog.failure is not None
        training.model.reset_iter_state()
        return f"{type(error).__name__}: {error}", [each.tolist() for each in training.values()] == before, is_refused
    return "no error", False, False


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("killed", "rank 1 was killed"),
        ("first step", "has never done it"),
        ("one of two", "rank 1: Bad: too long"),
        ("no memory", "OutOfMemoryError: nothing is left"),
    ],
)
def test_no_recovery(what: str, says: str, tmp_path: Path) -> None:
    """An error on all ranks, no step, and no communication afterwards (a rank that gave up first could begin some)."""
    outcomes = run_cases([Case(stuck, 4, (str(tmp_path), what))])[0]
    texts = []
    for rank, outcome in enumerate(outcomes):
        if what == "killed" and rank == 1:
            assert outcome.how == "died", outcome
            continue
        assert outcome.ok, outcome
        text, is_unchanged, is_refused = outcome.value
        assert is_unchanged and (is_refused or not text.startswith("CollectiveError")), (rank, outcome)
        texts.append(text)
        # The one that waits in tensor parallelism gets the backend's error.
        assert text.startswith("CollectiveError") or (what, rank) == ("one of two", 0), (rank, text)
        assert what == "killed" or "rank 1: Bad: too long" in text or rank == 0, (rank, text)
    assert any(says in text for text in texts), texts


def test_one_process() -> None:
    """The same program runs without other ranks."""
    model = nn.Linear(4, 4)

    def fail() -> None:
        model(torch.randn(2, 4)).sum().backward()
        raise ValueError("odd")

    torch.manual_seed(3)
    with pytest.raises(fsdp2.StepError, match=r"^rank 0: ValueError: odd$"), agree_on_step(model):
        fail()
    assert model.weight.grad is None
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


class Scarce:
    """Memory for the all-gathers of a block, which a rank may not get at first."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.training.failing == "gather":
            self.training.failing = ""
            raise torch.OutOfMemoryError("too long")
        return torch.empty(numel, dtype=dtype, device=device)


@on_ranks(2)
def test_no_memory_for_an_exchange(rank: int, world_size: int) -> None:
    """The failed rank had noted the exchange before it had the memory, so nobody took its part: the others waited."""

    def trained(bad: int | None) -> list[Tensor]:
        training = Training("fsdp", rank, world_size)
        training.model.blocks[2].set_custom_all_gather(FlatAllGather(Scarce(training)))
        for number in range(4):
            if number == bad:
                training.failing = "gather" if rank == 1 else ""
                assert training.step(number) == "rank 1: OutOfMemoryError: too long"
            elif number != 2:
                assert training.step(number) == ""
        return training.values()

    expected = trained(None)
    assert all(torch.equal(one, other) for one, other in zip(trained(2), expected, strict=True))


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    """An optimizer that steps too early, a block within a block, ranks that cannot ask each other, no models."""
    training = Training("fsdp", rank, world_size)
    model = training.model
    assert training.step(0) == ""
    with pytest.raises(fsdp2.StepError, match=r"OrderError: AdamW.step\(\) within agree_on_step"), agree_on_step(model):
        training.optimizer.step()
    within = pytest.raises(fsdp2.StepError, match="OrderError: agree_on_step: within")
    with within, agree_on_step(model), agree_on_step(model):
        pass
    with pytest.raises(fsdp2.errors.ArgumentError, match="expected the models"), agree_on_step():
        pass
    assert training.step(1) == ""
    fsdp2.safety(False)
    try:
        with pytest.raises(fsdp2.OrderError, match=r"needs .* safety\(True\)"), agree_on_step(model):
            pass
    finally:
        fsdp2.safety()
