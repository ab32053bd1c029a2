"""A model that sleeps: nothing of it is on the device, and the next step is the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fsdp2
from fsdp2 import checkpoint
from tests.instruments.device import lagging
from tests.instruments.device.ranks import DEVICE, late
from tests.instruments.device.steps import ADAM, Scenario, assert_same, inputs, one_step, shared_folder, values
from tests.instruments.device.training import FEATURES, Feature, sharded


def _slept(kind: str, rank: int, world_size: int, seed: int, folder: str | None, overlap: bool = False) -> None:
    """Against the same training without sleep; 5 rounds, without growth."""

    @contextmanager
    def sleeping(model: Any, optimizer: torch.optim.Optimizer, folder: str | None) -> Iterator[None]:
        if not overlap:
            with fsdp2.asleep(model, optimizer, folder=folder):
                yield
            return
        fsdp2.sleep(model, optimizer, folder=folder)
        yield
        fsdp2.wake(model, overlap=True)

    def trained(device: str, sleeps: bool) -> list[torch.Tensor]:
        feature = Feature(FEATURES[kind].options, optimizer=torch.optim.AdamW)
        before = lagging.counts()["allocated"] if sleeps else 0
        model = sharded(feature, device, world_size)
        optimizer: torch.optim.Optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        if seed % 2:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        asleep_bytes = []
        for step in range(5):
            for x in inputs(rank, device):
                one_step(model, optimizer, x)
                del x
            if sleeps and not (overlap and step == 4):  # what is compared is read after a forward
                with sleeping(model, optimizer, folder):
                    torch.accelerator.synchronize()
                    asleep_bytes.append(lagging.counts()["allocated"] - before)
                    kept = {name: tensor.clone() for name, tensor in fsdp2.weights(model)}
                    assert len(kept) == len([*model.parameters()])
                    del kept
            if step % 2:  # a step at once
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.zero_grad()
        assert not sleeps or max(asleep_bytes) < 4096, asleep_bytes
        return values(model)

    expected = trained(DEVICE, False)
    with late(seed):
        assert_same(trained(DEVICE, True), expected)


def slept(rank: int, world_size: int, seed: int, overlap: bool = False) -> None:
    _slept("plain", rank, world_size, seed, None, overlap)


def slept_in_files(rank: int, world_size: int, seed: int) -> None:
    with shared_folder(rank) as folder:
        _slept("mixed precision", rank, world_size, seed, str(folder))


def slept_fifty_times(rank: int, world_size: int, seed: int) -> None:
    """As much is on the device in the fiftieth sleep, and awake after it, as in the first."""
    model = sharded(ADAM, DEVICE, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for number in range(50):
        one_step(model, optimizer, inputs(rank, DEVICE)[0])
        torch.accelerator.synchronize()
        awake = lagging.counts()["allocated"]
        fsdp2.sleep(model, optimizer)
        torch.accelerator.synchronize()
        found.append((awake, lagging.counts()["allocated"]))
        fsdp2.wake(model, overlap=number % 2 == 0)
    assert len(set(found[2:])) == 1, found


def saved_asleep(rank: int, world_size: int, seed: int) -> None:
    """A checkpoint that is saved while the model sleeps is that of the waking one."""
    with shared_folder(rank) as folder, late(seed):
        model = sharded(ADAM, DEVICE, world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        one_step(model, optimizer, inputs(rank, DEVICE)[0])
        expected = values(model)
        with fsdp2.asleep(model, optimizer):
            checkpoint.save(Path(folder) / "asleep", model=model, optimizer=optimizer)
        one_step(model, optimizer, inputs(rank, DEVICE)[1])
        checkpoint.load(Path(folder) / "asleep", model=model, optimizer=optimizer)
        assert_same(values(model), expected)


SCENARIOS_OF_SLEEP: dict[str, Scenario] = {
    "slept": slept,
    "woken beside the forward": partial(slept, overlap=True),
    "slept in files": slept_in_files,
    "slept fifty times": slept_fifty_times,
    "saved asleep": saved_asleep,
}
