"""What saving and loading do not cost: communication, memory, planning that grows with the number of ranks.

Counts, not times: `benchmarks/checkpoint` has the times.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2.checkpoint as checkpoint
from fsdp2.checkpoint.io.planned_files import owned_pieces, rank_files
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.schema.manifest import table_of
from fsdp2.checkpoint.state.model import model_state
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.placement.tiling import spread_replicas
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.ranks import on_ranks
from tests.helpers.resident import extra_memory, reads_proc
from tests.helpers.threads import fake_world

MIB = 1 << 20


# --- communication ----------------------------------------------------------------------------------------------------


def num_collectives(action: Callable[[], Any]) -> int:
    """That any thread issues meanwhile."""
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    with warnings.catch_warnings(action="ignore"):  # DCP's
        action()
    return group._get_sequence_number_for_group() - before


def sharded(rank: int, world_size: int, rows: int, columns: int, dim: int = 0) -> DTensor:
    """Every element has its own value."""
    mesh = init_device_mesh("cpu", (world_size,))
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    return DTensor.from_local(
        values.chunk(world_size, dim)[rank].contiguous(), mesh, [Shard(dim)], run_check=False, shape=values.shape,
        stride=values.stride(),
    )  # fmt: skip


@on_ranks(2, 4)
def test_no_collective_is_issued(rank: int, world_size: int, tmp_path: Path) -> None:
    """Save and load of every kind, the one in the background and the resharding one too."""
    rows = {"weight": sharded(rank, world_size, 8, 12), "bias": torch.ones(3), "epoch": 3}
    columns = {"weight": sharded(rank, world_size, 8, 12, dim=1), "bias": torch.zeros(3), "epoch": 0}
    extra = {"position": rank, "random": checkpoint.RandomState()}

    def ours() -> None:
        checkpoint.save(tmp_path / "a", model=rows, extra=extra)
        checkpoint.save(tmp_path / "run", model=rows, step=1, async_op=True).wait()
        checkpoint.save(tmp_path / "whole", model=rows, consolidated=True)
        for name in ("a", "run/step-00000001", "whole"):
            checkpoint.load(tmp_path / name, model=columns, extra=extra if name == "a" else None)

    assert num_collectives(ours) == 0
    assert torch.equal(columns["weight"].to_local(), sharded(rank, world_size, 8, 12, dim=1).to_local())
    torchs = dcp.FileSystemWriter(tmp_path / "dcp")
    assert num_collectives(lambda: dcp.save({"weight": rows["weight"]}, storage_writer=torchs)) >= 3  # it counts


# --- memory -----------------------------------------------------------------------------------------------------------


def save_and_load_large(rank: int, folder: Path, consolidated: bool) -> tuple[int, int, int]:
    """The memory that it takes to save, to load, and to load into columns."""
    small = {"weight": sharded(rank, 2, 4, 4)}
    checkpoint.save(folder / "small", model=small)  # modules are imported, threads have been there
    checkpoint.load(folder / "small", model=small)
    state = {"weight": sharded(rank, 2, 6 << 10, 4 << 10)}
    other = {"weight": sharded(rank, 2, 6 << 10, 4 << 10, dim=1)}
    save = extra_memory(lambda: checkpoint.save(folder / "large", model=state, consolidated=consolidated))
    same = extra_memory(lambda: checkpoint.load(folder / "large", model=state))
    return save, same, extra_memory(lambda: checkpoint.load(folder / "large", model=other))


@reads_proc
@pytest.mark.parametrize("consolidated", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_memory_is_bounded(consolidated: bool, tmp_path: Path) -> None:
    """Beside the tensors (48 MiB a rank) there are the buffers of four threads at most: of 2 MiB each to save, of 4 MiB
    each to load, unless what is read goes where it belongs at once."""
    for outcome in run_cases([Case(save_and_load_large, 2, (tmp_path, consolidated))])[0]:
        assert outcome.ok, outcome
        save, same, columns = outcome.value
        assert save < 12 * MIB
        assert same < 8 * MIB
        assert columns < 24 * MIB


# --- planning ---------------------------------------------------------------------------------------------------------


def plan(world_size: int, num_tensors: int, num_meshes: int = 1) -> tuple[int, bytes, bytes]:
    """What one of so many ranks plans: (calls of Python functions, its table, the header of its file)."""
    rank = world_size // 2
    with fake_world(rank, world_size):
        meshes = [init_device_mesh("cpu", (world_size,)) for _ in range(num_meshes)]
        state = {
            f"layers.{index}.weight": DTensor.from_local(
                torch.zeros(1, 2), meshes[index % num_meshes], [Shard(0)], run_check=False
            )
            for index in range(num_tensors)
        }
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            entries = model_state(state, World(rank, tuple(range(world_size)))).entries
            rows = {name: (entry.dtype, spread_replicas(entry.tiling, 4)) for name, entry in entries.items()}
            table = table_of({"model": rows}, {"model": {}}, {"model": {}})
            pieces = list(owned_pieces(entries, rows, rank))
            [file] = rank_files("model", pieces, {"id": "0", "rank": rank, "world": world_size}, LocalStorage())
        finally:
            sys.setprofile(None)
    assert len(pieces) == num_tensors
    assert file.header is not None
    return calls, json.dumps(table).encode(), file.header({piece.name: ["0" * 8] for piece in pieces})


def test_planning_a_save_is_flat_in_ranks() -> None:
    """Every rank plans its own part: the work and the header are the same at 8 and at 4096 ranks, and the table grows
    by the list of ranks, which is there once, not once a tensor."""
    tensors = 50
    plan(8, 2)  # what is done once a process is done
    calls, table, header = plan(8, tensors)
    for world_size in (64, 4096):
        more_calls, larger, same = plan(world_size, tensors)
        assert more_calls <= calls * 1.02 + 50
        assert len(same) == len(header)
        assert len(larger) - len(table) <= 10 * world_size + 4 * tensors
