"""Ranks that read different folders: all are told before a tensor changes."""

import json
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.errors import MismatchError
from tests.helpers.ranks import on_ranks


def write(kind: str, folder: Path, value: int) -> None:
    """What one process alone has saved: a model of these values."""
    state = {"weight": torch.full((4, 4), float(value)), "bias": torch.full((4,), float(value))}
    folder.mkdir(parents=True)
    if kind == "Hugging Face":
        save_file(state, folder / "model.safetensors")
    elif kind == "DCP":
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=folder, no_dist=True)
    else:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        checkpoint.save(folder, model=state, step=value, process_group=alone[dist.get_rank()])


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["fsdp2", "Hugging Face", "DCP"])
def test_a_rank_that_loads_from_another_folder(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    """The last rank resumes from another step, or its own disk has another model under the same name."""
    value = 20 if rank == world_size - 1 else 10
    run = tmp_path / f"disk-{rank}"
    write(kind, run / "net", value)
    folder = checkpoint.latest(run / "net") if kind == "fsdp2" else run / "net"
    assert folder is not None
    model = nn.Linear(4, 4)
    fsdp2.fully_shard(model)
    before = [param.to_local().clone() for param in model.parameters()]
    begun = time.monotonic()
    with pytest.raises(MismatchError, match="ranks load different checkpoints") as caught:
        checkpoint.load(folder, model=model)
    assert time.monotonic() - begun < 60
    assert all(torch.equal(param.to_local(), old) for param, old in zip(model.parameters(), before, strict=True))
    for other in range(world_size):
        assert f"disk-{other}/net" in str(caught.value)
    if kind == "fsdp2":
        assert "step 10" in str(caught.value) and "step 20" in str(caught.value)


@on_ranks(2)
def test_the_same_model_in_another_place(rank: int, world_size: int, tmp_path: Path) -> None:
    """One rank has it as the hub's cache does, by links to files with other names; the other has a copy."""
    states = {"model-1.safetensors": {"weight": torch.ones(4, 4)}, "model-2.safetensors": {"bias": torch.zeros(4)}}
    folder = tmp_path / str(rank) / "snapshots" / "main"
    folder.mkdir(parents=True)
    (tmp_path / str(rank) / "blobs").mkdir()
    for blob, (name, state) in zip("ba", states.items(), strict=True):
        place = folder / name if rank == 0 else tmp_path / str(rank) / "blobs" / blob
        save_file(state, place)
        if rank:
            (folder / name).symlink_to(place)
    places = {key: name for name, state in states.items() for key in state}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = nn.Linear(4, 4)
    checkpoint.load(folder, model=model)
    assert model.weight.eq(1).all()
