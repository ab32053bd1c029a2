"""How much memory do unsharded parameters, buffers and gradients take during a step? Results: README.md.

python benchmarks/memory/main.py                       # the table and the figure in README.md: 20 s
python benchmarks/memory/main.py --dtype mixed --ranks 4
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.memory.tracking import Kind, Moment, Tracker, allocated, timeline
from fsdp2 import optim
from fsdp2.comm import comm_for

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
BASELINE = "torch-fsdp2-true"
LANES = {"direct": 0, "packed": 1 << 60, "auto": None}  # smallest shard, in bytes, that takes the direct lane
IN_BACKWARD = "fsdp2-true in-backward"  # with `step_in_backward`
VARIANTS = [
    "ddp",
    "fsdp1",
    BASELINE,
    "torch-fsdp2-false",
    *[f"fsdp2-true {lane}" for lane in LANES],
    "fsdp2-false auto",
    IN_BACKWARD,
]
PANELS = {  # of the figure
    "unsharded + communication": [Kind.PARAMETER, Kind.COMMUNICATION],
    "communication alone": [Kind.COMMUNICATION],
    "gradients": [Kind.GRADIENT],
}
SHORT: dict[str, Any] = {}
DRY_RUN = {"blocks": 2, "dim": 64, "variants": [BASELINE, "fsdp2-true auto"]}


def parse() -> argparse.Namespace:
    defaults = common.Workload(batch=1, length=8)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "mixed"], default=defaults.dtype)
    for name in ("blocks", "dim", "heads", "vocab", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    common.add_size_options(parser)
    options = common.apply_size_options(parser, SHORT, DRY_RUN)
    if BASELINE not in options.variants:
        parser.error(f"everything is compared with {BASELINE}: name it among the --variants")
    return options


@contextmanager
def lanes(setting: str) -> Iterator[None]:
    """All parameters take that lane, in units made within; ``auto`` changes nothing."""
    group = dist.group.WORLD
    assert group is not None
    comm = comm_for(group, torch.device("cpu"))
    before = comm.direct_min_bytes
    if LANES[setting] is not None:
        comm.direct_min_bytes = LANES[setting]
    try:
        yield
    finally:
        comm.direct_min_bytes = before


@dataclass(frozen=True)
class Found:
    """Of one step on this rank: bytes by kind over time, and the most that the allocator gave out beyond shards."""

    moments: list[Moment]
    allocated: int


def track(variant: str, workload: common.Workload) -> Found:
    """The third step of a variant, from before its forward to after its gradients are dropped; and the fourth, by the
    allocator."""
    name, _, lane = variant.partition(" ")
    peer = common.PEERS[name]
    with lanes(lane if lane in LANES else "auto"):
        with Tracker() as tracker:
            model = peer.wrap(workload.model(), workload)
            tracker.follow(model)
            if name != "ddp":
                for param in model.parameters():
                    tracker.mark(param, Kind.SHARD)
            if variant == IN_BACKWARD:
                sgd = optim.local_optimizer(torch.optim.SGD, model.parameters(), lr=0.0)
                optim.step_in_backward(
                    sgd, clip=lambda params: [tracker.mark(each.grad, Kind.GRADIENT) for each in params]
                )
            step = step_of(model, workload, workload.dtype == "mixed" and peer.autocasts, tracker)
            for _ in range(2):
                step()
            gc.collect()
            torch.zeros(())  # an operator, so that this moment is noted
            since = tracker.now
            step()
            moments = timeline(tracker, since, tracker.now)
        beyond_shards = sum(moments[0].nbytes) - moments[0].nbytes[Kind.SHARD]
        return Found(moments, beyond_shards + allocated(step))


def step_of(model: torch.nn.Module, workload: common.Workload, autocasts: bool, tracker: Tracker) -> Callable[[], None]:
    """Forward, backward, and the gradients dropped; always on the same batch."""
    tokens, targets = workload.data(1)[0]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        for param in model.parameters():
            tracker.mark(param.grad, Kind.GRADIENT)
            param.grad = None

    return step


def peaks(found: Found) -> dict[str, int]:
    """Largest sums of bytes over the step."""

    def largest(*kinds: Kind) -> int:
        return max(sum(moment.nbytes[kind] for kind in kinds) for moment in found.moments)

    return {
        "unsharded": largest(Kind.PARAMETER),
        "communication": largest(Kind.COMMUNICATION),
        "unsharded_and_communication": largest(Kind.PARAMETER, Kind.COMMUNICATION),
        "gradients": largest(Kind.GRADIENT),
        "with_gradients": largest(Kind.PARAMETER, Kind.COMMUNICATION, Kind.GRADIENT),
        "shards": largest(Kind.SHARD),
        "other": largest(Kind.OTHER),
        "allocated": found.allocated,
    }


def unit_bytes(workload: common.Workload) -> dict[str, int]:
    """Of the unsharded parameters of a block and of the root's own, in the compute dtype."""
    model = workload.model()
    itemsize = 4 if workload.dtype == "float32" else 2
    block = sum(param.numel() for param in model.blocks[0].parameters())
    whole = sum(param.numel() for param in model.parameters())
    return {"block": block * itemsize, "root": (whole - len(model.blocks) * block) * itemsize}


