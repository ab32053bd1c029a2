"""`sources` of `fsdp2.checkpoint.load`, and `load_from_rank`: other names, fused, transposed, seen by one rank only."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import concatenated, stacked, stored
from fsdp2.errors import CheckpointError, MismatchError
from tests.helpers.checkpoint_cases import BF16, DIM, HIDDEN, LAYOUTS, Block, assert_bits, random_bits, spoil
from tests.helpers.parity_models import shard_like
from tests.helpers.ranks import on_ranks, run_on_ranks

MIB = 1 << 20
SHAPES = {
    "a": (7, 5),
    "b": (4, 5),
    "t": (5, 7),
    "wide": (12, 5),
    "cube": (4, 3, 2),
    "line": (9,),
    "one": (),
    "half": (6, 4),
    "bytes": (9, 4),
    "up": (DIM, HIDDEN),
    "down": (3 * HIDDEN, DIM),
    "biases": (HIDDEN + DIM,),
}
DTYPES = {"half": BF16, "bytes": torch.int8}
THEIRS = {name: random_bits(name, shape, DTYPES.get(name, torch.float32)) for name, shape in SHAPES.items()}
OWN = {name: random_bits(name, (DIM,), torch.float32) for name in ("blocks.0.norm.weight", "blocks.0.norm.bias")}

# Name in the model: (where it comes from, the same in torch's words).
CASES: dict[str, tuple[Any, Callable[[dict[str, Tensor]], Tensor]]] = {
    "renamed": ("a", lambda all: all["a"]),
    "scalar": ("one", lambda all: all["one"]),
    "turned": (stored("t").T, lambda all: all["t"].T),
    "rows": (stored("wide").narrow(0, 3, 4), lambda all: all["wide"][3:7]),
    "columns": (stored("wide").narrow(-1, 1, 3), lambda all: all["wide"][:, 1:4]),
    "joined": (concatenated("a", "b"), lambda all: torch.cat([all["a"], all["b"]])),
    "nested": (
        concatenated(stored("wide").T.narrow(1, 2, 5), concatenated("t", stored("a").T, dim=-1).narrow(1, 3, 8), dim=1)
        .narrow(0, 1, 3)
        .T,
        lambda all: torch.cat([all["wide"].T[:, 2:7], torch.cat([all["t"], all["a"].T], 1)[:, 3:11]], 1)[1:4].T,
    ),
    "deep": (concatenated("cube", stored("cube").narrow(2, 1, 1), dim=-1),
             lambda all: torch.cat([all["cube"], all["cube"][..., 1:]], -1)),
    "halves": (stored("half").T, lambda all: all["half"].T),
    "octets": (concatenated(stored("bytes").narrow(0, 5, 4), stored("bytes").narrow(0, 0, 5)),
              lambda all: all["bytes"].roll(4, 0)),
    "few": (stored("a").narrow(0, 1, 1), lambda all: all["a"][1:2]),  # no rows for most ranks
    "nothing": (stored("a").narrow(0, 7, 0), lambda all: all["a"][7:]),
    "stacked_last": (stacked("line", "line", dim=-1), lambda all: torch.stack([all["line"]] * 2, -1)),
    "exchanged": (stored("cube").transpose(0, -1), lambda all: all["cube"].transpose(0, 2)),
    "experts": (concatenated(stacked("a", "a"), stacked("a", stored("t").T), dim=1),
                lambda all: torch.stack([all["a"].repeat(2, 1), torch.cat([all["a"], all["t"].T])])),
    "blocks.0.up.weight": (stored("up").T, lambda all: all["up"].T),
    "blocks.0.up.bias": (stored("biases").narrow(0, 0, HIDDEN), lambda all: all["biases"][:HIDDEN]),
    "blocks.0.down.weight": (stored("down").narrow(0, HIDDEN, HIDDEN).T,
                             lambda all: all["down"][HIDDEN : 2 * HIDDEN].T),
    "blocks.0.down.bias": (stored("biases").narrow(0, HIDDEN, DIM), lambda all: all["biases"][HIDDEN:]),
}  # fmt: skip
SOURCES = {name: source for name, (source, _) in CASES.items()}
EXPECTED = {**OWN, **{name: of(THEIRS) for name, (_, of) in CASES.items()}}


class Net(nn.Module):
    """A parameter for each case; the block is what layouts with tensor parallelism cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        for name, value in EXPECTED.items():
            if "." not in name:
                empty = torch.full(value.shape, 7, dtype=value.dtype)
                setattr(self, name, nn.Parameter(empty, requires_grad=value.is_floating_point()))


