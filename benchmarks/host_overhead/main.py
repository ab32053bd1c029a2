"""How much host time does a unit take in a step, in addition to computing? Results: README.md.

python benchmarks/host_overhead/main.py                                          # the tables in README.md
python benchmarks/host_overhead/main.py --models tiny --worlds 8 --rounds 15     # 64 units of 8 parameters: 20 s
python benchmarks/host_overhead/main.py --models tiny --worlds 8 --profile fsdp2-true
python benchmarks/host_overhead/main.py --worlds 8 --device cuda                 # what it takes to issue the kernels
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, fake
from benchmarks.host_overhead.cases import CASES, profile, time_steps

RESULTS = Path(__file__).parent / "results"
SHORT = {"worlds": [8, 512], "rounds": 7, "variants": ["none", "torch-fsdp2-true", "fsdp2-true"]}
DRY_RUN = {
    "models": ["gpt"],
    "worlds": [8],
    "rounds": 2,
    "warmup": 1,
    "variants": ["none", "torch-fsdp2-true", "fsdp2-true"],
}
FLOOR = "none"
ALONE = ", collectives alone"
CLOCKS = {
    "cpu": {"thread_seconds": "Processor time of the training thread", "seconds": "Wall time"},
    # a thread of autograd's runs the backward there
    "cuda": {"seconds": "Wall time until a step has been issued", "cpu_seconds": "Processor time of the process"},
}


def parse() -> argparse.Namespace:
    variants = [name for name in common.PEERS if name not in ("ddp", "fsdp1")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 512, 4096], help="ranks, of which one is run")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant before")
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants, metavar="VARIANT")
    parser.add_argument("--rank", type=int, default=0, help="the rank that is run; tiny parameters live on the first")
    parser.add_argument("--profile", choices=variants, metavar="VARIANT", help="where this one's time goes, instead")
    parser.add_argument("--device", choices=CLOCKS, default="cpu")
    common.add_size_options(parser)
    options = common.apply_size_options(parser, SHORT, DRY_RUN)
    if FLOOR not in options.variants:
        parser.error(f"what sharding costs is what it adds to {FLOOR!r}: name it among the --variants")
    return options


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One case for each model and world, on each backend in a process of its own."""
    cases = []
    for model in options.models:
        for world in options.worlds:
            case: dict[str, Any] = {"model": model, "world": world, "num_units": len(CASES[model].build().blocks)}
            for backend in fake.BACKENDS:
                where = fake.FakeRank(options.rank, world, backend)
                args = model, options.variants, options.rounds, options.warmup, options.device
                case[backend] = fake.in_fake_rank(where, time_steps, *args)
            cases.append(case)
            print(f"{model}, {world} ranks: done", file=sys.stderr, flush=True)
    return cases


# --- the tables -------------------------------------------------------------------------------------------------------


def net(seconds: dict[str, list[float]], name: str, *, without_collectives: bool = False) -> list[float]:
    """Seconds of a step beyond the unsharded one, round by round; optionally without the collectives."""
    alone = seconds[name + ALONE] if without_collectives else [0.0] * len(seconds[name])
    rounds = zip(seconds[name], seconds[FLOOR], alone, strict=True)
    return [own - floor - moved for own, floor, moved in rounds]


def peer_of(name: str) -> str:
    """torch's FSDP2 with the same setting."""
    return name if name.startswith("torch-") else f"torch-{name}"


def compared(case: dict[str, Any], clock: str, name: str) -> dict[str, tuple[common.Spread, common.Spread | None]]:
    """Column -> (seconds a unit, ratio to torch's FSDP2 with the same setting)."""
    columns = {}
    ways = {"fake": ("fake", False), "fake, collectives subtracted": ("fake", True), "silent": ("silent", False)}
    for title, (backend, without) in ways.items():
        seconds = case[backend][clock]
        own = net(seconds, name, without_collectives=without)
        spread = common.Spread.of([value / case["num_units"] for value in own])
        ratio = None
        if peer_of(name) in seconds:
            other = net(seconds, peer_of(name), without_collectives=without)
            ratio = common.Spread.of([mine / theirs for mine, theirs in zip(own, other, strict=True)])
        columns[title] = spread, ratio
    return columns


def rows_of(case: dict[str, Any], clock: str) -> list[list[str]]:
    seconds = case["fake"][clock]
    micro = 1e6 / case["num_units"]
    rows = []
    for name in (name for name in seconds if not name.endswith(ALONE)):
        row = [case["model"], str(case["world"]), name, common.Spread.of(seconds[name]).format(0, micro)]
        if name == FLOOR:
            rows.append(row + [""] * 7)
            continue
        row.append(common.Spread.of(seconds[name + ALONE]).format(0, micro))
        for spread, ratio in compared(case, clock, name).values():
            row += [spread.format(0, 1e6), ratio.format() if ratio else ""]
        rows.append(row)
    return rows


def report(cases: list[dict[str, Any]], device: str) -> str:
    """The tables of README.md: microseconds a unit a step, and ratios to torch's FSDP2 with the same setting."""
    header = [
        "model",
        "ranks",
        "variant",
        "fake: step",
        "collectives alone",
        "step - none",
        "/ torch's",
        "- collectives",
        "/ torch's",
        "silent: - none",
        "/ torch's",
    ]
    parts = []
    for clock, title in CLOCKS[device].items():
        rows = [row for case in cases for row in rows_of(case, clock)]
        parts.append(f"{title}, microseconds a unit:\n\n{common.table(header, rows)}")
    return "\n\n".join(parts)


def main() -> None:
    options = parse()
    if options.profile:
        for model in options.models:
            for world in options.worlds:
                where = fake.FakeRank(options.rank, world, "silent")
                text = fake.in_fake_rank(where, profile, model, options.profile, options.warmup, options.device)
                print(f"{options.profile}: {model}, {world} ranks\n\n{text}")
        return
    machine = fake.in_fake_rank(fake.FakeRank(0, 1), common.provenance, options.device)
    result = {
        "question": "host overhead",
        "command": " ".join(["python", "benchmarks/host_overhead/main.py", *sys.argv[1:]]),
        **machine,
        "backend": list(fake.BACKENDS),
        "ranks": options.worlds,
        "rank": options.rank,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "models": {name: CASES[name].description for name in options.models},
        "cases": measure(options),
    }
    path = common.out_path(options, RESULTS, f"{options.device}_fake.json")
    common.write_json(path, result)
    print(report(result["cases"], options.device))
    print(f"\nraw data: {path}")


if __name__ == "__main__":
    main()
