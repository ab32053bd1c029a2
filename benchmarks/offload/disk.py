"""How fast is a step with optimizer state on disk, compared with the bare disk? Results: README.md.

python benchmarks/offload/disk.py --tier /a/fast/disk
python benchmarks/offload/disk.py --dry-run
python benchmarks/offload/disk.py --deepspeed         # also ZeRO-Infinity, which must be installed (see `zero.py`)

A step of AdamW reads and writes the state of all units, and with `params="files"` (through the page cache) their
parameters too, half as many bytes. The bare disk reads and writes as many bytes as the state has, with as many threads
and requests of the same size past the page cache, and nothing is done with them. Rounds alternate. Of every step it is
noted how many bytes the disk moved for this process: ZeRO-Infinity moves more than the state.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.offload import zero
from fsdp2 import Offload, fully_shard, offload_optimizer

RESULTS = Path(__file__).parent / "results"
THREADS, PIECE = 4, 2 << 20  # of fsdp2.optim.on_disk and fsdp2.disk.direct
MIB = 2**20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument(
        "--dim", type=int, default=2048, help="a unit has dim^2 elements, and 8 bytes of state for each"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    parser.add_argument("--deepspeed", action="store_true", help="time DeepSpeed's ZeRO-Infinity too")
    parser.add_argument("--dry-run", action="store_true", help="smallest size, to see that it runs")
    options = parser.parse_args()
    if options.dry_run:
        options.units, options.dim, options.rounds = 2, 512, 1
    return options


class Bare:
    """Reads and writes `nbytes`, piece by piece."""

    def __init__(self, folder: Path, nbytes: int):
        self._pieces = range(0, nbytes // PIECE * PIECE or PIECE, PIECE)
        self._fd, path = tempfile.mkstemp(dir=folder)
        os.close(self._fd)
        self._fd = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        os.unlink(path)
        self._threads = ThreadPoolExecutor(THREADS)
        self._buffers = [large_page() for _ in range(THREADS)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(PIECE)
        os.posix_fallocate(self._fd, 0, self._pieces[-1] + PIECE)
        self.run()

    def prepare(self) -> None:
        """Nothing."""

    def run(self) -> None:
        """Each piece is read by one thread, and then written."""
        list(self._threads.map(self._every, range(THREADS)))

    def _every(self, first: int) -> None:
        for offset in self._pieces[first::THREADS]:
            os.preadv(self._fd, [self._buffers[first]], offset)
            os.pwritev(self._fd, [self._buffers[first]], offset)


def large_page() -> memoryview:
    """The memory that the disk takes fastest."""
    memory = mmap.mmap(-1, 2 * PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PIECE
    return memoryview(memory)[start : start + PIECE]


class Tier:
    """Steps units whose state is on disk."""

    def __init__(self, policy: Offload, units: int, dim: int):
        self.model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(units)))
        for layer in self.model:
            fully_shard(layer, offload_policy=policy)
        fully_shard(self.model)
        self.optimizer = offload_optimizer(torch.optim.AdamW, self.model.parameters(), fused=True)
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.run()

    def prepare(self) -> None:
        """Nothing: gradients stay."""

    def run(self) -> None:
        """A step, until everything is written."""
        self.optimizer.step()
        self.optimizer.wait()


class Infinity:
    """Steps the same weights with their state on disk, by DeepSpeed."""

    def __init__(self, folder: Path, units: int, dim: int):
        model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(units)))
        self.engine = zero.engine(model, zero.disk(folder), batch=1, clip=0.0)
        self.input = torch.ones(1, dim)
        self.prepare()
        self.run()

    def prepare(self) -> None:
        """Make gradients, and write them; this is not timed."""
        self.engine.backward(self.engine(self.input).sum())

    def run(self) -> None:
        """A step, until everything is written."""
        self.engine.step()


def moved() -> int:
    """Bytes that the disk has read and written for this process."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


def main() -> None:
    options = parse()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    nbytes = 8 * options.units * options.dim**2
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.tier or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ways: dict[str, Bare | Tier | Infinity] = {"bare": Bare(folder, nbytes)}
        ways["fsdp2"] = Tier(Offload(tier=folder), options.units, options.dim)
        all_files = Offload(grads=True, params="files", tier=folder)
        ways["fsdp2, parameters too"] = Tier(all_files, options.units, options.dim)
        if options.deepspeed:
            ways["DeepSpeed"] = Infinity(folder, options.units, options.dim)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        bytes_moved: dict[str, list[int]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, each in ways.items():
                each.prepare()
                before, begin = moved(), time.perf_counter()
                each.run()
                seconds[name].append(time.perf_counter() - begin)
                bytes_moved[name].append(moved() - before)
    rates = {
        name: [count / MIB / passed for count, passed in zip(bytes_moved[name], seconds[name], strict=True)]
        for name in ways
    }
    rows = []
    for name, each in seconds.items():
        row = [name, common.Spread.of(each).format(), f"{max(bytes_moved[name]) / MIB:.0f}"]
        row += [common.Spread.of(rates[name]).format(0), common.ratios(rates, name, "bare").format()]
        rows.append(row)
    result = {
        "question": "bytes per second of the state on disk",
        "command": " ".join(["python", "benchmarks/offload/disk.py", *sys.argv[1:]]),
        **common.provenance("cpu"),
        "workload": {"units": options.units, "dim": options.dim, "bytes": 2 * nbytes},
        "deepspeed": zero.version() if options.deepspeed else None,
        "seconds": seconds,
        "bytes_moved": bytes_moved,
    }
    path = options.out or RESULTS / "disk.json"
    common.write_json(path, result)
    print(common.table(["", "a step, s", "MiB moved", "MiB/s", "of the bare disk"], rows))
    print(f"\nraw data: {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