def write(folder: Path) -> None:
    """The same in our format and in a file of Hugging Face."""
    checkpoint.save(folder / "native", model={**THEIRS, **OWN}).wait()
    (folder / "hf").mkdir()
    save_file({**THEIRS, **OWN}, folder / "hf" / "model.safetensors")


def check(model: nn.Module) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == EXPECTED.keys()
    for name, tensor in found.items():
        assert_bits(name, tensor, shard_like(EXPECTED[name], tensor))
        spoil(tensor)


# --- the same as in one process ---------------------------------------------------------------------------------------


def load_in_layout(rank: int, world_size: int, folder: str, layout: str) -> None:
    def fresh(device: str) -> nn.Module:
        with torch.device(device):
            return LAYOUTS[layout].apply(Net())

    model = fresh("cpu")
    for kind in ("native", "hf"):
        checkpoint.load(f"{folder}/{kind}", model=model, sources=SOURCES)
        check(model)
        for reader in {0, world_size - 1}:
            path = f"{folder}/{kind}" if rank == reader else "/nowhere"
            checkpoint.load_from_rank(path, model=model, sources=SOURCES.get, rank=reader)
            check(model)
    model = fresh("meta")
    checkpoint.load(f"{folder}/hf", model=model, sources=SOURCES.get)
    check(model)
    model = fresh("meta")
    checkpoint.load_from_rank("/nowhere" if rank else f"{folder}/native", model=model, sources=SOURCES)
    check(model)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "layout", ["fsdp-1", "fsdp-2", "fsdp-3", "dim1-2", "dim1-3", "hsdp2x2-4", "tp-fsdp-4", "tp-dim1-4"]
)
def test_bits_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    """Renamed, split and fused weights, loaded into each layout."""
    write(tmp_path)
    run_on_ranks(load_in_layout, LAYOUTS[layout].world_size, folder=str(tmp_path), layout=layout)


@on_ranks(3)
def test_other_dtypes(rank: int, world_size: int, tmp_path: Path) -> None:
    """With `cast`, on the way: through transposition and from another rank too."""
    values = torch.arange(35.0).view(7, 5)
    checkpoint.save(tmp_path / "a", model={"theirs": values}).wait()
    net = nn.Linear(7, 5, bias=False, dtype=BF16)
    fully_shard(net)
    sources = {"weight": stored("theirs").T}
    with pytest.raises(MismatchError, match=r"'weight': stored as F32, here BF16 \(cast=True converts\)"):
        checkpoint.load(tmp_path / "a", model=net, sources=sources)
    dist.barrier()  # a rank that fails later would take the others' next load for this one
    for load in (checkpoint.load, checkpoint.load_from_rank):
        spoil(net.weight)
        load(tmp_path / "a", model=net, sources=sources, cast=True)
        assert_bits("weight", net.weight, shard_like(values.T.to(BF16), net.weight))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


