"""What do saving and loading a sharded training state cost? Results: README.md.

python benchmarks/checkpoint/main.py                  # the tables in README.md
python benchmarks/checkpoint/main.py --zlib           # as where the package isal is not installed
python benchmarks/checkpoint/main.py --rounds 3 --blocks 4 --folder /mnt/disk/scratch
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.checkpoint.ways import State, Way, evict, fetch, local, remove, ways_of
from fsdp2.checkpoint.io import reading
from fsdp2.checkpoint.schema import checksum

RESULTS = Path(__file__).parent / "results"

# What must hold: (what, measurement, of which, at most).
BARS = [
    ("save / DCP", "fsdp2: save", "DCP: save", 0.65),
    ("save / raw write and fsync", "fsdp2: save", "raw: save", 1.35),
    ("load warm / DCP", "fsdp2: load, warm", "DCP: load, warm", 0.45),
    ("load warm, unchecked / DCP", "fsdp2: load, unchecked, warm", "DCP: load, warm", 0.45),
    ("async, blocked / DCP", "fsdp2, async: blocked", "DCP, async: blocked", 0.40),
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each way, after one that is not")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--ways", nargs="*", help="only these")
    parser.add_argument("--zlib", action="store_true", help="compute CRC-32 as where the package isal is missing")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder for temporary files)")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    return parser.parse_args()


class Bench:
    """Measures.

    Args:
        groups: whose collectives are counted.

    Attributes:
        figures: measurement -> what each round gave: wall seconds of the slowest rank, mean processor seconds of a
            rank, extra memory of the rank with the most, collectives.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._groups = groups
        self.figures: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        """Do something on all ranks together, and note what it took."""
        gc.collect()  # else one time in some takes 0.1 s longer, for all the objects of this process
        dist.barrier()
        before, operations = start_of_peak(), self._num_operations()
        wall, cpu = time.perf_counter(), time.process_time()
        result = action()
        passed = [time.perf_counter() - wall, time.process_time() - cpu, peak_bytes() - before]
        operations = self._num_operations() - operations
        worst = torch.tensor(passed, dtype=torch.float64)
        total = worst.clone()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        row = self.figures[name]
        row["wall_s"].append(worst[0].item())
        row["cpu_s"].append(total[1].item() / dist.get_world_size())
        row["extra_bytes"].append(max(0.0, worst[2].item()))
        row["collectives"].append(float(operations))
        return result

    def _num_operations(self) -> int:
        """Collectives that have been begun."""
        return sum(group._get_sequence_number_for_group() for group in self._groups if group is not None)


def start_of_peak() -> float:
    """Resident bytes now; the peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_of("VmRSS")


def peak_bytes() -> float:
    """The most resident bytes since."""
    return memory_of("VmHWM")


def memory_of(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) * 1024
    raise LookupError(name)


def measure_way(bench: Bench, name: str, way: Way, folder: Path) -> None:
    """One round of one way, in a folder of its own."""
    if "async" in name:
        finish = bench.time(f"{name}: blocked", lambda: way.save(folder))
        bench.time(f"{name}: rest", finish)
    else:
        bench.time(f"{name}: save", lambda: way.save(folder))
    for kind, load in way.loads.items():
        on_first_rank(fetch, folder)
        bench.time(f"{name}: {kind}, warm", lambda load=load: load(folder))
        if kind == "load":
            on_first_rank(evict, folder)
            bench.time(f"{name}: {kind}, cold", lambda load=load: load(folder))
    on_first_rank(remove, folder)


def on_first_rank(action: Callable[[Path], None], folder: Path) -> None:
    """When every rank has come; the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        action(folder)
    dist.barrier()


