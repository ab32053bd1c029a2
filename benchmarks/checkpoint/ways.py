"""Ways to save and load the same sharded training state: from, and into, the same memory.

Peers are given flat dicts that are made beforehand (in their favour); fsdp2 gets the module and the optimizer, as users
give them, and its look at them is part of its time.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Shard

import fsdp2.checkpoint

Tensors = Mapping[str, torch.Tensor]
Action = Callable[[Path], Any]

CHUNK = 8 << 20  # of raw reads and writes


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        save: writes a folder; durable when it returns. An asynchronous one returns what waits for that.
        loads: kind of load -> reads the folder into `State` and what hangs from it.
        weights_only: without the optimizer.
    """

    save: Action
    loads: dict[str, Action] = field(default_factory=dict)
    weights_only: bool = False


@dataclass
class State:
    """What is saved.

    Attributes:
        weights: DTensors by FQN.
        moments: the tensors of AdamW's state, by name; DTensors, and the step counts as plain scalars.
        columns: memory for the weights cut along their last dim instead of the first.
        whole: memory for the whole weights on every rank.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    columns: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """After a step of the optimizer."""
        weights = dict(model.state_dict())
        names = {param: name for name, param in model.named_parameters()}
        moments = {
            f"{kind}.{names[param]}": value
            for param, entries in optimizer.state.items()
            for kind, value in entries.items()
        }
        columns, whole = {}, {}
        for name, tensor in weights.items():
            assert isinstance(tensor, DTensor)
            columns[name] = tensor.redistribute(placements=[Shard(tensor.ndim - 1)])
            whole[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return cls(model, optimizer, weights, moments, columns, whole)

    @property
    def everything(self) -> dict[str, torch.Tensor]:
        """Weights and moments."""
        return {**{f"model.{name}": tensor for name, tensor in self.weights.items()}, **self.moments}

    def nbytes(self, tensors: Tensors) -> int:
        """Of this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors.values()))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


# --- the disk, and what is written by hand ----------------------------------------------------------------------------


def rank_path(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}"


def synced(folder: Path, write: Callable[[Path], None]) -> None:
    """Write this rank's file, make it and its name durable."""
    folder.mkdir(parents=True, exist_ok=True)
    write(rank_path(folder))
    for path in (rank_path(folder), folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def raw_save(state: State, folder: Path) -> None:
    """The bytes of all tensors, one after the other, to a file of this rank; nothing else."""

    def write(path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        for tensor in map(local, state.everything.values()):
            view = bytes_of(tensor)
            for at in range(0, len(view), CHUNK):
                os.write(fd, view[at : at + CHUNK])
        os.close(fd)

    synced(folder, write)


def raw_load(state: State, folder: Path) -> None:
    fd = os.open(rank_path(folder), os.O_RDONLY)
    for tensor in map(local, state.everything.values()):
        view = bytes_of(tensor)
        for at in range(0, len(view), CHUNK):
            os.readv(fd, [view[at : at + CHUNK]])
    os.close(fd)


def torch_save(state: State, folder: Path) -> None:
    synced(folder, lambda path: torch.save({name: local(t) for name, t in state.everything.items()}, path))


def torch_load(state: State, folder: Path) -> None:
    stored = torch.load(rank_path(folder), weights_only=True)
    with torch.no_grad():
        for name, tensor in state.everything.items():
            local(tensor).copy_(stored[name])


def gather_save(tensors: Tensors, folder: Path, write: Callable[[dict[str, torch.Tensor], Path], Any]) -> None:
    """All that there is to rank 0, which writes one file."""
    whole = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            whole[name] = full
    if dist.get_rank() == 0:
        synced(folder, lambda path: write(whole, path))
    dist.barrier()


# --- DCP --------------------------------------------------------------------------------------------------------------


def dcp_save(tensors: Tensors, folder: Path, **options: Any) -> None:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, **options))


def dcp_load(tensors: Tensors, folder: Path) -> None:
    dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder))