@on_ranks(2)
@pytest.mark.parametrize("load", [checkpoint.load, checkpoint.load_from_rank])
def test_tied_weights(rank: int, world_size: int, load: Any, tmp_path: Path) -> None:
    """One tensor here: sources may say of either name where it is. What is said of both must be the same values."""
    same, other = torch.arange(35.0).view(7, 5), torch.zeros(7, 5)
    checkpoint.save(tmp_path / "a", model={"x": same, "turned": same.T.clone(), "other": other}).wait()
    model = Tied()
    fully_shard(model)
    for sources in (
        {"embed.weight": "x"},
        {"head.weight": "x"},
        {"head.weight": stored("turned").T},
        {"embed.weight": "x", "head.weight": stored("turned").T},
        {"embed.weight": "not there", "head.weight": "x"},
    ):
        spoil(model.embed.weight)
        load(tmp_path / "a", model=model, sources=sources, strict=False)
        assert_bits("embed", model.embed.weight, shard_like(same, model.embed.weight))
        assert model.head.weight is model.embed.weight
    with pytest.raises(CheckpointError, match="'x' and 'other' are stored separately with different values"):
        load(tmp_path / "a", model=model, sources={"embed.weight": "x", "head.weight": "other"}, strict=False)
    dist.barrier()
    with pytest.raises(MismatchError, match=r"'embed.weight': stored with shape \[5, 7\], here \[7, 5\]"):
        load(tmp_path / "a", model=model, sources={"embed.weight": "x", "head.weight": "turned"}, strict=False)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no", r"missing in the checkpoint: model 'w' \(made of 'no'\)"),
        (stored("cube").T, r"model 'w': transpose\(0, 1\) does not fit what is stored: 'cube' F32 \[4, 3, 2\]"),
        (stored("a").narrow(0, 5, 3), r"model 'w': narrow\(0, 5, 3\) does not fit what is stored: 'a' F32 \[7, 5\]"),
        (stored("a").narrow(0, -1, 1), r"narrow\(0, -1, 1\) does not fit what is stored: 'a' F32 \[7, 5\]"),
        (concatenated("a", "t"), r"along dim 0 does not fit what is stored: 'a' F32 \[7, 5\], 't' F32 \[5, 7\]"),
        (concatenated("one", "one"), r"does not fit what is stored"),
        (stacked("a", "t"), r"stacked along dim 0 does not fit what is stored: 'a' F32 \[7, 5\], 't' F32 \[5, 7\]"),
        (stored("a").transpose(0, 2), r"transpose\(0, 2\) does not fit what is stored: 'a' F32 \[7, 5\]"),
        (stored("t").T.narrow(0, 0, 3), r"model 'w': stored with shape \[3, 5\], here \[7, 5\]"),
    ],
)
def test_a_source_that_does_not_fit(source: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    target = {"w": torch.full((7, 5), 3.0)}
    with pytest.raises(MismatchError, match=message):
        checkpoint.load(tmp_path / "hf", model=target, sources={"w": source})
    assert target["w"].eq(3).all()


def test_what_is_not_used_is_unexpected(tmp_path: Path) -> None:
    """Even if the model has that name, with values from elsewhere."""
    write(tmp_path)
    target = {"t": torch.zeros(7, 5)}
    loaded = checkpoint.load(tmp_path / "hf", model=target, sources={"t": "a"}, strict=False)
    assert "model 't'" in loaded.unexpected
    assert "model 'a'" not in loaded.unexpected


# --- what is read, and how much is held -------------------------------------------------------------------------------


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    counts: list[int] = []
    original = os.preadv

    def counting(*args: Any) -> int:
        counts.append(original(*args))
        return counts[-1]

    os.preadv = counting
    try:
        yield counts
    finally:
        os.preadv = original


@on_ranks(2)
def test_only_what_is_needed_is_read(rank: int, world_size: int, tmp_path: Path) -> None:
    """Rows of a fused tensor: the bytes of the shard, and with checksums at most a block more at each end. Of what
    several ranks have alike, `load_from_rank` reads one copy."""
    values = torch.arange(3 << 20, dtype=torch.float32).view(3 << 10, 1 << 10)  # 12 MiB
    checkpoint.save(tmp_path / "native", model={"fused": values}).wait()
    plain = tmp_path / str(rank) / "net"
    plain.mkdir(parents=True)
    save_file({"fused": values}, plain / "model.safetensors")
    net = nn.Linear(1 << 10, 1000, bias=False)
    fully_shard(net)
    sources = {"weight": stored("fused").narrow(0, 1100, 1000)}
    own = 500 * 4096
    for folder, more in ((plain, 0), (tmp_path / "native", 2 * MIB)):
        with bytes_read() as counts:
            checkpoint.load(folder, model=net, sources=sources)
        assert own <= sum(counts) <= own + more + 25_000  # with what the ranks compare before
    replicas = {"weight": torch.zeros(1000, 1 << 10)}
    with bytes_read() as counts:
        checkpoint.load_from_rank(plain, model=replicas, sources=sources)
    assert sum(counts) <= (2 * own + 10_000 if rank == 0 else 0)
    assert torch.equal(replicas["weight"], values[1100:2100])
