"""DCP folders: written by torch's FSDP2, FSDP1 and plain models and by ours, read into any sharding."""

from __future__ import annotations

import copy
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
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint.formats.dcp import open_dcp
from fsdp2.checkpoint.schema.dtypes import DTYPES
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.errors import MismatchError
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


def made(seed: int, library: str | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded if a library is named, and its optimizer with two groups."""
    model: nn.Module = Net(seed)
    if library is not None:
        shard = LIBRARIES[library]
        for layer in (model.up, model.down):
            shard(layer)
        shard(model, ignored_params={model.frozen} if library == "torch" else None)
    decayed = [model.embed.weight, model.up.weight, model.down.weight]
    others = [param for param in model.parameters() if param.requires_grad and not any(param is one for one in decayed)]
    groups = [{"params": decayed, "lr": 0.05}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        tokens = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone() if isinstance(tensor, Tensor) else tensor


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values, whole, by FQN."""
    names = {param: name for name, param in model.named_parameters()}
    result = {f"model {name}": whole(value) for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            result[f"options {names[param]}"] = {key: value for key, value in group.items() if key != "params"}
            for key, value in optimizer.state[param].items():
                result[f"{key} {names[param]}"] = whole(value)
    return result


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def saved_by_dcp(rank: int, world_size: int, folder: Path, library: str, flat: bool, keys: list[str]) -> None:
    model, optimizer = made(1, library)
    train(model, optimizer, rank)
    expected = content(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({keys[0]: model_state, keys[1]: optimizer_state, "train_state": {"step": 2}}, checkpoint_id=folder / "dcp")
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def loads_what_was_saved(rank: int, world_size: int, folder: Path, name: str) -> None:
    model, optimizer = made(2, "ours")
    loaded = checkpoint.load(folder / name, model=model, optimizer=optimizer)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    assert_same(content(model, optimizer), torch.load(folder / "expected.pt"))
    train(model, optimizer, rank, 1)  # what came back can be trained on


@pytest.mark.parametrize(
    ("library", "flat", "keys"),
    [
        ("ours", False, ["model", "optimizer"]),
        ("ours", True, ["model", "optim"]),
        ("torch", True, ["app.model", "app.optim"]),
        ("torch", False, ["my_net", "adam"]),
    ],
)
def test_dcp_of_fully_sharded_models(tmp_path: Path, library: str, flat: bool, keys: list[str]) -> None:
    """`torch.distributed.checkpoint` saves our models and torch's on two ranks; we load on 1, 2, 4: bit-equal."""
    run_on_ranks(saved_by_dcp, 2, folder=tmp_path, library=library, flat=flat, keys=keys)
    for world_size in (1, 2, 4):
        run_on_ranks(loads_what_was_saved, world_size, folder=tmp_path, name="dcp")


def saved_by_fsdp1(rank: int, world_size: int, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so in several places
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))
        model = FSDP1(plain, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 5) * rank).sum().backward()
        optimizer.step()
        kinds = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
        FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *kinds)
        state = {"model": model.state_dict(), "optimizer": FSDP1.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / "dcp")
        # FSDP1 makes ShardedTensors here, not DTensors: other boxes, another way into the metadata.
        assert isinstance(state["model"]["0.weight"], ShardedTensor)
        expected = {name: gathered(tensor, rank) for name, tensor in state["model"].items()}
        moments = {
            name: {key: gathered(value, rank) for key, value in values.items()}
            for name, values in state["optimizer"]["state"].items()
        }
    if rank == 0:
        torch.save([expected, moments], folder / "expected.pt")


def gathered(tensor: Any, rank: int) -> Tensor:
    if not isinstance(tensor, ShardedTensor):
        return tensor
    full = torch.empty(tensor.size()) if rank == 0 else None
    tensor.gather(0, full)
    return full


def loads_fsdp1(rank: int, world_size: int, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    checkpoint.load(folder / "dcp", model=model, optimizer=optimizer)
    expected, moments = torch.load(folder / "expected.pt")
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), expected[name]), name
        for key, value in optimizer.state[param].items():
            assert torch.equal(whole(value), moments[name][key]), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.1


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


def test_flat_model_at_the_top(tmp_path: Path) -> None:
    """As torchtitan saves: the model's names at the top, the rest under keys; numbers and extra state besides."""
    model, optimizer = made(1)
    train(model, optimizer, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(2), "losses": [0.5]},
        "dataloader": {"position": 17},
    }
    save_dcp(tmp_path / "dcp", state)
    other, other_optimizer = made(2)
    checkpoint.load(tmp_path / "dcp", model=other, optimizer=other_optimizer)
    assert_same(content(other, other_optimizer), content(model, optimizer))
    catalog = open_dcp(*storage_of(tmp_path / "dcp"))
    assert catalog.left_out[""].keys() == {"train_state.step", "train_state.losses", "dataloader.position"}


def test_optimizer_of_plain_torch(tmp_path: Path) -> None:
    """`optimizer.state_dict()` itself has numbers for names: nobody knows whose state it is, and the error says what is
    missing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_dcp(tmp_path / "numbers", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MismatchError, match=r"optimizer state of '0.weight'"):
        checkpoint.load(tmp_path / "numbers", model=model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