def dcp_async(
    tensors: Tensors, folder: Path, group: dist.ProcessGroup | None, stager: DefaultStager | None
) -> Callable[[], Any]:
    """Its thread issues collectives, so it needs a group of its own: on the trainer's it deadlocks with the trainer."""
    writer = dcp.FileSystemWriter(folder)
    future = dcp.async_save(dict(tensors), storage_writer=writer, async_stager=stager, process_group=group)
    return future.result  # type: ignore[union-attr, no-any-return]


def dcp_hf_save(state: State, folder: Path) -> None:
    """Shards, which rank 0 then puts together."""
    names = dict.fromkeys(state.weights, 1)
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state.weights), storage_writer=writer)


# --- ours -------------------------------------------------------------------------------------------------------------


def own_save(state: State, folder: Path, **options: Any) -> None:
    fsdp2.checkpoint.save(folder, model=state.model, optimizer=state.optimizer, **options)


def own_load(state: State, folder: Path, **options: Any) -> None:
    fsdp2.checkpoint.load(folder, model=state.model, optimizer=state.optimizer, **options)


def own_async(state: State, folder: Path) -> Callable[[], Any]:
    return fsdp2.checkpoint.save(folder, model=state.model, optimizer=state.optimizer, async_op=True).wait


def ways_of(state: State, group: dist.ProcessGroup | None) -> dict[str, Way]:
    """All ways, by name.

    Args:
        group: all ranks, for what goes on in the background.
    """
    weights = {f"model.{name}": tensor for name, tensor in state.weights.items()}
    columns = {f"model.{name}": tensor for name, tensor in state.columns.items()}
    whole = {f"model.{name}": tensor for name, tensor in state.whole.items()}
    everything = state.everything
    kept = DefaultStager(StagingOptions(False, False, False, False))
    own_loads: dict[str, Action] = {
        "load": lambda folder: own_load(state, folder),
        "load, unchecked": lambda folder: own_load(state, folder, verify=False),
        "columns": lambda folder: fsdp2.checkpoint.load(folder, model=state.columns),
        "whole": lambda folder: fsdp2.checkpoint.load(folder, model=state.whole),
    }
    dcp_loads: dict[str, Action] = {
        "load": lambda folder: dcp_load(everything, folder),
        "columns": lambda folder: dcp_load(columns, folder),
        "whole": lambda folder: dcp_load(whole, folder),
    }
    return {
        "raw": Way(lambda folder: raw_save(state, folder), {"load": lambda folder: raw_load(state, folder)}),
        "fsdp2": Way(lambda folder: own_save(state, folder), own_loads),
        "DCP": Way(lambda folder: dcp_save(everything, folder), dcp_loads),
        "DCP, 4 threads": Way(lambda folder: dcp_save(everything, folder, thread_count=4)),
        "torch.save": Way(lambda folder: torch_save(state, folder), {"load": lambda folder: torch_load(state, folder)}),
        "gather, torch.save": Way(lambda folder: gather_save(everything, folder, torch.save)),
        "fsdp2, async": Way(lambda folder: own_async(state, folder)),
        "DCP, async": Way(lambda folder: dcp_async(everything, folder, group, None)),
        "DCP, async, stager kept": Way(lambda folder: dcp_async(everything, folder, group, kept)),
        "fsdp2, consolidated": Way(
            lambda folder: fsdp2.checkpoint.save(folder, model=state.model, consolidated=True), weights_only=True
        ),
        "DCP, HF + consolidation": Way(lambda folder: dcp_hf_save(state, folder), weights_only=True),
        "gather, safetensors": Way(lambda folder: gather_save(weights, folder, save_file), weights_only=True),
    }


def fetch(folder: Path) -> None:
    """Let the kernel have the files in memory, read from the disk, whoever had written them. What was written through
    the page cache lies there in large folios, what was read in small ones, and copying out of those takes a third
    longer (224 and 164 ms a GiB on the Xeon): loads are compared here, not what saves leave behind. Twice: at the
    second access the kernel moves a page to those that are in use."""
    evict(folder)
    buffer = bytearray(CHUNK)
    for path in [*folder.rglob("*")] * 2:
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def evict(folder: Path) -> None:
    """Let the kernel forget the files, so that the next load reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def remove(folder: Path) -> None:
    """Delete a folder, and wait until the disk has nothing left to do."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
