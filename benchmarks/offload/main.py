"""What does a training step with offload cost, and how much of it is the optimizer? Results: README.md.

python benchmarks/offload/main.py                     # the table in README.md
python benchmarks/offload/main.py --dry-run
python benchmarks/offload/main.py --deepspeed         # also DeepSpeed, which must be installed
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
from benchmarks import common
from benchmarks.offload import zero
from fsdp2 import Offload

RESULTS = Path(__file__).parent / "results"
BASELINE = "fsdp2, none, {}"
THEIRS = "torch, CPUOffloadPolicy, {}"
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}}
TIER = Path(tempfile.gettempdir()) / "fsdp2-tier"
SETTINGS = {
    "states": Offload(),
    "states and gradients": Offload(grads=True),
    "all": Offload(grads=True, params=True),
    "all, not overlapped": Offload(grads=True, params=True, overlap=False),
    "states on disk": Offload(tier=TIER),
    "all, states and parameters in files": Offload(grads=True, params="files", tier=TIER),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=12, help="timed runs of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="runs of each variant before")
    parser.add_argument("--steps", type=int, default=3, help="training steps of a run, so that a step can be hidden")
    parser.add_argument("--blocks", type=int, default=26, help="of twelve parameters")
    parser.add_argument("--dim", type=int, default=128, help="width of the model")
    parser.add_argument("--deepspeed", action="store_true", help="time DeepSpeed's ZeRO-3 too; see `zero.py`")
    parser.add_argument("--dry-run", action="store_true", help="smallest size, to see that it runs")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    options = parser.parse_args()
    if options.dry_run:
        options.rounds, options.warmup, options.steps, options.blocks, options.dim = 1, 1, 1, 2, 16
    return options


def variant(
    workload: common.Workload, num_steps: int, is_alone: bool, library: Any, policy: Any, make: Callable[..., Any]
) -> Callable[[], None]:
    """Some training steps with clipping, until everything is done; or, alone, clipping and the optimizer's steps, each
    until it is done, with the gradients of one backward."""
    model: Any = workload.model()
    options = {} if policy is None else {"offload_policy": policy}
    for block in model.blocks:
        library.fully_shard(block, **options)
    library.fully_shard(model, **options)
    optimizer = make(model.parameters())
    clip = fsdp2.clip_grad_norm_ if library is fsdp2 else torch.nn.utils.clip_grad_norm_
    batches = workload.data()

    def backward(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()

    def finish() -> None:
        if isinstance(optimizer, fsdp2.OffloadedOptimizer):
            optimizer.wait()

    def run() -> None:
        for batch in batches[:num_steps]:
            backward(*batch)
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finish()

    def run_alone() -> None:
        for _ in range(num_steps):
            clip(model.parameters(), 1.0)
            optimizer.step()
            finish()

    if is_alone:
        backward(*batches[0])
    return run_alone if is_alone else run


def variants(workload: common.Workload, num_steps: int, is_alone: bool) -> dict[str, Callable[[], None]]:
    adamw, result = torch.optim.AdamW, {}
    for kind, settings in IMPLEMENTATIONS.items():
        cases: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
            BASELINE: (fsdp2, None, lambda params, s=settings: fsdp2.local_optimizer(adamw, params, **s)),
            "torch, none, {}": (torch_fsdp, None, lambda params, s=settings: adamw(params, **s)),
            THEIRS: (
                torch_fsdp,
                torch_fsdp.CPUOffloadPolicy(pin_memory=False),
                lambda params, s=settings: adamw(params, **s),
            ),
        }
        for name, policy in SETTINGS.items():
            make = lambda params, s=settings: fsdp2.offload_optimizer(adamw, params, **s)  # noqa: E731
            cases[f"fsdp2, {name}, {{}}"] = fsdp2, policy, make
        result |= {name.format(kind): variant(workload, num_steps, is_alone, *case) for name, case in cases.items()}
    return result


def report(seconds: dict[str, list[float]], num_steps: int) -> str:
    """The table of README.md."""
    rows = []
    for name in seconds:
        kind = name.rpartition(", ")[2] if name.endswith((*IMPLEMENTATIONS,)) else "fused"
        bars = [common.ratios(seconds, name, baseline.format(kind)).format() for baseline in (BASELINE, THEIRS)]
        rows.append([name, common.Spread.of([each / num_steps for each in seconds[name]]).format(1, 1000), *bars])
    return common.table(["variant", "a step, ms", "/ no offload", "/ torch's CPUOffloadPolicy"], rows)


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join("cpu")
    workload = common.Workload(blocks=options.blocks, dim=options.dim, heads=4, batch=1, length=32)
    steps = variants(workload, options.steps, is_alone=False)
    folder = tempfile.mkdtemp(prefix="deepspeed-tier")
    if options.deepspeed:
        steps |= zero.variants(workload, options.steps, Path(folder))
    timings = common.interleave(steps, options.rounds, options.warmup, "cpu")
    del steps
    shutil.rmtree(folder)
    alone = common.interleave(variants(workload, options.steps, is_alone=True), options.rounds, options.warmup, "cpu")
    if dist.get_rank() == 0:
        result = {
            "question": "a training step with offload",
            "command": " ".join(["python", "benchmarks/offload/main.py", *sys.argv[1:]]),
            **common.provenance("cpu"),
            "deepspeed": zero.version() if options.deepspeed else None,
            "workload": {key: getattr(options, key) for key in ("blocks", "dim", "steps")},
            "rounds": options.rounds,
            "warmup": options.warmup,
            "seconds": timings.wall,
            "cpu_seconds": timings.cpu,
            "optimizer_seconds": alone.wall,
        }
        path = options.out or RESULTS / f"cpu_{dist.get_world_size()}ranks_{options.blocks}x{options.dim}.json"
        common.write_json(path, result)
        print(f"Wall time:\n\n{report(timings.wall, options.steps)}\n")
        print(f"Processor time of a rank:\n\n{report(timings.cpu, options.steps)}\n")
        print(f"Clipping and the optimizer alone, wall time:\n\n{report(alone.wall, options.steps)}\n")
        print(f"raw data: {path}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of DeepSpeed and of gloo may still run, and abort when the interpreter ends


if __name__ == "__main__":
    main()
