"""`tune_lanes`: the same answer on all ranks, kept in a file, and the same training whatever it says."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp2 import ArgumentError, fully_shard, tune_lanes
from fsdp2.extras import tuning
from fsdp2.runtime.unit import unit_of
from tests.helpers.models import check_step
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks


@pytest.mark.parametrize(
    ("direct", "packed", "limit"),
    [
        ([9, 5, 2, 1], [1, 2, 4, 8], 4),
        ([1, 1, 1, 1], [2, 2, 2, 2], 1),
        ([2, 2, 2, 2], [1, 1, 1, 1], None),
        ([9, 1, 9, 1], [1, 8, 8, 8], 2),  # one disturbed time does not decide
        ([9, 5, 1, 9], [1, 2, 8, 8.5], 4),  # nor does it at the largest size
    ],
)
def test_best_limit(direct: list[float], packed: list[float], limit: int | None) -> None:
    sizes = [1, 2, 4, 8]
    found = tuning.best_limit(dict(zip(sizes, direct, strict=True)), dict(zip(sizes, packed, strict=True)))
    assert found == limit


def model_of(mesh: Any, plain: nn.Sequential) -> nn.Sequential:
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tune(model: nn.Module, **options: Any) -> dict[str, int | None]:
    """`tune_lanes`, but measuring two sizes in place of twelve."""
    sizes = tuning._SHARD_BYTES
    tuning._SHARD_BYTES = sizes[:2]
    try:
        return tune_lanes(model, **options)
    finally:
        tuning._SHARD_BYTES = sizes


def limits(model: nn.Module) -> set[int | None]:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return {group.channel.comm.direct_min_bytes for unit in units for group in unit.groups}


def same_on_all(value: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(each == value for each in values)


@pytest.mark.exhaustive
@on_ranks(2)
def test_measured_once_and_kept(rank: int, world_size: int, tmp_path: Path) -> None:
    """The second model finds the answer of the first in the file, and measures nothing."""
    plain = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
    file = tmp_path / "lanes.json"
    model = model_of(None, plain)
    answers = tune_lanes(model, file=file)
    ((key, limit),) = answers.items()
    assert "gloo" in key and "2 x 1 ranks" in key and same_on_all(answers)
    assert limit is None or limit in tuning._SHARD_BYTES
    assert limits(model) == {limit}
    dist.barrier()
    assert json.loads(file.read_text()) == answers
    check_step(model, plain, rank, world_size)

    other = limit and limit * 2
    if rank == 0:
        file.write_text(json.dumps({key: other or 8192, "another": None}))
    dist.barrier()
    second = model_of(None, plain)
    assert tune(second, file=file) == {key: other or 8192}
    assert limits(second) == {other or 8192}
    dist.barrier()
    assert set(json.loads(file.read_text())) == {key, "another"}


@on_ranks(2)
def test_lanes_change_between_steps(rank: int, world_size: int, tmp_path: Path) -> None:
    """A model that has trained on the one lane trains on the other, with the same gradients."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = model_of(None, plain)
    key = next(iter(tune(model)))
    for limit in (0, None, 0):
        file = tmp_path / f"{limit}-{rank}.json"  # a file of each rank's own serves too
        file.write_text(json.dumps({key: limit}))
        assert tune(model, file=file) == {key: limit}
        check_step(model, plain, rank, world_size)


@on_ranks(2)
@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', "differs"])
def test_files_that_do_not_serve(rank: int, world_size: int, tmp_path: Path, content: str) -> None:
    """Ranks whose files disagree, or cannot be read, measure; they do not wait for each other for ever."""
    model = model_of(None, nn.Sequential(nn.Linear(4, 4)))
    file = tmp_path / f"{rank}.json"
    if content == "differs":
        key = next(iter(tune(model)))
        file.write_text(json.dumps({key: 4096 * (rank + 1)}))
        answers = tune(model, file=file)
    else:
        if rank == 1:
            file.write_text(content)
        with pytest.warns(UserWarning, match=r"1\.json") if rank == 1 else nullcontext():
            answers = tune(model, file=file)
    assert same_on_all(answers)
    if rank == 0:
        assert json.loads(file.read_text()) == answers


@on_ranks(4)
def test_replicas_agree(rank: int, world_size: int) -> None:
    """Their gradients meet in one flat all-reduce, whose order follows from the lanes."""
    plain = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))
    model = model_of(mesh_2d(2, 2), plain)
    answers = tune(model)
    assert same_on_all(answers) and len(answers) == 1 and "2 x 2 ranks" in next(iter(answers))
    check_step(model, plain, rank, world_size)


@on_ranks(2)
def test_nothing_to_tune(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="nothing in this Linear is sharded"):
        tune(nn.Linear(2, 2))
    one = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    assert tune(one) == {}


@on_ranks(2)
def test_a_file_that_cannot_be_written(rank: int, world_size: int, tmp_path: Path) -> None:
    """The rank that writes once raised, while the other went on into a step that it waited in."""
    plain = nn.Sequential(nn.Linear(4, 4))
    model = model_of(None, plain)
    with pytest.warns(UserWarning, match="could not be written") if rank == 0 else nullcontext():
        answers = tune(model, file=tmp_path / "no such folder" / "lanes.json")
    assert same_on_all(answers)
    check_step(model, plain, rank, world_size)


@on_ranks(2)
def test_while_a_gather_is_under_way(rank: int, world_size: int) -> None:
    """The gather that was issued on the old lanes was looked for among those on the new ones."""
    plain = nn.Sequential(nn.Linear(4, 4))
    model = model_of(None, plain)
    handle = model.unshard(async_op=True)
    tune(model)
    handle.wait()
    check_step(model, plain, rank, world_size)
