"""`torch.distributed.checkpoint` and its `state_dict` helpers: the same states as torch's FSDP2, and the same files.

A checkpoint that was written with the one is read with the other, on another number of ranks too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.clients.clients import Run, library_of, run_both, run_script

VOCABULARY, SEQUENCE = 32, 6


def make(seed: int, *, hsdp: bool = False, frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small sharded language model with buffers, odd sizes, and two groups of parameters in its optimizer."""
    torch.manual_seed(seed)
    blocks = [nn.TransformerEncoderLayer(12, 2, 25, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, 12), *blocks, nn.BatchNorm1d(SEQUENCE), nn.Linear(12, VOCABULARY))
    if frozen:
        model[0].requires_grad_(False)
    if hsdp:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [param for param in model.parameters() if param.ndim > 1 and param.requires_grad]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def steps(model: Any, optimizer: torch.optim.Optimizer, first: int, num: int) -> list[float]:
    """Train from step `first` on, two micro-batches a step and clipped; a batch for each data-parallel rank and step.
    The losses of the second ones."""
    losses = []
    for step in range(first, first + num):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            tokens = torch.randint(0, VOCABULARY, (4, SEQUENCE + 1), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(states: Any) -> Any:
    """The same nest with whole tensors in place of DTensors."""
    if isinstance(states, dict):
        return {key: whole(value) for key, value in states.items()}
    if isinstance(states, list):
        return [whole(value) for value in states]
    return states.full_tensor() if isinstance(states, DTensor) else states


def kinds(states: Any) -> Any:
    """What each leaf is: for DTensors with placements and local shape, for tensors with the shape."""
    if isinstance(states, dict):
        return {key: kinds(value) for key, value in states.items()}
    if isinstance(states, list):
        return [kinds(value) for value in states]
    if isinstance(states, DTensor):
        return ("DTensor", str(states.placements), tuple(states.to_local().shape), states.device.type)
    return ("Tensor", tuple(states.shape)) if isinstance(states, Tensor) else type(states).__name__


def fill(states: Any) -> Any:
    """A place of its own for each tensor, to load into."""
    if isinstance(states, dict):
        return {key: fill(value) for key, value in states.items()}
    return torch.zeros_like(states) if isinstance(states, Tensor) else states


OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "sharded_offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full_offloaded": {"full_state_dict": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
}


def get_and_set(options: dict[str, bool], hsdp: bool, frozen: bool) -> Run:
    """States of a model after two steps, put into another model, which goes on with it."""
    dist.init_process_group("gloo")
    model, optimizer = make(0, hsdp=hsdp, frozen=frozen)
    losses = steps(model, optimizer, 0, 2)
    how = StateDictOptions(**options)
    # Copies: optimizers keep the very tensors that they load.
    model_states, optim_states = copy.deepcopy(get_state_dict(model, optimizer, options=how))
    only_model = copy.deepcopy(get_model_state_dict(model, options=how))
    only_optim = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=how))
    # With full_state_dict and cpu_offload only rank 0 gets the states; it gives them to the others.
    lonely = options.get("full_state_dict", False) and options.get("cpu_offload", False)
    values = {
        "states": [whole(model_states), whole(optim_states), whole(only_model), whole(only_optim)],
        "kinds": [kinds(model_states), kinds(optim_states), kinds(only_model), kinds(only_optim)],
    }
    back = StateDictOptions(**options | ({"broadcast_from_rank0": True, "cpu_offload": False} if lonely else {}))
    other, other_optimizer = make(1, hsdp=hsdp, frozen=frozen)
    if lonely:  # `set_state_dict` takes the empty dict of the other ranks for "no model", and hangs
        missing = set_model_state_dict(other, model_state_dict=model_states, options=back)
        set_optimizer_state_dict(other, other_optimizer, optim_states, options=back)
    else:
        missing = set_state_dict(
            other, other_optimizer, model_state_dict=model_states, optim_state_dict=optim_states, options=back
        )
    third, third_optimizer = make(2, hsdp=hsdp, frozen=frozen)
    set_model_state_dict(third, only_model, options=back)
    set_optimizer_state_dict(third, third_optimizer, only_optim, options=back)
    values["missing"] = [list(missing.missing_keys), list(missing.unexpected_keys)]
    for again, again_optimizer in ((other, other_optimizer), (third, third_optimizer)):
        losses += steps(again, again_optimizer, 2, 2)
    assert losses[-4:-2] == losses[-2:]
    return Run(losses, library_of(model, other, third), values)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states(options: dict[str, bool]) -> None:
    run_both(get_and_set, 2, options=options, hsdp=False, frozen=False).assert_equal()


