"""What a run keeps besides tensors of model and optimizer: values, objects, random numbers; each rank's or common."""

import collections
import math
import random
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint import RandomState
from fsdp2.errors import ArgumentError, CheckpointError, FSDPError
from tests.helpers.checkpoint_cases import mesh_of, put
from tests.helpers.ranks import on_ranks, run_on_ranks


def nested(depth: int) -> Any:
    return [{"level": depth, "below": nested(depth - 1)}] if depth else ()


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63, -(2**200)],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 1e-310, 1.7976931348623157e308, 1 / 3, 3.0],
    "text": ["", "ü€😀", '\x00\n"\\', "$tensor"],
    "tuples": ((), (1,), (1, (2, [3, ()]))),
    "int keys": {1: "a", -2: "b", 10: {3: ()}},
    "other keys": {True: 1, None: 2, 0.5: 3, "1": 4, 1.5: 5},
    "tuple keys": {(1, "a"): 0, (): 1},
    "dollars": {"$tensor": 1, "$float": "nan", "$": [{"$dict": {}}], "$$x": None},
    "order": {"z": 1, "a": 2, "m": 3},
    "deep": nested(18),
    "empty": [{}, [], (), ""],
    "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3),
    "tensors of alike keys": {1: torch.zeros(2), "1": torch.ones(2)},
    "tensors": {"a": [torch.tensor(2.5), (torch.zeros(0, 3, dtype=torch.bool),)], "b": torch.eye(3).t()[1:]},
    "a.b/c d": "an odd name",
    "ordered": collections.OrderedDict([("b", 1), ("a", [collections.OrderedDict(), torch.ones(2)]), (3, "int")]),
    "counters": [collections.Counter("abca"), collections.Counter({(1, 2): -3}), collections.Counter()],
}


