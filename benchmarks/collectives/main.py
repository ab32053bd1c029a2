"""How long does each `Comm` take for a unit's bytes, compared with the backend's own collective? Results: README.md.

python benchmarks/collectives/main.py                                # 1 KB to 256 MB, 2 ranks: some minutes
python benchmarks/collectives/main.py --short                        # 1 KB to 16 MB: half a minute
python benchmarks/collectives/main.py --ranks 4 --sizes 1e3 1e8 256e6 --rounds 11
torchrun --nproc-per-node 8 benchmarks/collectives/main.py --device cuda
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from fsdp2._torch.extras import all_gather_flat, reduce_scatter_flat
from fsdp2.comm import comm_for
from fsdp2.comm.base import Comm, Operand, OpInfo
from fsdp2.comm.flat import FlatComm
from fsdp2.extras.comm_memory import FlatAllGather, FlatReduceScatter
from fsdp2.extras.custom_comm import CustomComm
from fsdp2.extras.narrow import NarrowComm

RESULTS = Path(__file__).parent / "results"
BASELINE = "backend"
SIZES = [1e3, 16e3, 256e3, 1e6, 4e6, 16e6, 64e6, 256e6]
SHORT = {"sizes": [1e3, 256e3, 16e6], "rounds": 7}
DRY_RUN = {"sizes": [1e3], "rounds": 1, "warmup": 1}
BYTES_A_STEP = 4e6  # small operands travel several times in a timed step, or the clock would measure the barrier


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="bytes in fp32")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant before")
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    common.add_size_options(parser)
    return common.apply_size_options(parser, SHORT, DRY_RUN)


class PlainMemory:
    """Ordinary memory: what a custom collective costs when it does nothing special."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)


def comms(device: str) -> dict[str, Comm]:
    """The implementations that this backend can run."""
    group = dist.group.WORLD
    assert group is not None
    memory = PlainMemory()
    own = comm_for(group, torch.device(device))
    flat = FlatComm()
    custom = CustomComm(flat, FlatAllGather(memory), FlatReduceScatter(memory))
    return {"flat": flat, type(own).__name__.removesuffix("Comm").lower(): own, "custom": custom}


def gathers(numel: int, device: str) -> dict[str, Callable[[], None]]:
    """Steps that all-gather a flat fp32 tensor of `numel` in place. All are run once, and compared."""
    group = dist.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    operand = Operand(torch.zeros(numel, device=device), range(0, numel + 1, numel // size))

    def backend() -> None:
        all_gather_flat(operand.full, operand.row(rank), group).wait()

    def through(comm: Comm) -> Callable[[], None]:
        info = OpInfo("all_gather", "", numel, operand.full.nbytes, operand.full.dtype, group, operand.full.device)
        gather = comm.plan_all_gather([operand], info)
        return lambda: gather.wait(gather.start())

    steps = {BASELINE: backend} | {name: through(comm) for name, comm in comms(device).items()}
    for name, step in steps.items():
        operand.full.zero_()
        operand.row(rank).fill_(rank + 1)
        step()
        right = all(bool((row == owner + 1).all()) for owner, row in enumerate(operand.full.chunk(size)))
        if not right:
            raise RuntimeError(f"{name}: wrong result of an all-gather of {numel} elements")
    return steps


def scatters(numel: int, device: str, wire: torch.dtype) -> dict[str, Callable[[], None]]:
    """Steps that reduce-scatter a flat tensor of `numel` in `wire` into fp32, and the backend's own: in fp32, and with
    a narrower `wire` in that too ("backend narrow"; sums in it)."""
    group = dist.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(wire).float().to(device)
    bounds = range(0, numel + 1, numel // size)
    narrow, output = values.to(wire), torch.empty(numel // size, device=device)
    narrow_output = torch.empty_like(output, dtype=wire)

    is_narrow = wire != torch.float32

    def backend() -> None:
        reduce_scatter_flat(output, values, dist.ReduceOp.SUM, group).wait()

    def backend_narrow() -> None:
        reduce_scatter_flat(narrow_output, narrow, dist.ReduceOp.SUM, group).wait()

    def through(comm: Comm) -> Callable[[], None]:
        info = OpInfo("reduce_scatter", "", numel, values.nbytes, values.dtype, group, values.device)
        scatter = (NarrowComm(wire, comm) if is_narrow else comm).plan_reduce_scatter([bounds], info, average=False)
        return lambda: scatter.wait(scatter.start([values], [output]))

    ours = {name: through(comm) for name, comm in comms(device).items() if not (is_narrow and name == "custom")}
    backend()
    expected = output.clone()
    for name, step in ours.items():
        step()
        if (output - expected).abs().max() > 1e-5:
            raise RuntimeError(f"{name}: wrong result of a reduce-scatter of {numel} elements")
    return {BASELINE: backend} | ({"backend narrow": backend_narrow} if is_narrow else {}) | ours


KINDS: dict[str, Callable[[int, str], dict[str, Callable[[], None]]]] = {
    "all-gather": gathers,
    "reduce-scatter": lambda numel, device: scatters(numel, device, torch.float32),
    "reduce-scatter, bf16 on the wire": lambda numel, device: scatters(numel, device, torch.bfloat16),
}


def repeated(step: Callable[[], None], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run


def report(cases: list[dict[str, Any]], clock: str, kind: str) -> str:
    """A table of one kind of collective: the backend's time, and every implementation's as a part of it."""
    rows = []
    for case in cases:
        seconds = case[clock]
        own = [common.ratios(seconds, name, BASELINE).format() for name in seconds if name != BASELINE]
        rows.append([f"{case['bytes'] / 1000:,.0f} KB", common.Spread.of(seconds[BASELINE]).format(2, 1000), *own])
    return common.table([kind, f"{BASELINE}, ms", *[name for name in cases[0][clock] if name != BASELINE]], rows)


def measure(options: argparse.Namespace) -> None:
    size = dist.get_world_size()
    cases: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for kind, make in KINDS.items():
        for nbytes in options.sizes:
            numel = max(1, round(nbytes / 4 / size)) * size
            times = max(1, min(50, round(BYTES_A_STEP / nbytes)))
            steps = {name: repeated(step, times) for name, step in make(numel, options.device).items()}
            timings = common.interleave(steps, options.rounds, options.warmup, options.device)
            case: dict[str, Any] = {"bytes": numel * 4, "calls_a_step": times}
            for clock, seconds in (("seconds", timings.wall), ("cpu_seconds", timings.cpu)):
                case[clock] = {name: [value / times for value in values] for name, values in seconds.items()}
            cases[kind].append(case)
    if dist.get_rank() != 0:
        return
    path = common.out_path(options, RESULTS, f"{options.device}_{size}ranks.json")
    command = " ".join(["python", "benchmarks/collectives/main.py", *sys.argv[1:]])
    facts = common.provenance(options.device)
    result = {"question": "collectives", "command": command, **facts, "rounds": options.rounds, "cases": cases}
    common.write_json(path, result)
    for title, clock in (("Wall time of the slowest rank", "seconds"), ("Processor time of a rank", "cpu_seconds")):
        print(f"{title}:\n")
        for kind in KINDS:
            print(f"{report(cases[kind], clock, kind)}\n")
    print(f"raw data: {path}")


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join(options.device, options.threads)
    measure(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
