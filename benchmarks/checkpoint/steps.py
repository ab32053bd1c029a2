"""How much slower are training steps while an asynchronous save runs, and for how long does it block? See README.md.

python benchmarks/checkpoint/steps.py                   # the table in README.md
python benchmarks/checkpoint/steps.py --rounds 2 --mb-per-s 20

A model that torch's FSDP2 sharded, saved by fsdp2 and by torch's distributed checkpoints (DCP): on the disk as it is,
and on one that takes so many megabytes a second of each rank. In each round the ways take turns.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2.checkpoint
from benchmarks import common
from benchmarks.checkpoint.ways import State, remove

RESULTS = Path(__file__).parent / "results"

# Has something to do in the background; waits for it.
Running = tuple[Callable[[], bool], Callable[[], Any]]


class Disk:
    """What writes take at least: `bytes_per_s` of this process, however many threads write."""

    def __init__(self) -> None:
        self.bytes_per_s = float("inf")
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


DISK = Disk()


class Stream(io.BufferedWriter):
    """A file on that disk, for DCP."""

    def write(self, data: Any) -> int:
        count = super().write(data)
        DISK.wait(count)
        return count


class Files(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if "w" in mode:
            with Stream(io.FileIO(path, "w")) as stream:
                yield stream
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


def throttled_pwritev(fd: int, parts: Any, offset: int) -> int:
    count = real_pwritev(fd, parts, offset)
    DISK.wait(count)
    return count


real_pwritev, os.pwritev = os.pwritev, throttled_pwritev  # what fsdp2 writes with


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that is not")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ways", nargs="*", help="only these")
    parser.add_argument("--mb-per-s", type=float, default=50.0, help="of the slow disk, a rank")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder for temporary files)")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_2ranks_steps.json", help="where to write")
    return parser.parse_args()


def slowest(seconds: float) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def timed(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds of the slowest rank, processor seconds of all threads of this one, and the result."""
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    result = action()
    return slowest(time.perf_counter() - began), time.process_time() - cpu, result


def beside(trainer: common.Trainer, start: Callable[[], Running]) -> dict[str, float]:
    """One save, beside steps until it has ended on all ranks. A step counts that began before."""
    began = time.perf_counter()
    blocked, blocked_cpu, (is_done, finish) = timed(start)
    steps = []
    while not steps or slowest(0.0 if is_done() else 1.0):
        steps.append(timed(trainer.step)[:2])
    finish()
    wall, cpu = (statistics.mean(column) for column in zip(*steps, strict=True))
    passed = slowest(time.perf_counter() - began)
    return {"blocked": blocked, "blocked_cpu": blocked_cpu, "step": wall, "cpu": cpu, "save": passed, "n": len(steps)}


def ways_of(state: State, group: Any) -> dict[str, Callable[[Path], Running]]:
    kept = DefaultStager(StagingOptions(False, False, False, False))

    def own(folder: Path) -> Running:
        handle = fsdp2.checkpoint.save(folder, model=state.model, optimizer=state.optimizer, async_op=True)
        return handle.done, handle.wait

    def other(folder: Path, stager: DefaultStager | None) -> Running:
        writer = dcp.FileSystemWriter(folder)
        writer.fs = Files()
        future: Any = dcp.async_save(
            dict(state.everything), storage_writer=writer, async_stager=stager, process_group=group
        )
        return future.done, future.result

    return {
        "fsdp2": own,
        "DCP": lambda folder: other(folder, None),
        "DCP, stager kept": lambda folder: other(folder, kept),
    }


def measure(options: argparse.Namespace) -> None:
    workload = common.Workload(blocks=options.blocks, dim=options.dim, batch=options.batch)
    trainer = common.Trainer(common.PEERS["torch-fsdp2-true"], workload)
    for _ in range(3):
        trainer.step()
    state = State.of(trainer.model, trainer.optimizer)
    state.whole.clear()
    ways = ways_of(state, dist.new_group())
    if options.ways:
        ways = {name: ways[name] for name in options.ways}
    names = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    root, order, shuffle = Path(names[0]), list(ways), random.Random(0).shuffle
    figures: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_ in range(options.rounds + 1):
        for disk, bytes_per_s in (("as it is", float("inf")), ("slow", options.mb_per_s * 1e6)):
            DISK.bytes_per_s = bytes_per_s
            shuffle(order)
            for way in order:
                plain = [timed(trainer.step)[:2] for _ in range(2)]
                values = beside(trainer, lambda way=way: ways[way](root / way))
                plain += [timed(trainer.step)[:2] for _ in range(2)]
                usual, usual_cpu = (statistics.mean(column) for column in zip(*plain, strict=True))
                values |= {"usual": usual, "step": values["step"] / usual, "cpu": values["cpu"] / usual_cpu}
                if dist.get_rank() == 0:
                    remove(root / way)
                dist.barrier()
                if round_:
                    for name, value in values.items():
                        figures[f"{way}, disk {disk}"][name].append(value)
                    if dist.get_rank() == 0:
                        print(way, disk, {name: round(value, 2) for name, value in values.items()}, flush=True)
    if dist.get_rank() == 0:
        remove(root)
        result = {
            "question": "steps beside an asynchronous save",
            "command": " ".join(["python", "benchmarks/checkpoint/steps.py", *sys.argv[1:]]),
            **common.provenance("cpu"),
            "load_average": os.getloadavg(),
            "workload": asdict(workload),
            "rank_bytes": state.nbytes(state.everything),
            "mb_per_s": options.mb_per_s,
            "figures": figures,
        }
        common.write_json(options.out, result)
        report(result)


def report(result: dict[str, Any]) -> None:
    """The table of README.md."""
    rows = []
    for name, row in result["figures"].items():
        other = result["figures"][f"DCP, disk {name.partition(', disk ')[2]}"]
        for key in ("blocked", "blocked_cpu"):
            row[f"{key}_ratio"] = [own / theirs for own, theirs in zip(row[key], other[key], strict=True)]
        keys = ("step", "cpu", "blocked_ratio", "blocked_cpu_ratio", "blocked", "save", "usual")
        rows.append([name, *(common.Spread.of(row[key]).format() for key in keys)])
    print(f"{result['rank_bytes'] / 1e6:.0f} MB a rank\n")
    header = [
        "way",
        "step / without",
        "its CPU / without",
        "blocked / DCP",
        "CPU / DCP",
        "blocked, s",
        "save, s",
        "step without, s",
    ]
    print(common.table(header, rows))


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join("cpu")
    measure(options)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see main.py


if __name__ == "__main__":
    main()
