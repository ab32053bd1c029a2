"""With many ranks, how much does each plan before it writes, and how large is the manifest? Results: README.md.

python benchmarks/checkpoint/planning.py              # the second table in README.md

One process plays the middle rank of worlds of 8 to 4096 on a group that moves nothing. Nothing is written but what is
measured: the header of the rank's file and the manifest that the last rank would make.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from fsdp2.checkpoint.io.planned_files import PlannedFile, owned_pieces, rank_file_name, rank_files
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.schema.manifest import FORMAT, Manifest, table_of
from fsdp2.checkpoint.state.model import model_state
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.placement.tiling import spread_replicas

RESULTS = Path(__file__).parent / "results"
WORLDS = (8, 64, 512, 4096)
ROWS = 8192  # two for each of the most ranks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "planning.json")
    return parser.parse_args()


def tensors_of(world: int, count: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    locals_ = [torch.zeros(ROWS // world, 1) for _ in range(count)]
    placed = [DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for local in locals_]
    return {f"layers.{number}.weight": tensor for number, tensor in enumerate(placed)}


def plan(tensors: dict[str, torch.Tensor], rank: int, world: int) -> tuple[dict[str, Any], PlannedFile]:
    """(table, file): what a save does before it writes."""
    entries = model_state(tensors, World(rank, tuple(range(world)))).entries
    rows = {name: (entry.dtype, spread_replicas(entry.tiling, 4)) for name, entry in entries.items()}
    table = table_of({"model": rows}, {"model": {}}, {"model": {}})
    pieces = list(owned_pieces(entries, rows, rank))
    return table, *rank_files("model", pieces, {"id": "0" * 12, "rank": rank, "world": world}, LocalStorage())


def manifest_of(table: dict[str, Any], world: int) -> bytes:
    files = {rank_file_name("model", rank, world): [1 << 30, "0" * 8] for rank in range(world)}
    fixed = {"format": FORMAT, "id": "0" * 12, "step": 1000, "world": world, "layout": "ranks"}
    tables = [{**table, "ranks": list(range(world))}]
    return Manifest.encode({**fixed, "files": files, "tables": tables, "homes": {}, "extra": {}})


def main() -> None:
    options = parse()
    seconds: dict[int, list[float]] = {world: [] for world in WORLDS}
    sizes: dict[int, dict[str, int]] = {}
    for _ in range(options.rounds):
        for world in WORLDS:
            dist.init_process_group("fake", rank=world // 2, world_size=world, store=FakeStore())
            tensors = tensors_of(world, options.tensors)
            plan(tensors, world // 2, world)
            begin = time.process_time()
            table, file = plan(tensors, world // 2, world)
            seconds[world].append(time.process_time() - begin)
            sizes[world] = {
                "header": file.pieces[0][0],
                "manifest": len(manifest_of(table, world)),
                "record": len(json.dumps(table)),
            }
            if world != WORLDS[-1]:
                dist.destroy_process_group()
                continue
            provenance = {**common.provenance("cpu"), "backend": "fake", "ranks": list(WORLDS)}
            dist.destroy_process_group()
    result = {"question": "planning at many ranks", **provenance, "tensors": options.tensors}
    common.write_json(options.out, {**result, "cpu_seconds": seconds, "bytes": sizes})
    rows = [
        [str(world), f"{1e3 * statistics.median(seconds[world]):.0f} ({1e3 * min(seconds[world]):.0f})"]
        + [f"{sizes[world][what] / 1e3:.0f}" for what in ("header", "record", "manifest")]
        for world in WORLDS
    ]
    header = ["ranks", "planning, ms: median (least)", "header of a rank, kB", "table, kB", "manifest, kB"]
    print(common.table(header, rows))


if __name__ == "__main__":
    main()
