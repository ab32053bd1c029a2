"""A model that sleeps: nothing of it is on the device, and the next step is the same."""

from contextlib import nullcontext
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


def trained(kind: str, rank: int, world_size: int, seed: int, sleeps: bool, folder: Any, overlap: bool) -> Any:
    """Five rounds, and with sleep how many bytes are on the device meanwhile."""
    before = lagging.counts()["allocated"]
    model = sharded(Feature(FEATURES[kind].options), DEVICE, world_size)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if seed % 2 == 0:
        optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    for step in range(5):
        for x in inputs(rank, DEVICE):
            one_step(model, optimizer, x)
            del x
        if sleeps and not (overlap and step == 4):  # what is compared is read after a forward
            fsdp2.sleep(model, optimizer, folder=folder and str(folder))
            torch.accelerator.synchronize()
            assert lagging.counts()["allocated"] - before < 4096
            kept = {name: tensor.clone() for name, tensor in fsdp2.weights(model)}
            assert len(kept) == len([*model.parameters()])
            del kept
            fsdp2.wake(model, overlap=overlap)
        if step % 2:  # a step at once
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def slept(
    rank: int, world_size: int, seed: int, kind: str = "plain", overlap: bool = False, in_files: bool = False
) -> None:
    """Against the same training without sleep."""
    with shared_folder(rank) if in_files else nullcontext() as folder:
        expected = trained(kind, rank, world_size, seed, False, folder, overlap)
        with late(seed):
            assert_same(trained(kind, rank, world_size, seed, True, folder, overlap), expected)


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
    "slept in files": partial(slept, kind="mixed precision", in_files=True),
    "saved asleep": saved_asleep,
}