def test_states_of_hsdp_with_frozen_parameters() -> None:
    run_both(get_and_set, 4, options={}, hsdp=True, frozen=True).assert_equal()


def save(folder: str, asynchronous: bool = False, hsdp: bool = False) -> Run:
    """Ten steps, a checkpoint, and what the next ten steps would be."""
    dist.init_process_group("gloo")
    model, optimizer = make(0, hsdp=hsdp)
    steps(model, optimizer, 0, 10)
    model_states, optim_states = get_state_dict(model, optimizer)
    states = {"model": model_states, "optim": optim_states}
    if asynchronous:
        # It communicates beside the training, so on a group of its own.
        future: Any = dcp.async_save(states, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        losses = steps(model, optimizer, 10, 10)  # the checkpoint has what was there when it was asked for
        future.result()
    else:
        dcp.save(states, checkpoint_id=folder)
        losses = steps(model, optimizer, 10, 10)
    return Run(losses, library_of(model), {"parameters": whole(get_model_state_dict(model))})


def load(folder: str, hsdp: bool = False) -> Run:
    """Another model goes on from the checkpoint; it also says what it found."""
    dist.init_process_group("gloo")
    model, optimizer = make(1, hsdp=hsdp)
    model_states, optim_states = get_state_dict(model, optimizer)
    states = {"model": fill(model_states), "optim": fill(optim_states)}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    found = whole(states)
    losses = steps(model, optimizer, 10, 10)
    return Run(losses, library_of(model), {"parameters": whole(get_model_state_dict(model))}, {"found": found})


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_files_of_one_are_read_by_the_other(asynchronous: bool, tmp_path: Path) -> None:
    """Either writes, either reads: four runs that go on alike, bit by bit."""
    folders = {library: str(tmp_path / library) for library in ("torch", "fsdp2")}
    saved = {
        library: run_script(save, 2, library, folder=folder, asynchronous=asynchronous)
        for library, folder in folders.items()
    }
    expected = [(run.losses, run.values) for run in saved["torch"]]
    assert len(expected[0][0]) == 10
    for writer, folder in folders.items():
        for reader in folders:
            runs = run_script(load, 2, reader, folder=folder)
            for run, (losses, values) in zip(runs, expected, strict=True):
                assert run.losses == losses, f"written with {writer}, read with {reader}"
                for name, value in values["parameters"].items():
                    # The statistics of batches are each rank's own; a checkpoint has those of one rank.
                    if "running" not in name:
                        assert torch.equal(run.values["parameters"][name], value), name
                assert run.library[reader] > 0


def test_files_of_four_ranks_are_read_on_two(tmp_path: Path) -> None:
    """HSDP on four ranks, then two ranks: both find the same values, and go on alike."""
    folder = str(tmp_path)
    run_script(save, 4, "fsdp2", folder=folder, hsdp=True)
    both = run_both(load, 2, folder=folder)
    both.assert_equal()
    for theirs, ours in zip(both.torch, both.ours, strict=True):
        for name, value in theirs.notes["found"]["model"].items():
            assert torch.equal(ours.notes["found"]["model"][name], value), name
