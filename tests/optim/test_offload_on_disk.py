"""State in files (`Offload(tier=...)`): how much is in memory, who may look, and what a full disk does."""

import contextlib
import errno
import gc
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import Offload, checkpoint, offload_optimizer
from fsdp2._torch import local_tensor
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.disk.file import PREFIX, DiskFile, remove_leftovers
from fsdp2.optim import local_optimizer
from fsdp2.optim.on_disk import IN_MEMORY, DiskTensor, Place
from tests.helpers.offloaded import layers, train, trained
from tests.helpers.optimizers import assert_same
from tests.helpers.parity_models import local
from tests.helpers.ranks import on_ranks
from tests.helpers.small_disks import small_disk, small_files

DIM, DEPTH = 8, 8


def open_files(folder: Path) -> list[Path]:
    """Those without a name, below a folder, that this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)) and PREFIX in target:
            found.append(each)
    return found


@on_ranks(2)
def test_few_units_are_in_memory(rank: int, world_size: int, tmp_path: Path) -> None:
    """Measured in each step of each unit: the memory of all units' states. Between steps there is none."""
    memory: list[int] = []

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            memory.append(sum(state_bytes(each) for each in inner))
            if len(inner) < DEPTH:
                inner.append(self)
            return super().step(closure)

    def state_bytes(each: Any) -> int:
        values = [value for state in each.__dict__["state"].values() for value in state.values()]
        return sum(local_tensor(v).untyped_storage().nbytes() for v in values if isinstance(v, DTensor))

    inner: list[Any] = []
    model = layers(Offload(tier=tmp_path))
    optimizer = offload_optimizer(Noting, model.parameters(), lr=1e-2, elementwise=True)
    train(model, optimizer, rank, range(4))
    optimizer.wait()
    unit = 2 * 4 * (DIM * DIM + DIM) // world_size
    assert len(memory) == 4 * DEPTH and max(memory) <= IN_MEMORY * unit
    assert sum(map(state_bytes, inner)) == 0
    assert all(type(local_tensor(state["exp_avg"])) is DiskTensor for state in optimizer.state.values())


def pickled(model: Any, optimizer: Any) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return [local(each["exp_avg"]) for each in torch.load(file, weights_only=False)["state"].values()]


def changed(model: Any, optimizer: Any) -> list[Tensor]:
    """In place: the whole, a view of a view, and by a list."""
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        local(state["exp_avg"]).view(-1)[1:3].fill_(0.01)
    torch._foreach_add_([state["exp_avg"] for state in optimizer.state.values()], 1e-3)
    return [local(state["exp_avg"]) + 0 for state in optimizer.state.values()]


LOOKS: dict[str, Callable[[Any, Any], list[Tensor]]] = {
    "full_tensor": lambda _, optimizer: [each["exp_avg"].full_tensor() for each in optimizer.state.values()],
    "pickle": pickled,
    "change": changed,
}


@on_ranks(2)
def test_who_looks_reads(rank: int, world_size: int, tmp_path: Path) -> None:
    """And who changes something writes: the next step takes it from there."""
    ours, theirs = trained(Offload(tier=tmp_path), rank, 2), trained(None, rank, 2)
    for look in LOOKS.values():
        seen, expected = look(*ours), look(*theirs)
        assert len(seen) == len(expected) > 0
        assert all(map(torch.equal, seen, expected)), look
    for each in (ours, theirs):
        train(*each, rank, range(2, 4))
    assert_same(ours[1], theirs[1])


