"""Ways to make a sharded model with values: what is timed, and what is known of each in advance.

Each builds the model, cuts it into the same units and gives it values, from seed 0. `torch` is torch's FSDP2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
import fsdp2.checkpoint
from benchmarks import common
from fsdp2.init import materialize


@dataclass(frozen=True)
class Size:
    """A model: about `billions` parameters, of which the largest tensor has ``4 * dim**2`` or ``vocab * dim``."""

    billions: float
    dim: int
    blocks: int
    vocab: int = 8192

    def build(self, dtype: torch.dtype) -> nn.Module:
        """As a script does it: with the values of the modules' constructors."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return common.GPT(self.vocab, 512, self.dim, self.dim // 64, self.blocks)
        finally:
            torch.set_default_dtype(default)


SIZES = {size.billions: size for size in (Size(0.1, 768, 12), Size(1, 2048, 19), Size(4, 3072, 35))}

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        make: from the builder and the folder of a checkpoint to the sharded model.
        whole: on how many ranks the whole model is in memory at one time: all (None), one, or none (0).
        on_paper: is measured on one rank of many that are not there, too: nothing depends on what they send.
    """

    make: Callable[[Build, Path], nn.Module]
    whole: int | None = 0
    on_paper: bool = True

    def total_bytes(self, model_bytes: int, ranks: int) -> int:
        """What all ranks hold together at the peak, at least: whole models, and the shards."""
        copies = ranks if self.whole is None else self.whole
        return model_bytes * (copies if self.whole is None else copies + 1)


def shard(model: nn.Module, library: Any = fsdp2) -> nn.Module:
    """A unit for each block, and the root."""
    for block in model.blocks:
        library.fully_shard(block)
    return library.fully_shard(model)


def on_meta(build: Build, library: Any = fsdp2) -> nn.Module:
    with torch.device("meta"):
        model = build()
    return shard(model, library)


def eager(build: Build, folder: Path, library: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(build(), library)


def torch_meta(build: Build, folder: Path) -> nn.Module:
    """torch's recipe: `to_empty`, then each module's own `reset_parameters`; each rank draws its rows by itself."""
    model = on_meta(build, torch.distributed.fsdp)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    return model


def rank0_broadcast(build: Build, folder: Path) -> nn.Module:
    """The sequence of Accelerate's loading with little memory: rank 0 has the model, the others are on the meta device;
    one parameter after another is broadcast whole, and distributed from rank 0's copy."""
    values = {}
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        values = build().state_dict()
    model = on_meta(build, torch.distributed.fsdp)
    sharded = {}
    for name, param in model.state_dict().items():
        whole = values[name] if values else torch.empty(param.shape, dtype=param.dtype)
        dist.broadcast(whole, src=0)
        assert isinstance(param, DTensor)
        sharded[name] = distribute_tensor(whole, param.device_mesh, param.placements)
    model.load_state_dict(sharded, assign=True)
    return model


def ours(build: Build, folder: Path, **options: Any) -> nn.Module:
    model = on_meta(build)
    materialize(model, **options)
    return model


def loaded(build: Build, folder: Path) -> nn.Module:
    model = on_meta(build)
    fsdp2.checkpoint.load(folder, model=model)
    return model


SAVED_BY = "fsdp2 materialize, sequential"
WAYS = {
    "eager, then shard (torch)": Way(
        functools.partial(eager, library=torch.distributed.fsdp), whole=None, on_paper=False
    ),
    "eager, then shard (fsdp2)": Way(functools.partial(eager, library=fsdp2), whole=None, on_paper=False),
    "rank 0, then broadcast (torch)": Way(rank0_broadcast, whole=1, on_paper=False),
    "meta, to_empty, reset (torch)": Way(torch_meta),
    SAVED_BY: Way(functools.partial(ours, seed=0)),
    "fsdp2 materialize, blocks": Way(functools.partial(ours, seed=0, mode="blocks")),
    "fsdp2 checkpoint.load": Way(loaded, on_paper=False),
}


def fingerprint(model: nn.Module) -> int:
    """A number of all values' bits and their places, the same however the model is sharded (dim 0), modulo 2**63.
    Collective."""
    total = torch.zeros((), dtype=torch.int64)
    for index, param in enumerate(model.parameters()):
        assert isinstance(param, DTensor)
        local, start = param.to_local().detach(), first_row(param)
        words = local.flatten(1) if local.ndim > 1 else local.view(-1, 1)
        bits = words.view({2: torch.int16, 4: torch.int32}[param.element_size()])
        for row in range(0, len(bits), 1024):
            part = bits[row : row + 1024].sum(1, dtype=torch.int64)
            places = torch.arange(start + row, start + row + len(part))
            total += (part * (2 * places + 1)).sum() * (2 * index + 1)
    dist.all_reduce(total)
    return int(total.item())


def first_row(param: DTensor) -> int:
    """The first of this rank's rows in the whole tensor."""
    chunk = -(-param.shape[0] // dist.get_world_size())
    return min(param.shape[0], chunk * dist.get_rank())
