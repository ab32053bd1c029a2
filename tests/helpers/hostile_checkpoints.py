"""Checkpoints that somebody has damaged, or made to do harm: how to make them.

`whole(folder, layout)` saves a small checkpoint from this one process, or `two_ranks` from two. The editors change what
files say and put all checksums right again, as an attacker would.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp2 import checkpoint
from fsdp2.checkpoint.schema.manifest import Manifest
from tests.helpers.ranks import run_on_ranks

MANIFEST = "checkpoint.json"


# --- sound ones -------------------------------------------------------------------------------------------------------


def content(seed: int = 1) -> dict[str, Any]:
    """A model as a plain dict: several dtypes, sizes and blocks; tied; with a value that is no tensor."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(40, 3, generator=generator)
    return {
        "embed": embed,
        "head": embed,
        "bias": torch.randn(5, generator=generator).bfloat16(),
        "steps": torch.tensor(7 + seed),
        "mask": torch.rand(3, 2, generator=generator) > 0.5,
        "none": torch.empty(0, 4),
        "note": {"seed": seed, "lr": [0.1, float("inf")]},
    }


def empty() -> dict[str, Any]:
    """The same with other values, to load into."""
    blank = {name: torch.zeros_like(value) for name, value in content().items() if isinstance(value, torch.Tensor)}
    return {**blank, "head": blank["embed"], "note": None}


def extra(seed: int = 1) -> dict[str, Any]:
    """Extra state with a tensor."""
    return {"loader": {"position": seed, "order": torch.arange(9) * seed}, "words": ["a", ("b", "c")]}


def adam(seed: int = 1, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its optimizer, which has made some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def whole(folder: Path | str, seed: int = 1, consolidated: bool = False, **options: Any) -> Path:
    """Save `content` from this process alone."""
    options.setdefault("max_file_bytes", 300)  # several files, where they are consolidated
    state = content(seed)
    moments = {"moment.embed": state["embed"] * 2}
    checkpoint.save(folder, model=state, optimizer=moments, extra=extra(seed), consolidated=consolidated, **options)
    return Path(folder)


def two_ranks(folder: Path | str, seed: int = 1, consolidated: bool = False) -> Path:
    """Save `content`, the embedding cut by rows, from two ranks; each has its own extra state."""
    run_on_ranks(_save_two, 2, folder=str(folder), seed=seed, consolidated=consolidated)
    return Path(folder)


def _save_two(rank: int, world_size: int, folder: str, seed: int, consolidated: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    state = content(seed)
    mesh = init_device_mesh("cpu", (world_size,))
    state["embed"] = state["head"] = distribute_tensor(state["embed"], mesh, [Shard(0)], src_data_rank=None)
    own = {"loader": {"position": seed, "order": torch.arange(9) * rank}, "words": ["a", ("b", "c")]}
    moments = {"moment.embed": distribute_tensor(content(seed)["embed"] * 2, mesh, [Shard(0)], src_data_rank=None)}
    options = {"consolidated": consolidated, "max_file_bytes": 300}
    checkpoint.save(folder, model=state, optimizer=moments, extra=own, **options)


def flip(file: Path, *places: int) -> None:
    """A bit in each of these bytes."""
    raw = bytearray(file.read_bytes())
    for place in places:
        raw[place] ^= 1
    file.write_bytes(raw)


def load(folder: Path | str, **options: Any) -> dict[str, Any]:
    """All of it, into zeros."""
    into = empty()
    moments = {"moment.embed": torch.zeros(40, 3)}
    loaded = checkpoint.load(folder, model=into, optimizer=moments, **options)
    return {**into, **moments, "extra": loaded.extra}


def is_sound(loaded: dict[str, Any], seed: int = 1) -> bool:
    """Whether `load` brought what was saved, bit by bit."""
    wanted = content(seed)
    same = all(torch.equal(loaded[name], value) for name, value in wanted.items() if isinstance(value, torch.Tensor))
    return same and loaded["note"] == wanted["note"] and torch.equal(loaded["moment.embed"], wanted["embed"] * 2)


# --- editors ----------------------------------------------------------------------------------------------------------


def edit_body(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the body of the manifest."""
    path = folder / MANIFEST
    outer = json.loads(path.read_bytes())
    changed = change(outer["body"])
    body = outer["body"] if changed is None else changed
    path.write_bytes(Manifest.encode(body))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """(the header of a safetensors file, its data)."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put_header(path: Path, header: bytes | dict[str, Any], data: bytes) -> None:
    """Write a safetensors file with whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a file; a change returns a new one, or None if it has changed what it got."""
    header, data = header_of(path)
    changed = change(header)
    put_header(path, header if changed is None else changed, data)
    sign(path)


def edit_own(header: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a rank's file says beyond the format: id, rank, world, shards, sums."""
    own = json.loads(header["__metadata__"]["fsdp2"])
    changed = change(own)
    header["__metadata__"]["fsdp2"] = json.dumps(own if changed is None else changed)


def sign(path: Path) -> None:
    """Let the manifest of its folder list the file as it is now."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    covered = raw if path.suffix == ".json" else raw[: 8 + length]

    def note(body: dict[str, Any]) -> None:
        body["files"][path.name] = [len(raw), f"{zlib.crc32(covered):08x}"]

    edit_body(path.parent, note)