@on_ranks(2)
def test_checkpoints_read_from_file_to_file(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block; a load writes into the files that there are. DCP, which reads a tensor at a time, works too."""
    dim = 1024
    ours, theirs = trained(Offload(tier=tmp_path), rank, 1, dim), trained(None, rank, 2, dim)
    read: list[int] = []
    in_memory = DiskTensor.in_memory
    monkeypatch.setattr(DiskTensor, "in_memory", lambda self: read.append(self.nbytes) or in_memory(self))
    checkpoint.save(tmp_path / "ours", model=ours[0], optimizer=ours[1])
    assert max(read) <= BLOCK < 4 * dim * dim // world_size
    checkpoint.save(tmp_path / "theirs", model=theirs[0], optimizer=theirs[1])
    checkpoint.load(tmp_path / "theirs", model=ours[0], optimizer=ours[1])
    assert all(type(local_tensor(state["exp_avg"])) is DiskTensor for state in ours[1].state.values())
    assert_same(ours[1], theirs[1])
    theirs = trained(None, rank, 1, dim)
    dcp.save({"state": dict(enumerate(theirs[1].state.values()))}, checkpoint_id=tmp_path / "dcp")
    dcp.load({"state": dict(enumerate(ours[1].state.values()))}, checkpoint_id=tmp_path / "dcp")
    for one, other in zip(ours[1].state.values(), theirs[1].state.values(), strict=True):
        assert torch.equal(local(one["exp_avg_sq"]), local(other["exp_avg_sq"]))


@on_ranks(2)
def test_columns_are_loaded_by_several_threads(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes the columns between its own too, as it read them: half of the state stayed as before the load."""
    dim = 256
    torch.manual_seed(0)
    columns = fsdp2.fully_shard(nn.Linear(dim, dim, bias=False), shard_placement_fn=lambda param: Shard(1))
    theirs = local_optimizer(torch.optim.AdamW, columns.parameters(), lr=1e-2)
    rows = fsdp2.fully_shard(nn.Linear(dim, dim, bias=False), offload_policy=Offload(tier=tmp_path / "tier"))
    ours = offload_optimizer(torch.optim.AdamW, rows.parameters(), lr=1e-2)
    for model, optimizer in ((columns, theirs), (rows, ours)):
        model(torch.randn(4, dim, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        optimizer.step()
    checkpoint.save(tmp_path / "saved", model=columns, optimizer=theirs)
    both, in_memory = threading.Barrier(2), DiskTensor.in_memory

    def late(self: DiskTensor) -> Tensor:
        found = in_memory(self)
        if not self.is_contiguous():
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
        return found

    monkeypatch.setattr(DiskTensor, "in_memory", late)
    checkpoint.load(tmp_path / "saved", model=rows, optimizer=ours)
    [mine], [other] = ours.state.values(), theirs.state.values()
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(mine[key].full_tensor(), other[key].full_tensor())


@on_ranks(1)
def test_files_have_no_names_and_are_closed(rank: int, world_size: int, tmp_path: Path) -> None:
    """Folders are used in turn. Nothing is in them, and the space is free when the optimizer is gone."""
    folders = [tmp_path / "a", tmp_path / "b"]
    ours = trained(Offload(tier=folders), rank, 2)
    ours[1].wait()
    numbers = [len({os.stat(path).st_ino for path in open_files(folder)}) for folder in folders]
    assert numbers == [DEPTH // 2] * 2
    assert not any([*folder.iterdir()] for folder in folders)
    del ours
    gc.collect()
    assert not open_files(tmp_path)


def test_leftovers(tmp_path: Path) -> None:
    """A name that a process left behind is removed by the next run. One that may be in use stays, and so do others."""
    for name, age in ((PREFIX + "old", 3600), (PREFIX + "new", 0), ("other", 3600)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    remove_leftovers(str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == [PREFIX + "new", "other"]


@on_ranks(1)
@pytest.mark.parametrize("limit", [small_files, small_disk])
def test_a_full_disk_leaves_the_step_whole(
    rank: int, world_size: int, limit: Callable[[Path], Any], tmp_path: Path
) -> None:
    """An error, and the last step is complete: what could not be written is in memory, can be saved and trained on."""
    folder = tmp_path / "tier"
    theirs = trained(None, rank, 1)
    with limit(folder):
        ours = trained(Offload(tier=folder), rank, 1)
        with pytest.raises(OSError, match="bytes of an optimizer's state could not be put on disk") as caught:
            ours[1].wait()
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert_same(ours[1], theirs[1])
    for each in (ours, theirs):
        train(*each, rank, range(1, 3))
    assert_same(ours[1], theirs[1])


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next write to a file fails, and no other."""
    keep, failed = DiskFile.keep, []

    def failing(self: DiskFile, offset: int, values: memoryview) -> None:
        if not failed:
            failed.append(self)
            raise OSError(errno.EIO, "on purpose")
        keep(self, offset, values)

    monkeypatch.setattr(DiskFile, "keep", failing)


@on_ranks(1)
def test_a_disk_that_fails_leaves_the_step_whole(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a unit's state is written over that of the step before. A loop that asks for nothing hears of it, too."""
    ours, theirs = trained(Offload(tier=tmp_path), rank, 2), trained(None, rank, 2)
    ours[1].wait()
    fail_once(monkeypatch)
    for each in (ours, theirs):
        train(*each, rank, range(2, 3))
    with pytest.raises(OSError, match="on purpose"):
        ours[1].wait()
    for each in (ours, theirs):
        train(*each, rank, range(3, 5))
    assert_same(ours[1], theirs[1])
    fail_once(monkeypatch)
    with pytest.raises(OSError, match="on purpose"):
        train(*ours, rank, range(5, 8))


@on_ranks(1)
def test_reads_are_waited_for_if_another_cannot_begin(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that they write to was freed."""
    model, optimizer = trained(Offload(tier=tmp_path), rank, 1)
    optimizer.wait()
    opens, fill, begin = threading.Event(), DiskFile.fill, Place.begin_to_read
    places: list[Place] = []

    def late(self: DiskFile, offset: int, into: memoryview) -> None:
        assert opens.wait(30)
        fill(self, offset, into)

    def failing(self: Place, device: torch.device) -> Any:
        places.append(self)
        if len(places) == 2:
            raise MemoryError("on purpose")
        return begin(self, device)

    monkeypatch.setattr(DiskFile, "fill", late)
    monkeypatch.setattr(Place, "begin_to_read", failing)
    model(torch.ones(4, DIM)).sum().backward()
    optimizer.step()
    while len(places) < 2:
        time.sleep(0.01)
    time.sleep(0.1)  # for the step, which fails, and would free
    assert places[0]._there.untyped_storage().nbytes() == places[0]._nbytes
    opens.set()
    with pytest.raises(MemoryError, match="on purpose"):
        optimizer.wait()


ENDS = """
import sys, time, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
import fsdp2
from fsdp2.optim.background import submit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
policy = fsdp2.Offload(grads=True, params="files", tier=sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
for module in (*model, model):
    fsdp2.fully_shard(module, offload_policy=policy)
optimizer = fsdp2.offload_optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
submit(lambda: time.sleep(1), None)
optimizer.step()
print("ends", flush=True)
"""


@pytest.mark.exhaustive
def test_a_process_ends_while_it_steps(tmp_path: Path) -> None:
    """Without a state that fails first, each unit's step kept its room in memory, for which the fourth waited."""
    code = ENDS.format(root=str(Path(fsdp2.__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ends\n", done.stderr
