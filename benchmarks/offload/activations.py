"""What does `offload_activations` cost if nothing exceeds the budget? Results: README.md.

python benchmarks/offload/activations.py              # the table in README.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
from benchmarks import common
from fsdp2.extras.host_memory import standing_for_host

RESULTS = Path(__file__).parent / "results"
NONE, HOOKS, OURS = "none", "hooks that do nothing", "a budget that suffices"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant before")
    parser.add_argument("--blocks", type=int, default=26)
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 512], help="widths of the model")
    parser.add_argument("--dry-run", action="store_true", help="smallest size, to see that it runs")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    options = parser.parse_args()
    if options.dry_run:
        options.rounds, options.warmup, options.blocks, options.dim = 1, 1, 2, [16]
    return options


def variants(workload: common.Workload) -> dict[str, Callable[[], None]]:
    """Forward and backward of each."""
    tokens, targets = workload.data(1)[0]

    def variant(name: str) -> Callable[[], None]:
        model = workload.model()
        offload = fsdp2.offload_activations(model.blocks, budget=1 << 40, min_bytes=0) if name == OURS else None

        def run() -> None:
            # Host memory is elsewhere, so that the tensors of the CPU count as those of a device.
            with standing_for_host(torch.device("meta")):
                with saved_tensors_hooks(same, same) if name == HOOKS else nullcontext():
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
            assert offload is None or offload.moved_bytes == 0 < offload.saved_bytes

        return run

    return {name: variant(name) for name in (NONE, HOOKS, OURS)}


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def num_saved_by(workload: common.Workload) -> int:
    """Tensors that autograd saves in a forward of the blocks."""
    model, number = workload.model(), 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return tensor

    x = torch.randn(workload.batch, workload.length, workload.dim)
    with saved_tensors_hooks(count, same):
        for block in model.blocks:
            x = block(x)
    return number


def main() -> None:
    options = parse()
    common.launch(__file__, 1)
    common.join("cpu")
    results, rows = {}, []
    for dim in options.dim:
        workload = common.Workload(blocks=options.blocks, dim=dim, heads=4, batch=1, length=32)
        steps, number = variants(workload), num_saved_by(workload)
        timings = common.interleave(steps, options.rounds, options.warmup, "cpu")
        results[str(dim)] = {"saved_tensors": number, "seconds": timings.wall, "cpu_seconds": timings.cpu}
        for name in steps:
            extra = [ours - none for ours, none in zip(timings.cpu[name], timings.cpu[NONE], strict=True)]
            rows.append(
                [
                    f"width {dim}, {name}",
                    common.Spread.of(timings.cpu[name]).format(2, 1000),
                    common.ratios(timings.cpu, name, NONE).format(),
                    common.Spread.of([each / number for each in extra]).format(1, 1e6),
                ]
            )
    result = {
        "question": "activations within the budget",
        "command": " ".join(["python", "benchmarks/offload/activations.py", *sys.argv[1:]]),
        **common.provenance("cpu"),
        "workload": {key: getattr(options, key) for key in ("blocks", "dim")},
        "rounds": options.rounds,
        "warmup": options.warmup,
        "results": results,
    }
    path = options.out or RESULTS / "activations.json"
    common.write_json(path, result)
    print(common.table(["variant", "forward and backward, ms", "/ none", "more for a saved tensor, µs"], rows))
    print(f"\nraw data: {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
