"""How much time and memory does it take to make a sharded model with values? Results: README.md.

python benchmarks/init/main.py                          # 0.1 B parameters on 1, 2 and 4 ranks
python benchmarks/init/main.py --sizes 1 --ranks 2      # 1 B; add --dtypes fp32 for one of the two
python benchmarks/init/main.py --sizes 0.1 1 4 --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process that has no threads may be forked

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2.checkpoint
from benchmarks import common
from benchmarks.init.ways import SAVED_BY, SIZES, WAYS, Size, Way, fingerprint

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIB = 2**30
TIMEOUT_S = 900


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.1], choices=list(SIZES), help="1e9 parameters")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--paper", type=int, nargs="*", default=[8, 512], help="ranks of which only one is run")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is done")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="only those whose name begins with one of these")
    parser.add_argument(
        "--memory-gib", type=float, help="what does not fit into this is not run (default: what is free)"
    )
    parser.add_argument("--folder", type=Path, help="for checkpoints (default: the folder for temporary files)")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    options = parser.parse_args()
    options.ways = [name for name in WAYS if any(name.startswith(start) for start in options.ways)]
    return options


# --- one measurement, in processes of its own -------------------------------------------------------------------------


def memory_of(name: str) -> int:
    """Bytes, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def measure(way: Way, size: Size, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """On this rank: wall and processor seconds, and the most memory beyond what the process had before. And what is
    left of it, and a number for the model's values."""
    warm_up(way, folder)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory_of("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    model = way.make(lambda: size.build(dtype), folder)
    passed = time.perf_counter() - wall, time.process_time() - cpu
    peak, left = memory_of("VmHWM") - before, memory_of("VmRSS") - before
    shards = sum(param.to_local().untyped_storage().nbytes() for param in model.parameters())
    found = {"wall_s": passed[0], "cpu_s": passed[1], "peak_bytes": peak, "left_bytes": left, "shard_bytes": shards}
    return {**found, "fingerprint": fingerprint(model)}


def warm_up(way: Way, folder: Path) -> None:
    """What every process does once: imports that torch makes late, meshes, the first DTensor."""
    if way is WAYS["fsdp2 checkpoint.load"]:
        way = WAYS[SAVED_BY]  # the small model has no checkpoint
    way.make(lambda: Size(0, 64, 1, 64).build(torch.float32), folder)
    gc.collect()


def save(size: Size, dtype: torch.dtype, folder: Path) -> None:
    """Write the checkpoint that is loaded afterwards."""
    model = WAYS[SAVED_BY].make(lambda: size.build(dtype), folder)
    fsdp2.checkpoint.save(folder, model=model)


def provenance() -> dict[str, Any]:
    return common.provenance("cpu")


def on_ranks(body: Callable[..., Any], ranks: int, *args: Any, paper: bool = False) -> list[Any]:
    """Call `body` in forked processes that are all ranks of one group, or the middle one of ranks on paper. Imports are
    done by then, so that processes start at once and their memory is that of the body."""
    context = multiprocessing.get_context("fork")
    folder = tempfile.mkdtemp()
    processes, pipes = [], []
    for rank in [ranks // 2] if paper else range(ranks):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(send, rank, ranks, f"{folder}/store", paper, body, args))
        process.start()
        send.close()
        processes.append(process)
        pipes.append(receive)
    try:
        found = []
        for pipe in pipes:
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"a rank did not finish within {TIMEOUT_S} s")
            found.append(pipe.recv())  # EOFError: a rank was killed, for its memory, say
    finally:
        for process in processes:
            process.join(5)
            process.kill()
        shutil.rmtree(folder)
    for each in found:
        if isinstance(each, str):
            raise RuntimeError(each)
    return found


def _rank(pipe: Connection, rank: int, ranks: int, path: str, paper: bool, body: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "DTensor random operators")  # torch's own recipe, without a GPU
    try:
        if paper:
            dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        else:
            dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(path, ranks))
        result = body(*args)
        if not paper:
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = traceback.format_exc()
    pipe.send(result)
    pipe.close()


# --- the run ----------------------------------------------------------------------------------------------------------


@contextmanager
def checkpoint_of(size: Size, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Path]:
    """A folder with a checkpoint that two ranks wrote; empty if no way reads it."""
    parent = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        if any("checkpoint" in name for name in options.ways) and options.ranks:
            on_ranks(save, 2, size, dtype, parent / "saved")
        yield parent / "saved"
    finally:
        shutil.rmtree(parent)


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise LookupError("MemAvailable")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of the table; those that do not fit say how much they would need."""
    limit = options.memory_gib * GIB if options.memory_gib else available_bytes() - 1.5 * GIB
    cells = []
    for size in (SIZES[each] for each in options.sizes):
        with torch.device("meta"):
            numel = sum(param.numel() for param in size.build(torch.float32).parameters())
        for name, dtype in DTYPES.items():
            if name not in options.dtypes:
                continue
            worlds = [(ranks, False) for ranks in options.ranks] + [(ranks, True) for ranks in options.paper]
            for way in options.ways:
                for ranks, paper in worlds:
                    if paper and not WAYS[way].on_paper:
                        continue
                    whole = numel * dtype.itemsize
                    need = whole // ranks if paper else WAYS[way].total_bytes(whole, ranks)
                    key = {"size": size.billions, "numel": numel, "dtype": name, "ranks": ranks, "paper": paper}
                    cells.append({**key, "way": way, "need_bytes": need, "fits": need <= limit, "rounds": []})
            with checkpoint_of(size, dtype, options) as folder:
                fill(
                    [cell for cell in cells if (cell["size"], cell["dtype"]) == (size.billions, name)], folder, options
                )
    return cells


def fill(cells: list[dict[str, Any]], folder: Path, options: argparse.Namespace) -> None:
    """Measure each cell once a round, in an order that is drawn anew each round."""
    shuffled = random.Random(0)
    for _ in range(options.rounds):
        todo = [cell for cell in cells if cell["fits"]]
        shuffled.shuffle(todo)
        for cell in todo:
            args = WAYS[cell["way"]], SIZES[cell["size"]], DTYPES[cell["dtype"]], folder
            found = on_ranks(measure, cell["ranks"], *args, paper=cell["paper"])
            cell["rounds"].append(found)
            worst = max(each["wall_s"] for each in found), max(each["peak_bytes"] for each in found) / GIB
            where = f"{cell['size']:g} B {cell['dtype']}, {cell['ranks']} ranks{' on paper' if cell['paper'] else ''}"
            print(f"{where}: {cell['way']}: {worst[0]:.2f} s, {worst[1]:.2f} GiB", file=sys.stderr, flush=True)


# --- the tables -------------------------------------------------------------------------------------------------------


def entry(cell: dict[str, Any] | None) -> str:
    """Seconds of the slowest rank (median over the rounds), GiB of the rank with the most (largest of the rounds)."""
    if cell is None:
        return ""
    if not cell["fits"]:
        return f"does not fit ({cell['need_bytes'] / GIB:.0f} GiB)"
    seconds = common.Spread.of([max(rank["wall_s"] for rank in ranks) for ranks in cell["rounds"]]).median
    peak = max(rank["peak_bytes"] for ranks in cell["rounds"] for rank in ranks)
    return f"{seconds:.2f} s, {peak / GIB:.2f}"


def same_everywhere(cells: list[dict[str, Any]], way: str, reference: set[int]) -> str:
    """Whether the values are those of one process, or at least the same on any number of ranks."""
    found = {
        rank["fingerprint"]
        for cell in cells
        if cell["way"] == way and not cell["paper"]
        for ranks in cell["rounds"]
        for rank in ranks
    }
    if not found:
        return ""
    if found == reference:
        return "as one process"
    return "on all ranks alike" if len(found) == 1 else "with the ranks"


def report(result: dict[str, Any]) -> None:
    """The tables of README.md."""
    cells = result["cells"]
    for size, dtype in dict.fromkeys((cell["size"], cell["dtype"]) for cell in cells):
        these = [cell for cell in cells if (cell["size"], cell["dtype"]) == (size, dtype)]
        worlds = list(dict.fromkeys((cell["ranks"], cell["paper"]) for cell in these))
        at = {(cell["way"], cell["ranks"], cell["paper"]): cell for cell in these}
        reference = {
            rank["fingerprint"]
            for cell in these
            if cell["way"].startswith("eager") and not cell["paper"]
            for ranks in cell["rounds"]
            for rank in ranks
        }
        rows = [
            [way, *(entry(at.get((way, *world))) for world in worlds), same_everywhere(these, way, reference)]
            for way in dict.fromkeys(cell["way"] for cell in these)
        ]
        header = [f"{ranks}{' on paper' if paper else ''}" for ranks, paper in worlds]
        print(f"\n{size:g} B parameters, {dtype}; ranks:\n")
        print(common.table(["way", *header, "values"], rows))


def main() -> None:
    options = parse()
    machine = on_ranks(provenance, 1)[0]
    cells = run(options)
    result = {
        "question": "initialisation",
        "command": " ".join(["python", "benchmarks/init/main.py", *sys.argv[1:]]),
        **machine,
        "ranks": options.ranks,
        "load_average": os.getloadavg(),
        "cells": cells,
    }
    path = options.out or RESULTS / f"cpu_{'_'.join(f'{size:g}' for size in options.sizes)}B.json"
    common.write_json(path, result)
    report(result)
    print(f"\nraw data: {path}")


if __name__ == "__main__":
    main()
