"""Memory of `to_empty` that nobody fills is an error at the first forward, and filled memory never is."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2.checkpoint
from fsdp2 import OrderError, fully_shard
from fsdp2.init import materialize, seeded
from tests.helpers.parity_models import full, local, shard_like
from tests.helpers.ranks import on_ranks


class Net(nn.Module):
    """Parameters with one row (no shard on all ranks but one), buffers of several dtypes, small ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)])
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("flag", torch.ones((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.blocks[0](self.embed(x)))
        return self.blocks[1](y)  # type: ignore[no-any-return]

    def init_weights(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.flag.fill_(True)


def sharded(root: bool = True) -> Any:
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model) if root else model


def step(model: nn.Module) -> torch.Tensor:
    loss = model(torch.arange(11)).square().sum()
    loss.backward()
    return loss.detach()


@on_ranks(2, 4)
@pytest.mark.parametrize("then", ["bfloat16", "copy", "emptied twice", "unshard", "trained before"])
def test_nobody_fills_it(rank: int, world_size: int, then: str) -> None:
    """A loss of NaN, or of whatever was in memory before, without a word. What is left is named, and what to call."""
    model = sharded()
    if then == "trained before":
        materialize(model, seed=0)
        step(model)
    model.to_empty(device="cpu")
    if then == "bfloat16":
        model.to(torch.bfloat16)
    elif then == "copy":
        model = copy.deepcopy(model)
    elif then == "emptied twice":
        model.to_empty(device="cpu")
    elif then == "unshard":
        model.unshard()
    for _ in range(2):  # it stays an error until something is done
        with pytest.raises(OrderError) as caught:
            model(torch.arange(11))
        assert "embed.weight" in str(caught.value) and "materialize(model)" in str(caught.value)
        assert "norm.running_mean" in str(caught.value) and ("blocks.1.weight" in str(caught.value)) == (rank == 0)
    model.reshard()  # what is written to unsharded parameters is lost
    with seeded(0):
        model.init_weights()
    assert step(model.float()).isfinite()


@on_ranks(2)
def test_one_is_left(rank: int, world_size: int) -> None:
    """An initialisation that knows every layer but one. A root that is not sharded is emptied, too."""
    model = sharded(root=False)
    model.to_empty(device="cpu")
    with seeded(0):
        model.embed.reset_parameters()
        model.norm.reset_parameters()
        nn.init.normal_(model.blocks[0].weight)
        model.blocks[1].reset_parameters()
    with pytest.raises(OrderError, match=r"to_empty allocated bias, and"):
        model(torch.arange(11))


Values = dict[str, torch.Tensor]


def pairs(model: Any, values: Values) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank holds, and what should be there."""
    for name, tensor in model.state_dict().items():
        part = shard_like(values[name], tensor)
        assert part is not None
        yield local(tensor), part


def by_initialisation(model: Any, values: Values, folder: Path) -> None:
    with seeded(0):
        model.init_weights()


def by_data(model: Any, values: Values, folder: Path) -> None:
    for name, tensor in model.state_dict().items():
        tensor.data.copy_(laid_out(values[name], tensor))


def by_numpy(model: Any, values: Values, folder: Path) -> None:
    for tensor, part in pairs(model, values):
        tensor.detach().numpy()[...] = part.numpy()


def laid_out(value: torch.Tensor, tensor: Any) -> torch.Tensor:
    is_sharded = isinstance(tensor, DTensor)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements) if is_sharded else value


def by_load_state_dict(model: Any, values: Values, folder: Path) -> None:
    state = model.state_dict()
    model.load_state_dict({name: laid_out(value, state[name]) for name, value in values.items()})


def by_dcp(model: Any, values: Values, folder: Path) -> None:
    saved = sharded()
    materialize(saved, seed=0)
    by_load_state_dict(saved, values, folder)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    dcp.load(model.state_dict(), checkpoint_id=folder)


def by_our_checkpoint(model: Any, values: Values, folder: Path) -> None:
    if dist.get_rank() == 0:
        save_file(values, folder / "model.safetensors")
    dist.barrier()
    fsdp2.checkpoint.load(folder, model=model)


WAYS: list[Callable[[Any, Values, Path], None]] = [
    by_initialisation,
    by_data,
    by_numpy,
    by_load_state_dict,
    by_dcp,
    by_our_checkpoint,
]


@on_ranks(2, 4)
@pytest.mark.parametrize("fill", WAYS)
def test_no_false_alarm(rank: int, world_size: int, tmp_path: Any, fill: Any) -> None:
    """However a model is filled, also where torch notices nothing (`.data`, NumPy, files read into memory)."""
    torch.manual_seed(0)
    values = {name: value.clone() for name, value in Net().state_dict().items()}
    model = sharded()
    model.to_empty(device="cpu")
    with torch.no_grad():
        fill(model, values, tmp_path)
    before = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}
    if fill is not by_initialisation:
        assert all(torch.equal(before[name], value) for name, value in values.items())
    assert step(model).isfinite()


class Rotary(nn.Module):
    """A layer with a table that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_buffers(self) -> None:
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.table)  # type: ignore[no-any-return]


@on_ranks(2)
@pytest.mark.parametrize("resets", [True, False])
def test_buffers_that_no_checkpoint_has(rank: int, world_size: int, resets: bool) -> None:
    """A rotary table stayed what was in memory. A warning, once: some modules write such buffers in forward."""
    with torch.device("meta"):
        model: Any = Rotary()
    fully_shard(model)
    model.to_empty(device="cpu")
    with seeded(0):
        model.linear.reset_parameters()
    if resets:
        model.reset_buffers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(4)), model(torch.ones(4))
    assert ["to_empty allocated table, and" in str(each.message) for each in caught] == [True] * (not resets)