def check_loads(state: State, ways: dict[str, Way], folder: Path) -> None:
    """All loads give what was saved; their destinations hold something else before."""
    targets = {"columns": state.columns, "whole": state.whole}
    for name, way in ways.items():
        if not way.loads:
            continue
        way.save(folder)
        dist.barrier()
        for kind, load in way.loads.items():
            filled = targets.get(kind, state.everything)
            expected = {key: local(tensor).clone() for key, tensor in filled.items()}
            for tensor in filled.values():
                local(tensor).detach().fill_(7.0)
            load(folder)
            for key, tensor in filled.items():
                assert torch.equal(local(tensor), expected[key]), f"{name}, {kind}: {key} came back otherwise"
        on_first_rank(remove, folder)


def training_state(workload: common.Workload) -> State:
    trainer = common.Trainer(common.PEERS["fsdp2-true"], workload)
    trainer.step()
    state = State.of(trainer.model, trainer.optimizer)
    for name, tensor in state.weights.items():
        state.whole[name].copy_(tensor.full_tensor())
    return state


def measure(options: argparse.Namespace) -> None:
    workload = common.Workload(blocks=options.blocks, dim=options.dim, batch=1)
    if options.zlib:
        checksum.crc32 = reading.crc32 = zlib.crc32
    state = training_state(workload)
    groups = [dist.group.WORLD, dist.new_group()]
    ways = ways_of(state, groups[1])
    if options.ways:
        ways = {name: ways[name] for name in options.ways}
    names = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    root = Path(names[0])
    check_loads(state, ways, root / "checked")
    order, shuffle, warmup, bench = list(ways), random.Random(0).shuffle, Bench(groups), Bench(groups)
    for round_ in range(options.rounds + 1):
        shuffle(order)
        for name in order:
            measure_way(bench if round_ else warmup, name, ways[name], root / f"{round_}-{order.index(name)}")
    result = {
        "question": "the cost of checkpoints",
        "command": " ".join(["python", "benchmarks/checkpoint/main.py", *sys.argv[1:]]),
        **common.provenance("cpu"),
        "file_system": file_system(root),
        "load_average": os.getloadavg(),
        "workload": asdict(workload),
        "bytes": {"everything": world_bytes(state, state.everything), "weights": world_bytes(state, state.weights)},
        "rounds": options.rounds,
        "crc32": checksum.crc32.__module__,
        "figures": bench.figures,
    }
    if dist.get_rank() == 0:
        remove(root)
        path = options.out or RESULTS / f"cpu_{dist.get_world_size()}ranks{'_zlib' * options.zlib}.json"
        common.write_json(path, result)
        report(result)
        print(f"raw data: {path}")


def world_bytes(state: State, tensors: dict[str, torch.Tensor]) -> int:
    total = torch.tensor(state.nbytes(tensors))
    dist.all_reduce(total)
    return int(total.item())


def file_system(folder: Path) -> str:
    """Its type, from the longest mount point above the folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point))[1]


def report(result: dict[str, Any]) -> None:
    """The tables of README.md."""
    figures = result["figures"]
    wall = {name: row["wall_s"] for name, row in figures.items()}
    cpu = {name: row["cpu_s"] for name, row in figures.items()}
    rows = []
    for name in figures:
        row = [name, common.Spread.of(wall[name]).format(), f"{common.Spread.of(cpu[name]).median:.2f}"]
        row += [f"{max(figures[name]['extra_bytes']) / 2**20:.0f}", f"{max(figures[name]['collectives']):.0f}"]
        rows.append(row)
    print(f"{result['bytes']['everything'] / 1e9:.2f} GB, of which weights {result['bytes']['weights'] / 1e9:.2f} GB\n")
    print(common.table(["measurement", "wall, s", "CPU, s", "extra MiB", "collectives"], rows), end="\n\n")
    bars = [
        [what, common.ratios(wall, own, other).format(), common.ratios(cpu, own, other).format(), f"<= {most}"]
        for what, own, other, most in BARS
        if own in wall and other in wall
    ]
    print(common.table(["bar", "wall", "CPU", "must be"], bars), end="\n\n")


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join("cpu")
    measure(options)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread may want the GIL while the interpreter ends (torch 2.13), and then aborts


if __name__ == "__main__":
    main()
