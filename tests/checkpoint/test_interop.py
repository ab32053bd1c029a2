"""DCP folders: written by torch's FSDP2, FSDP1 and plain models and by ours, read into any sharding."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint.schema.dtypes import DTYPES
from fsdp2.errors import UnsupportedError
from tests.helpers.dcp_saves import save_dcp
from tests.helpers.ranks import run_on_ranks

LIBRARIES = {"ours": fsdp2.fully_shard, "torch": torch.distributed.fsdp.fully_shard}


class Net(nn.Module):
    """Uneven shapes, tied weights, two dtypes, a scalar, buffers that are integer and boolean, a frozen parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.register_buffer("seen", torch.tensor(seed))
        self.register_buffer("mask", torch.tensor([True, False, bool(seed % 2)]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.down(torch.relu(self.up(self.embed(tokens))).bfloat16()).float()
        return self.head(self.norm(hidden))


def made(seed: int, library: str | None = None) -> nn.Module:
    """A model, sharded if a library is named."""
    model: nn.Module = Net(seed)
    if library is not None:
        shard = LIBRARIES[library]
        for layer in (model.up, model.down):
            shard(layer)
        shard(model, ignored_params={model.frozen} if library == "torch" else None)
    return model


def trained(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    tokens = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(rank))
    model(tokens).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def content(state: dict[str, Any]) -> dict[str, Tensor]:
    """All values, whole."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def saved_by_dcp(rank: int, world_size: int, folder: Path, library: str, flat: bool, keys: list[str]) -> None:
    model = made(1, library)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, trained(model, rank), options=options)
    states = {keys[0]: model_state, keys[1]: optimizer_state}
    dcp.save({"app": states} if flat else {**states, "train_state": {"step": 2}}, checkpoint_id=folder / "dcp")
    expected = content(model.state_dict())
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def loads_what_was_saved(rank: int, world_size: int, folder: Path) -> None:
    model = made(2, "ours")
    loaded = checkpoint.load(folder / "dcp", model=model)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    expected, found = torch.load(folder / "expected.pt"), content(model.state_dict())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    with pytest.raises(UnsupportedError, match=r"dcp: of a DCP folder only the model is read.*leave optimizer= out"):
        checkpoint.load(folder / "dcp", model=model, optimizer=trained(model, rank))


@pytest.mark.parametrize(
    ("library", "flat", "keys"),
    [
        ("ours", False, ["model", "optimizer"]),
        ("ours", True, ["model", "optim"]),
        ("torch", True, ["model", "optim"]),
        ("torch", False, ["net", "adam"]),
    ],
)
def test_dcp_of_fully_sharded_models(tmp_path: Path, library: str, flat: bool, keys: list[str]) -> None:
    """`torch.distributed.checkpoint` saves our models and torch's on two ranks; we load on 1, 2, 4: bit-equal."""
    run_on_ranks(saved_by_dcp, 2, folder=tmp_path, library=library, flat=flat, keys=keys)
    for world_size in (1, 2, 4):
        run_on_ranks(loads_what_was_saved, world_size, folder=tmp_path)


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))


def saved_by_fsdp1(rank: int, world_size: int, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so in several places
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
        from torch.distributed.fsdp import StateDictType

        model = FSDP1(two_layers(), device_id=torch.device("cpu"), use_orig_params=True)
        FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=folder / "dcp")
    # FSDP1 makes ShardedTensors here, not DTensors: other boxes, another way into the metadata.
    assert isinstance(state["model"]["0.weight"], ShardedTensor)


def loads_fsdp1(rank: int, world_size: int, folder: Path) -> None:
    expected, model = two_layers().state_dict(), two_layers()
    for param in model.parameters():
        nn.init.zeros_(param)
    fsdp2.fully_shard(model)
    checkpoint.load(folder / "dcp", model=model)
    found = content(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_dcp_of_fsdp1(tmp_path: Path) -> None:
    """Sharded state dicts of FullyShardedDataParallel on two ranks."""
    run_on_ranks(saved_by_fsdp1, 2, folder=tmp_path)
    for world_size in (1, 2, 3):
        run_on_ranks(loads_fsdp1, world_size, folder=tmp_path)


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_every_dtype_and_layout(tmp_path: Path, options: dict[str, Any]) -> None:
    """All dtypes of safetensors, empty and 0-dim tensors, and views."""
    torch.manual_seed(0)
    state = {
        name: torch.randint(0, 256, (3, 4, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
        if dtype != torch.bool
        else torch.rand(3, 4) > 0.5
        for name, dtype in DTYPES.items()
    }
    state["view"] = torch.randn(5, 6)[1:4, 2:5]
    state["scalar"], state["empty"], state["one"] = torch.tensor(7), torch.zeros(0, 3), torch.randn(1, 1)
    save_dcp(tmp_path / "dcp", {"model": state}, **options)
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    checkpoint.load(tmp_path / "dcp", model=found)
    for name, value in state.items():
        left, right = found[name].contiguous(), value.contiguous()
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)) if left.ndim else left == right, name
