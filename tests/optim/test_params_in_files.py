"""Sharded parameters in files (`Offload(params="files")`): how much is in memory, who may replace them, no room."""

import copy
import ctypes
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import Offload, checkpoint
from fsdp2._torch import local_tensor
from fsdp2.disk import mapped
from fsdp2.disk.direct import PAGE
from fsdp2.disk.mapped import MappedFile, file_of
from fsdp2.init import materialize
from fsdp2.optim.background import submit
from fsdp2.optim.on_disk import _threads
from tests.helpers.offloaded import layers, optimizer_for, train
from tests.helpers.optimizers import assert_same
from tests.helpers.ranks import on_ranks
from tests.helpers.small_disks import small_disk, small_files

DIM, DEPTH = 256, 16
UNIT = 4 * (DIM * DIM + DIM)  # bytes of one, on all ranks


def policy(folder: Path) -> Offload:
    return Offload(grads=True, params="files", tier=folder)


def files_of(model: nn.Module) -> list[MappedFile | None]:
    """The file of each parameter."""
    return [file_of(local_tensor(param)) for param in model.parameters()]


def in_memory(files: list[MappedFile]) -> int:
    """Bytes of the files that are in memory, whoever has read them."""
    pages = 0
    for file in files:
        count = -(-file.memory.nbytes() // PAGE)
        resident = (ctypes.c_ubyte * count)()
        address, nbytes = ctypes.c_void_p(file.memory.data_ptr()), ctypes.c_size_t(file.memory.nbytes())
        assert mapped._libc().mincore(address, nbytes, resident) == 0
        pages += sum(each & 1 for each in resident)
    return pages * PAGE


def settled() -> None:
    """What is put to rest in the background is at rest."""
    mapped._thread().submit(lambda: None).result()


@on_ranks(2)
def test_few_units_are_in_memory(rank: int, world_size: int, tmp_path: Path) -> None:
    """In each forward, with a step under way: three units are stepped, two are read. Afterwards all are in files."""
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("the temporary folder is on no disk, so its files are always in memory")
    most, left = looked_at(rank, tmp_path)
    assert most <= 6 * UNIT / world_size + DEPTH * PAGE
    assert left <= 2 * UNIT / world_size
    gc.collect()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]


def looked_at(rank: int, folder: Path) -> tuple[int, int]:
    """Bytes in memory, at most during forward, and when all is done."""
    model = layers(policy(folder), DIM, DEPTH)
    optimizer = optimizer_for(model.parameters(), policy(folder))
    train(model, optimizer, rank, range(2))
    optimizer.wait()
    files: list[Any] = list({id(file): file for file in files_of(model)}.values())
    assert len(files) == DEPTH and None not in files and not [*folder.iterdir()]
    seen: list[int] = []

    def look(*_: Any) -> None:
        settled()
        seen.append(in_memory(files))

    for layer in model:
        layer.register_forward_hook(look)
    train(model, optimizer, rank, range(2, 4))
    optimizer.wait()
    settled()
    assert len(seen) == 2 * DEPTH
    return max(seen), in_memory(files)


def assigned(model: Any) -> Any:
    """As loaders do that bring their own memory."""
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, assign=True)
    return model


def written(model: Any) -> Any:
    for param in model.parameters():
        local_tensor(param.data).add_(1)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": assigned,
    "data": written,
    "to": lambda model: model.to(torch.float64).to(torch.float32),
    "deepcopy": copy.deepcopy,
    "to_empty": lambda model: assigned(copy.deepcopy(model)).to_empty(device="cpu"),
}


@on_ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_who_changes_them(rank: int, world_size: int, change: str, tmp_path: Path) -> None:
    """What replaces a parameter moves to a file, with its values."""
    ours = CHANGES[change](layers(policy(tmp_path), 8, 2))
    theirs = CHANGES[change](layers(None, 8, 2))
    if change == "to_empty":
        for model in (ours, theirs):
            for number, param in enumerate(model.parameters()):
                nn.init.constant_(param, 0.1 * number)
    optimizers = []
    for model, given in ((ours, policy(tmp_path)), (theirs, None)):
        optimizers.append(optimizer_for(model.parameters(), given))
        train(model, optimizers[-1], rank, range(2))
    assert_same(*optimizers)
    assert None not in files_of(ours)


@on_ranks(2)
def test_materialize_and_load(rank: int, world_size: int, tmp_path: Path) -> None:
    """From the meta device, to files, with the values of a checkpoint; only forwards, without an optimizer."""
    trained = layers(None, DIM, DEPTH)
    train(trained, optimizer_for(trained.parameters(), None), rank, range(1))
    checkpoint.save(tmp_path / "at", model=trained)
    with torch.device("meta"):
        model = layers(policy(tmp_path / "tier"), DIM, DEPTH)
    materialize(model)
    checkpoint.load(tmp_path / "at", model=model)
    assert None not in files_of(model) and len(set(map(id, files_of(model)))) == DEPTH
    x = torch.ones(2, DIM)
    with torch.no_grad():
        assert torch.equal(model(x), trained(x)) and torch.equal(model(x), trained(x))


@on_ranks(2)
def test_a_folder_without_room(rank: int, world_size: int, tmp_path: Path) -> None:
    """It is an error when the parameters are moved there, not a signal when they are used."""
    for limit in (small_files, small_disk):
        with (
            limit(tmp_path / limit.__name__),
            pytest.raises(OSError, match="bytes of sharded parameters could not be put"),
        ):
            layers(policy(tmp_path / limit.__name__), DIM, DEPTH)


COULD_NOT = r"sharded parameters could not be written \(on purpose\)"


def before_a_step(rank: int, folder: Path) -> Any:
    """A model and its optimizer after a backward, and everything else is done."""
    model = layers(policy(folder), 8, 2)
    optimizer = optimizer_for(model.parameters(), policy(folder))
    train(model, optimizer, rank, range(1))
    optimizer.wait()
    model(torch.ones(2, 8)).sum().backward()
    settled()
    return model, optimizer


@on_ranks(2)
def test_a_disk_that_fails(rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said where it is waited for, and at the next gather: the system may have forgotten the values."""
    model, optimizer = before_a_step(rank, tmp_path)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        optimizer.step()
        with pytest.raises(OSError, match=COULD_NOT):
            optimizer.wait()
        with torch.no_grad():
            model(torch.ones(2, 8))
            settled()
            with pytest.raises(OSError, match=COULD_NOT):
                model(torch.ones(2, 8))


@on_ranks(2)
def test_a_write_after_a_step_that_fails(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the system tells only who wrote. The next gather took the values from before the step."""
    model, optimizer = before_a_step(rank, tmp_path)
    failed: list[int] = []
    fdatasync = os.fdatasync

    def failing(fd: int) -> None:
        if not failed:
            failed.append(fd)
            raise OSError(errno.EIO, "on purpose")
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", failing)
    optimizer.step()
    submit(lambda: None, None).result()  # behind the step
    _threads().freeing.submit(lambda: None).result()  # and behind what it writes
    assert failed
    with pytest.raises(OSError, match=COULD_NOT):
        model(torch.ones(2, 8))
