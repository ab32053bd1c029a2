"""DCP folders that are not what they seem: several models, files of two saves, damaged values, odd steps, nested extra
state."""

from __future__ import annotations

import collections
import io
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from fsdp2 import checkpoint
from fsdp2.checkpoint.__main__ import main
from fsdp2.checkpoint.formats.dcp import open_dcp
from fsdp2.checkpoint.formats.foreign_state import find_model
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.errors import CorruptError, MismatchError, UnsupportedError
from tests.helpers.dcp_saves import save_dcp, save_dcp_without_collectives
from tests.helpers.ranks import run_on_ranks


def weights(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((4,), value), "b": torch.full((2, 3), value)}


def loaded(folder: Path) -> float:
    """The value of a model of which all weights have the same."""
    found = weights(-1)
    checkpoint.load(folder, model=found)
    values = {float(value) for tensor in found.values() for value in tensor.flatten()}
    assert len(values) == 1
    return values.pop()


# --- which tensors are the model's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"state_dict": weights(1), "ema": {"model": weights(9)}},
        {"weights": weights(1), "ema": {"inner": {"model": weights(9)}}},
        {**weights(1), "ema": {"model": weights(9)}},
        {"state_dict": {"model": weights(1), "ema": {"model": weights(9)}}},
        {"app": {"model": weights(1), "ema": {"model": weights(9)}}, "rng": torch.zeros(3)},
        {"a": {"net": weights(9)}, "b": {"model": weights(1)}},
    ],
)
def test_outermost_model_counts(tmp_path: Path, state: dict[str, Any]) -> None:
    """Averaged weights beside the model, under a likelier key further in."""
    assert loaded(save_dcp(tmp_path / "dcp", state)) == 1


def test_several_models_are_an_error(tmp_path: Path) -> None:
    """Nobody knows which is meant; what the message advises works."""
    folder = save_dcp(tmp_path / "dcp", {"trainer": {"model": weights(1)}, "ema": {"model": weights(9)}})
    with pytest.raises(MismatchError, match=r"dcp: .*'ema\.model', 'trainer\.model'.*checkpoint\.load"):
        loaded(folder)
    model = weights(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"trainer": {"model": model}}, checkpoint_id=folder, no_dist=True)
    checkpoint.save(tmp_path / "alone", model=model).wait()
    assert loaded(tmp_path / "alone") == 1


def test_a_model_with_submodules_called_model() -> None:
    """A key below the model's own is a part of it."""
    assert find_model([("model", "net", "w"), ("model", "w")])[0] == ("model",)
    assert find_model([("state_dict", "model", "w"), ("state_dict", "w")])[0] == ("state_dict",)
    assert find_model([("state_dict", "model", "w"), ("state_dict", "ema", "w")])[0] == ("state_dict", "model")


# --- saved without collectives ----------------------------------------------------------------------------------------


def save_alone_on_each(rank: int, world_size: int, folder: Path, value: float, numel: int, **others: Any) -> None:
    """Each rank's part of a sharded tensor, and a tensor that all have."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.full((numel,), value)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "r": distribute_tensor(whole + rank, mesh, [Replicate()])}
    save_dcp_without_collectives(folder / "dcp", {"model": state, **others})


def found_in(folder: Path, numel: int) -> Tensor:
    model = {"w": torch.zeros(numel), "r": torch.zeros(numel)}
    checkpoint.load(folder, model=model)
    return model["w"]


@pytest.mark.parametrize(("before", "after"), [((4, 8), (2, 8)), ((4, 8), (3, 8))])
def test_files_of_two_saves(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    """An older save on more ranks: never a mixture. Where the parts that are left contradict the others, an error."""
    for value, (world_size, numel) in ((1.0, before), (2.0, after)):
        run_on_ranks(save_alone_on_each, world_size, folder=tmp_path, value=value, numel=numel)
    if after[0] == 2:
        with pytest.raises(CorruptError, match=r"__2\.metadata: 'model\.w'.*__2_0\.distcp.*__1_0\.distcp.*two saves"):
            found_in(tmp_path / "dcp", 8)
    else:  # rank 3 had, and has on the other world's rank 2, the last two rows
        assert torch.equal(found_in(tmp_path / "dcp", 8), torch.full((8,), 2.0))


def test_shapes_of_two_saves(tmp_path: Path) -> None:
    run_on_ranks(save_alone_on_each, 4, folder=tmp_path, value=1.0, numel=8)
    run_on_ranks(save_alone_on_each, 2, folder=tmp_path, value=2.0, numel=16)
    with pytest.raises(
        CorruptError, match=r"__2\.metadata: 'model\.\w' is F32 \[8\], and in .*__0\.metadata F32 \[16\]"
    ):
        found_in(tmp_path / "dcp", 16)


def test_steps_of_two_saves(tmp_path: Path) -> None:
    """The sharding is the same, and one rank's files are older: only the step tells."""
    for world_size, step in ((4, 10), (3, 20)):
        run_on_ranks(save_alone_on_each, world_size, folder=tmp_path, value=1.0 * step, numel=8, step=step)
    with pytest.raises(CorruptError, match=r"'step' is 20 in __0_0\.distcp, and 10 in __3_0\.distcp.*two saves"):
        found_in(tmp_path / "dcp", 8)
    for path in (tmp_path / "dcp").glob("__3*"):
        path.unlink()
    assert torch.equal(found_in(tmp_path / "dcp", 8), torch.full((8,), 20.0))


