"""Weights that one rank reads for all, where reading fails or ranks ask differently: each of them learns of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint.matching import Matching
from fsdp2.errors import CheckpointError, CorruptError, MismatchError
from tests.helpers.checkpoint_cases import spoil
from tests.helpers.ranks import on_ranks


@contextmanager
def soon() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 10


def rows() -> nn.Module:
    net = nn.Linear(1 << 10, 1200, bias=False)  # 1.6 MiB on each of three ranks
    fully_shard(net)
    return net


@on_ranks(1, 3)
@pytest.mark.parametrize("reader", [0, -1])
def test_the_reader_finds_nothing(rank: int, world_size: int, reader: int, tmp_path: Path) -> None:
    net, reader = rows(), reader % world_size
    message = "no checkpoint" if rank == reader else f"rank {reader}, which reads, failed: CheckpointError: .*no check"
    with soon(), pytest.raises(CheckpointError, match=message):
        checkpoint.load_from_rank(tmp_path / "none", model=net, rank=reader)


@on_ranks(3)
@pytest.mark.parametrize("place", [0.5, -100])
def test_damage_on_the_way(rank: int, world_size: int, place: float, tmp_path: Path) -> None:
    """Ranks that have had their part, or wait for it, learn of the damage of another's, and can go on."""
    net = rows()
    path = tmp_path / "a"
    if rank == 0:
        checkpoint.save(path, model={"weight": torch.ones(1200, 1 << 10)}, process_group=alone()).wait()
        file = max(path.iterdir(), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[int(place * len(content)) if place > 0 else int(place)] ^= 1
        file.write_bytes(content)
    else:
        alone()
    kind = CorruptError if rank == 0 else CheckpointError
    with soon(), pytest.raises(kind, match=r"'weight' is damaged: bytes"):
        checkpoint.load_from_rank(path if rank == 0 else "/nowhere", model=net)
    checkpoint.save(tmp_path / "b", model=net).wait()
    spoil(net.weight)
    checkpoint.load_from_rank(tmp_path / "b" if rank == 0 else "/nowhere", model=net)
    assert net.weight.to_local().ne(77).all()


def alone() -> Any:
    """A group of each rank of its own; all call this."""
    return dist.new_subgroups(1)[0]


@on_ranks(2, 4)
def test_names_are_told_to_all(rank: int, world_size: int, tmp_path: Path) -> None:
    if rank == 1:
        save_file({"weight": torch.ones(5, 3), "other": torch.ones(2)}, tmp_path / "model.safetensors")
    net = nn.Linear(3, 5)
    fully_shard(net)
    folder = tmp_path if rank == 1 else "/nowhere"
    with soon(), pytest.raises(MismatchError, match=r"(?s)missing .*model 'bias'.*unexpected .*model 'other'"):
        checkpoint.load_from_rank(folder, model=net, rank=1)
    loaded = checkpoint.load_from_rank(folder, model=net, rank=1, strict=False)
    assert (loaded.missing, loaded.unexpected) == (["model 'bias'"], ["model 'other'"])


@on_ranks(3)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_differ_do_not_hang(rank: int, world_size: int, odd: int, tmp_path: Path) -> None:
    if rank == 0:
        save_file({"a": torch.ones(5, 3), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    fewer = {"a": torch.zeros(5, 3)} if rank == odd else {"a": torch.zeros(5, 3), "b": torch.zeros(2)}
    with soon(), pytest.raises(CheckpointError, match=r"ranks .* request different tensors"):
        checkpoint.load_from_rank(tmp_path, model=fewer, strict=False)
    wrong = {"a": torch.zeros(3, 5) if rank == odd else torch.zeros(5, 3)}
    # The reader's error is told.
    message = "stored with shape" if odd in (0, rank) else rf"ranks \[{odd}\] failed; see their errors"
    with soon(), pytest.raises(CheckpointError, match=message):
        checkpoint.load_from_rank(tmp_path, model=wrong, strict=False)


@on_ranks(4)
def test_within_a_group(rank: int, world_size: int, tmp_path: Path) -> None:
    """Ranks of a group are counted there."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    stage = rank // 2
    (tmp_path / str(rank)).mkdir()
    save_file({"weight": torch.full((5, 3), float(rank))}, tmp_path / str(rank) / "model.safetensors")
    net = nn.Linear(3, 5, bias=False)
    fully_shard(net, mesh=mesh)
    checkpoint.load_from_rank(tmp_path / str(rank), model=net, rank=1, process_group=mesh.get_group())
    assert net.weight.to_local().eq(2 * stage + 1).all()


@on_ranks(3)
@pytest.mark.parametrize("where", ["allocating", "keeping"])
def test_a_receiver_that_fails(rank: int, world_size: int, where: str, tmp_path: Path) -> None:
    """The reader waited in `send` for the group's timeout; or, after the last message, the others had a model that the
    failing rank had not."""
    if rank == 0:
        save_file({"weight": torch.ones(1200, 1 << 10)}, tmp_path / "model.safetensors")
    net = rows()

    def failing(*_: Any) -> None:
        raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2 and where == "allocating":
            patch.setattr(Matching, "allocate", failing)
        elif rank == 2:
            patch.setattr(torch.Tensor, "copy_", failing)
        kind, message = (MemoryError, "none left") if rank == 2 else (CheckpointError, r"ranks \[2\] failed")
        with soon(), pytest.raises(kind, match=message):
            checkpoint.load_from_rank(tmp_path if rank == 0 else "/nowhere", model=net)
    checkpoint.load_from_rank(tmp_path if rank == 0 else "/nowhere", model=net)
    assert net.weight.to_local().eq(1).all()