@on_ranks(1, 2)
@pytest.mark.parametrize("consolidated", [False, True])
def test_values_come_back_as_they_were(rank: int, world_size: int, consolidated: bool, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", extra=VALUES, consolidated=consolidated)
    loaded = checkpoint.load(tmp_path / "a")
    assert loaded.extra.keys() == VALUES.keys()
    for key, value in VALUES.items():
        assert repr(loaded.extra[key]) == repr(value)  # types, order, signs of zeros, and NaN is NaN


class Loader:
    """A data loader's position."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Files(Loader):
    """One that deals its files out anew."""

    def load_resharded(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        files = sorted(file for state in states for file in state["files"])
        self.state = {"files": files[rank::world_size], "seen": sum(int(state["seen"]) for state in states)}


def save_objects(rank: int, world_size: int, folder: str) -> None:
    files = Files({"files": [f"{number}.bin" for number in range(rank, 7, world_size)], "seen": torch.tensor(rank)})
    checkpoint.save(folder, extra={"files": files, "own": Loader({"position": rank}), "same": Loader({"epoch": 2})})


def load_objects(rank: int, world_size: int, folder: str, saved_on: int) -> None:
    files, same, own = Files({}), Loader({}), Loader({"untouched": True})
    if world_size == saved_on:
        loaded = checkpoint.load(folder, extra={"files": files, "own": own, "same": same})
        assert files.state["files"] == [f"{number}.bin" for number in range(rank, 7, world_size)]
        assert int(files.state["seen"]) == rank
        assert own.state == {"position": rank}
        assert loaded.extra["own"] == {"position": rank}
    else:
        checkpoint.load(folder, extra={"files": files, "same": same})
        assert files.state["files"] == [f"{number}.bin" for number in range(rank, 7, world_size)]
        assert files.state["seen"] == sum(range(saved_on))
        with pytest.raises(FSDPError, match=r"(?s)own.*(load_resharded|Reshardable)"):
            checkpoint.load(folder, extra={"files": files, "own": own, "same": same})
        assert own.state == {"untouched": True}
    assert same.state == {"epoch": 2}


def test_objects_on_another_number_of_ranks(tmp_path: Path) -> None:
    """What was the same everywhere goes on; what was not asks the object, and is refused if it has no answer."""
    run_on_ranks(save_objects, 3, folder=str(tmp_path / "a"))
    for world_size in (3, 2, 4):
        run_on_ranks(load_objects, world_size, folder=str(tmp_path / "a"), saved_on=3)


# --- random numbers ---------------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1), np.random.randn()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    draw()


def save_random(rank: int, world_size: int, folder: str) -> list[float]:
    seed_all(rank)
    checkpoint.save(folder, extra={"random": RandomState()})
    return draw()


def load_random(rank: int, world_size: int, folder: str) -> list[float]:
    seed_all(99)
    results = []
    for _ in range(2):  # the same on every try
        with pytest.warns(UserWarning, match="random"):
            checkpoint.load(folder, extra={"random": RandomState()})
        results.append(draw())
    assert results[0] == results[1]
    return results[0]


def test_random_numbers_on_another_number_of_ranks(tmp_path: Path) -> None:
    """All are different and repeatable, with a warning. On as many ranks, each goes on with its own: test_resume.py."""
    expected = run_on_ranks(save_random, 2, folder=str(tmp_path / "a"))
    drawn = run_on_ranks(load_random, 3, folder=str(tmp_path / "a"))
    assert len({tuple(values) for values in drawn + expected}) == 5
    # What one rank saved is the same everywhere, but for generators.
    run_on_ranks(save_random, 1, folder=str(tmp_path / "alone"))
    one, other = run_on_ranks(load_random, 2, folder=str(tmp_path / "alone"))
    assert one != other


# --- what is refused --------------------------------------------------------------------------------------------------


class Text(str):
    """A subclass of a plain type."""


@pytest.mark.parametrize(
    "value",
    [
        Text("a"),
        type("Bytes", (bytes,), {})(b"a"),
        type("List", (list,), {})([1]),
        type("Pair", (tuple,), {})((1, 2)),
        type("Dict", (dict,), {})(a=1),
        type("Ordered", (collections.OrderedDict,), {})(a=1),
        types.MappingProxyType({"a": 1}),
        {1, 2},
        torch.float32,
        np.ones(3),
        collections.defaultdict(list),
        collections.namedtuple("Named", "a")(1),
        torch.Size([2]),
        torch.max(torch.eye(2), dim=0),
        np.float64(1),
        np.str_("a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(value: Any, tmp_path: Path) -> None:
    """Subclasses of what a checkpoint holds came back as dicts, tuples and bytes, without a word."""
    with pytest.raises(ArgumentError, match=f"'state' at '0': .* got .*{type(value).__name__}"):
        checkpoint.save(tmp_path / "a", extra={"fine": 1, "state": [value]})
    assert not any(tmp_path.iterdir())


@on_ranks(2)
def test_keys_of_extra_that_are_missing(rank: int, world_size: int, tmp_path: Path) -> None:
    """An object that is given to `load` must find its state; with ``strict=False`` it is left alone."""
    checkpoint.save(tmp_path / "a", extra={"one": Loader({"x": 1}), "more": 5})
    one, two = Loader({}), Loader({"x": 0})
    with pytest.raises(CheckpointError, match="two"):
        checkpoint.load(tmp_path / "a", extra={"one": one, "two": two})
    loaded = checkpoint.load(tmp_path / "a", extra={"one": one, "two": two}, strict=False)
    assert any("two" in name for name in loaded.missing)
    assert (one.state, two.state) == ({"x": 1}, {"x": 0})
    assert loaded.extra == {"one": {"x": 1}, "more": 5}


@on_ranks(2)
def test_sharded_tensors_in_extra(rank: int, world_size: int, tmp_path: Path) -> None:
    """A DTensor has no place there: refused by name, not stored as if its shard were the whole."""
    sharded = put(torch.arange(5.0), mesh_of(2), [torch.distributed.tensor.Shard(0)])
    with pytest.raises(ArgumentError, match="sharded"):
        checkpoint.save(tmp_path / "a", extra={"sharded": {"x": sharded}})


@on_ranks(2)
def test_values_that_differ_between_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """Everybody got those of the last rank."""
    with pytest.raises(CheckpointError, match=r"'n': ranks .* have different values"):
        checkpoint.save(tmp_path / "a", model={"n": rank})
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (1 + rank))
    with pytest.raises(CheckpointError, match=r"optimizer options of 'weight'.*between ranks in extra="):
        checkpoint.save(tmp_path / "b", model=layer, optimizer=optimizer)


def test_generators_come_back_last(tmp_path: Path) -> None:
    """An object that draws while it takes its state moved them."""

    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            torch.rand(3)

    extra = {"random": RandomState(), "loader": Draws()}
    checkpoint.save(tmp_path / "a", extra=extra)
    wanted = torch.rand(4)
    checkpoint.load(tmp_path / "a", extra=extra)
    assert torch.equal(torch.rand(4), wanted)


def test_how_deep_values_may_be_nested(tmp_path: Path) -> None:
    """Keys that are no strings take three levels of JSON, not two: what was saved could not be read."""

    def keyed(depth: int) -> Any:
        return {0: keyed(depth - 1)} if depth else "end"

    checkpoint.save(tmp_path / "a", extra={"deep": keyed(30)})
    assert checkpoint.load(tmp_path / "a").extra["deep"] == keyed(30)
    with pytest.raises(CheckpointError, match=r"nothing was saved.*nested more than 100 levels"):
        checkpoint.save(tmp_path / "b", extra={"deep": keyed(38)})
    with pytest.raises(ArgumentError, match="nested more than 40 levels"):
        checkpoint.save(tmp_path / "b", extra={"deep": keyed(42)})
    assert not (tmp_path / "b").exists()