def most_by_product(found: Found) -> dict[str, list[int]]:
    """For the figure: numbers of matrix products done, and the most bytes of some kinds after each."""
    groups = [[*group] for _, group in groupby(found.moments, key=lambda moment: moment.products)]
    return {"products": [group[0].products for group in groups]} | {
        title: [max(sum(moment.nbytes[kind] for kind in kinds) for moment in group) for group in groups]
        for title, kinds in PANELS.items()
    }


def report(result: dict[str, Any]) -> str:
    """The table of README.md: MiB, and ratios to torch's FSDP2."""
    units, found = result["unit_bytes"], result["peaks"]
    header = ["variant", "unsharded", "communication", "both at once", f"/ {BASELINE}", "in blocks, beyond the root"]
    header += ["gradients", "and gradients", f"/ {BASELINE}", "allocator's", f"/ {BASELINE}", "shards"]
    rows = []
    for name, own in found.items():
        both, whole = own["unsharded_and_communication"], own["with_gradients"]
        row = [name, *[f"{own[key] / MIB:.1f}" for key in ("unsharded", "communication")], f"{both / MIB:.1f}"]
        row += [f"{both / found[BASELINE]['unsharded_and_communication']:.2f}"]
        row += [f"{(both - units['root']) / units['block']:.2f}", f"{own['gradients'] / MIB:.1f}", f"{whole / MIB:.1f}"]
        row += [f"{whole / found[BASELINE]['with_gradients']:.2f}", f"{own['allocated'] / MIB:.1f}"]
        row += [f"{own['allocated'] / found[BASELINE]['allocated']:.2f}", f"{own['shards'] / MIB:.1f}"]
        rows.append(row)
    return common.table(header, rows)


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join("cpu")
    names = common.Workload.__dataclass_fields__
    workload = common.Workload(**{name: getattr(options, name) for name in names if name != "device"})
    found = {variant: track(variant, workload) for variant in options.variants}
    result = {
        "question": "memory over a step",
        "command": " ".join(["python", "benchmarks/memory/main.py", *sys.argv[1:]]),
        **common.provenance("cpu"),
        "workload": asdict(workload),
        "unit_bytes": unit_bytes(workload),
        "peaks": {variant: peaks(each) for variant, each in found.items()},
        "timelines": {variant: most_by_product(each) for variant, each in found.items()},
    }
    if dist.get_rank() == 0:
        path = common.out_path(options, RESULTS, f"cpu_{dist.get_world_size()}ranks_{workload.dtype}.json")
        common.write_json(path, result)
        print(f"Largest MiB on rank 0:\n\n{report(result)}\n\nraw data: {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