def save_replicas(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]), "r": torch.ones(8)}
    while rank == 3 and not (folder / "dcp" / "__0.metadata").exists():
        time.sleep(0.01)  # a late rank is no other save
    save_dcp_without_collectives(folder / "dcp", {"model": state, "step": 3})


def test_replicas_are_no_contradiction(tmp_path: Path) -> None:
    run_on_ranks(save_replicas, 4, folder=tmp_path)
    assert torch.equal(found_in(tmp_path / "dcp", 8), torch.arange(8.0))


def test_members_of_enums_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2, of Debian 12, pickles the memory format of each tensor as `getattr` of an enum. No DCP folder that
    was written there could be read."""
    by_name = lambda self, _protocol: (getattr, (type(self), self.name))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
        save_dcp(tmp_path / "dcp", weights(3))
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert loaded(tmp_path / "dcp") == 3


# --- values -----------------------------------------------------------------------------------------------------------


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 / seed)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def damage(folder: Path, name: str, offset: int = 0) -> None:
    """Zero the bytes of an item."""
    metadata = FileSystemReader(folder).read_metadata()
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    with open(folder / info.relative_path, "r+b") as file:
        file.seek(info.offset + offset)
        file.write(bytes(info.length - offset))


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer, **of_weight: Any) -> dict[str, Any]:
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state["state"]["weight"].update(of_weight)
    return {"model": model.state_dict(), "optimizer": state}


@pytest.mark.parametrize("name", ["optimizer.param_groups.0.lr", "optimizer.state.weight.step"])
def test_damaged_values_of_an_optimizer(tmp_path: Path, name: str) -> None:
    """An error, and nothing has changed; the model alone can be loaded."""
    model, optimizer = trained(1)
    folder = save_dcp(tmp_path / "dcp", states_of(model, optimizer, step=1))
    other, other_optimizer = trained(2)
    checkpoint.load(folder, model=other, optimizer=other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.5 and other_optimizer.state[other.weight]["step"] == 1
    assert [*open_dcp(*storage_of(folder)).damaged_items()] == []
    damage(folder, name)
    other, other_optimizer = trained(2)
    before = other.weight.detach().clone()
    with pytest.raises(CorruptError, match=r"__0_0\.distcp.*torch\.save"):
        checkpoint.load(folder, model=other, optimizer=other_optimizer)
    assert torch.equal(other.weight, before) and other_optimizer.param_groups[0]["lr"] == 0.25
    assert [key for key, _ in open_dcp(*storage_of(folder)).damaged_items()] == [name]
    assert [found.tensors for found in checkpoint.find_damage(folder).damage] == [(f"'{name}'",)]
    assert not checkpoint.describe(folder).optimizer
    checkpoint.load(folder, model=other)
    assert torch.equal(other.weight, model.weight)


def test_state_that_cannot_be_read(tmp_path: Path) -> None:
    """Without a part of its state an optimizer is not what it was: an error that names it."""
    for value in (torch.zeros(2, 3, dtype=torch.complex128), collections.deque([1, 2]), torch.device("cpu")):
        model, optimizer = trained(1)
        folder = save_dcp(tmp_path / type(value).__name__, states_of(model, optimizer, exp_avg=value))
        other, other_optimizer = trained(2)
        with pytest.raises(UnsupportedError, match=r"'optimizer\.state\.weight\.exp_avg'.*torch\.distributed"):
            checkpoint.load(folder, model=other, optimizer=other_optimizer)
        checkpoint.load(folder, model=other)
        assert torch.equal(other.weight, model.weight)
        assert [*open_dcp(*storage_of(folder)).damaged_items()] == []


def test_what_cannot_be_read_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor of complex numbers, and a module's state that is a file in memory: `verify` called the folder whole,
    `describe` and a strict load did not name them, and `convert` dropped them."""
    others = {"z": torch.zeros(2, dtype=torch.complex128), "_extra_state": io.BytesIO(b"state")}
    folder = save_dcp(tmp_path / "dcp", {"model": {**weights(1), **others}})
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: model 'z' \(a tensor torch\.complex128"):
        loaded(folder)
    found = weights(-1)
    assert len(checkpoint.load(folder, model=found, strict=False).unexpected) == 2
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: model 'z' \(a tensor torch\.complex128 \[2\]"):
        checkpoint.load(folder, model={**found, "z": others["z"]})
    left = {f"model '{name}'" for name in others}
    report = checkpoint.find_damage(folder)
    assert report.ok and report.left_out.keys() == checkpoint.describe(folder).left_out.keys() == left
    assert main(["verify", str(folder)]) == 0 and main(["verify", str(folder), "--strict"]) == 1
    assert "not read: model 'z': a tensor torch.complex128 [2]" in capsys.readouterr().out
    with pytest.raises(UnsupportedError, match=r"convert cannot read model 'z' .*BytesIO.* strict=False"):
        checkpoint.convert(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (5, 5),
        (torch.tensor(5), 5),
        (torch.tensor([5]), 5),
        (torch.tensor([[5]]), 5),
        (torch.tensor([5, 6]), None),
        (torch.zeros(0, dtype=torch.int64), None),
        (torch.zeros((), dtype=torch.complex128), None),
        ("five", None),
        (collections.deque([5]), None),
        (torch.device("cpu"), None),
    ],
)
def test_steps_of_all_kinds(tmp_path: Path, step: Any, expected: int | None) -> None:
    """A number, or none; never an error after the model is filled."""
    folder = save_dcp(tmp_path / "dcp", {"model": weights(1), "step": step})
    found = weights(-1)
    assert checkpoint.load(folder, model=found).step == expected
    assert all((tensor == 1).all() for tensor in found.values())


def test_damaged_step(tmp_path: Path) -> None:
    """Noticed before anything is filled."""
    folder = save_dcp(tmp_path / "dcp", {"model": weights(1), "train_state": {"step": 5}})
    damage(folder, "train_state.step")
    found = weights(-1)
    with pytest.raises(CorruptError, match=r"__0_0\.distcp.*torch\.save"):
        checkpoint.load(folder, model=found)
    assert all((tensor == -1).all() for tensor in found.values())


# --- extra state of modules -------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Its extra state has tensors within, as that of layers in 8-bit floats."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 2)
        self.kept: Any = self.state(seed)

    @staticmethod
    def state(seed: int) -> dict[str, Any]:
        scales = [torch.full((2,), 0.5 * seed), torch.tensor(3 * seed)]
        inner = {"history.amax": torch.arange(4.0) * seed, "scales": scales, "recipe": {"margin": seed, "on": True}}
        return {"inner": inner, "pair": (1, seed), "plain": [seed, 2.5], "nothing": None}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == expected


def test_nested_extra_state(tmp_path: Path) -> None:
    """torch stores it item by item."""
    model = nn.Sequential(Scaled(1))
    save_dcp(tmp_path / "torch", {"model": model.state_dict()})
    other = nn.Sequential(Scaled(2))
    loaded = checkpoint.load(tmp_path / "torch", model=other)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    assert_alike(other[0].kept, model[0].kept)


def test_extra_state_that_is_incomplete_is_none(tmp_path: Path) -> None:
    """A part of it cannot be read: the rest is not given to the module."""
    model = Scaled(1)
    model.kept = {"a": torch.ones(2), "b": torch.zeros(2, dtype=torch.complex128)}
    folder = save_dcp(tmp_path / "dcp", {"model": model.state_dict()})
    with pytest.raises(MismatchError, match="missing in the checkpoint: model '_extra_state'"):
        checkpoint.load(folder, model=Scaled(2))
