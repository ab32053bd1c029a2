"""What is done with files on the lagging device: checkpoints are saved and loaded, and states rest on a late disk. Each
takes (rank, world_size, seed) and asserts."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import checkpoint
from fsdp2._torch import local_of
from fsdp2.checkpoint.run import background
from fsdp2.checkpoint.storage.local import LocalWriter
from fsdp2.disk.file import DiskFile
from tests.instruments.device.ranks import DEVICE, late
from tests.instruments.device.steps import (
    ADAM,
    Scenario,
    assert_same,
    inputs,
    one_step,
    shared_folder,
    stream_of,
    values,
)
from tests.instruments.device.training import ALL_ON_DISK, GRADS_ON_DISK, ON_DISK, Feature, sharded, train

__all__ = ["SCENARIOS_OF_FILES"]


@contextmanager
def late_files(seed: int, before_us: int, after_us: int) -> Iterator[None]:
    """Files are read and written late, in other threads than the program's, and go on being used for a while."""
    draw = random.Random(seed)

    def lagging(do: Callable[..., None]) -> Callable[..., None]:
        def late_do(*arguments: Any) -> None:
            time.sleep(draw.random() * before_us / 1e6)  # what is too early elsewhere shall be seen to be
            do(*arguments)
            time.sleep(draw.random() * after_us / 1e6)

        return late_do

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((DiskFile, "fill"), (DiskFile, "keep"), (LocalWriter, "write")):
            patch.setattr(kind, name, lagging(getattr(kind, name)))
        yield


def saved(rank: int, world_size: int, seed: int, in_background: bool = False) -> None:
    """What is saved are the values of the step before, although the device is late and training goes on."""
    expected = sharded(ADAM, "cpu", world_size)
    expected_optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1, foreach=False)
    first, second = inputs(rank, "cpu")
    one_step(expected, expected_optimizer, first)
    with shared_folder(rank) as folder, late(seed, 1000), stream_of(seed):
        model = sharded(ADAM, DEVICE, world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        xs = inputs(rank, DEVICE)
        background._arena.clear()  # it holds the same values of the last seed
        one_step(model, optimizer, xs[0])
        handle = checkpoint.save(folder / "saved", model=model, optimizer=optimizer, async_op=in_background)
        one_step(model, optimizer, xs[1])
        handle.wait()
        loaded = sharded(ADAM, "cpu", world_size)
        loaded_optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.1, foreach=False)
        checkpoint.load(folder / "saved", model=loaded, optimizer=loaded_optimizer)
        trained = values(model)
    assert_same(values(loaded), values(expected))
    one_step(loaded, loaded_optimizer, second)
    assert_same(values(loaded), trained)


def resumed(rank: int, world_size: int, seed: int, policy: fsdp2.Offload) -> None:
    """A new optimizer takes up state that rests in host memory. The device has never had room for all of it: it got the
    state of the whole model, and the counters of fused steps, which the host makes."""

    def made() -> tuple[Any, Any]:
        model = sharded(Feature({"offload_policy": policy}), DEVICE, world_size)
        return model, fsdp2.offload_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1, fused=True)

    with shared_folder(rank) as folder, late(seed, 1000), stream_of(seed):
        xs = inputs(rank, DEVICE)
        model, optimizer = made()
        one_step(model, optimizer, xs[0])
        checkpoint.save(folder / "saved", model=model, optimizer=optimizer)
        later, resumed_optimizer = made()
        checkpoint.load(folder / "saved", model=later, optimizer=resumed_optimizer)
        shown = [each for state in resumed_optimizer.state.values() for each in state.values()]
        assert shown and all(local_of(each).device.type == "cpu" for each in shown if isinstance(each, DTensor))
        for each, stepped in ((model, optimizer), (later, resumed_optimizer)):
            one_step(each, stepped, xs[1])
        assert_same(values(later), values(model))


def loaded(rank: int, world_size: int, seed: int) -> None:
    """Parameters are filled although the device still writes to them, and the next forward computes with them."""
    expected = sharded(ADAM, "cpu", world_size)
    train(expected, ADAM, "cpu", rank, steps=1)
    with shared_folder(rank) as folder:
        checkpoint.save(folder / "saved", model=expected)
        with late(seed, 1000), stream_of(seed):
            model = sharded(ADAM, DEVICE, world_size)
            one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(rank, DEVICE)[0])
            checkpoint.load(folder / "saved", model=model)
            assert_same(train(model, ADAM, DEVICE, rank), train(expected, ADAM, "cpu", rank))


def saved_twice(rank: int, world_size: int, seed: int) -> None:
    """A save in the background goes through the memory of the one before, which is still being written."""

    def run(device: str) -> list[torch.Tensor]:
        with shared_folder(rank) as folder:
            model, seen = sharded(ADAM, device, world_size), []
            for number in range(2):
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(2)
                handle = checkpoint.save(folder / str(number), model=model, async_op=True)
            handle.wait()
            for number in range(2):
                loaded = sharded(ADAM, "cpu", world_size)
                checkpoint.load(folder / str(number), model=loaded)
                seen += values(loaded)
        return seen

    expected = run("cpu")
    with late(seed), late_files(seed, 30_000, 30_000):
        assert_same(run(DEVICE), expected)


def states_on_disk(rank: int, world_size: int, seed: int) -> None:
    """Whoever looks at states, or changes them, waits for their step and for what is read and written behind it. In
    every second seed nobody looks, and with so few units that there is room for all the next step comes before the last
    one is written."""
    looks = bool(seed % 2)

    def run(device: str, policy: fsdp2.Offload) -> list[torch.Tensor]:
        model = sharded(Feature({"offload_policy": policy}, depth=3 if looks else 1), device, world_size)
        make = fsdp2.local_optimizer if device == "cpu" else fsdp2.offload_optimizer
        optimizer: Any = make(torch.optim.AdamW, model.parameters(), lr=0.1)
        xs, seen, known = inputs(rank, device), [], []
        for number in range(4):
            one_step(model, optimizer, xs[number % 2])
            seen += [each.to_local().clone() for each in known]
            for each in known:
                each.mul_(0.5)
            if looks and not number:
                known = [state["exp_avg"] for state in optimizer.state.values()]
        return [*seen, *values(model)]

    policy = (ON_DISK, GRADS_ON_DISK, ALL_ON_DISK)[seed % 3]
    expected = run("cpu", policy)
    # What is changed after it was written, and before the memory is freed, would be lost: on a busy machine, too.
    with late(seed), late_files(seed, 1500 if looks else 20_000, 20_000):
        assert_same(run(DEVICE, policy), expected)


SCENARIOS_OF_FILES: dict[str, Scenario] = {
    "saved": saved,
    "saved in the background": partial(saved, in_background=True),
    "saved twice in the background": saved_twice,
    "loaded": loaded,
    "resumed with states in host memory": partial(resumed, policy=fsdp2.Offload()),
    "resumed with states on disk": partial(resumed, policy=GRADS_ON_DISK),
    "states on disk, looked at": states_on_disk,
}
