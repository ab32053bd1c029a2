"""What do clipping and the optimizer step cost on sharded parameters? Results: README.md.

python benchmarks/optimizer_and_clip/main.py                     # the first table in README.md
python benchmarks/optimizer_and_clip/main.py --rows 512 --dim 256
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from fsdp2 import fully_shard, optim
from fsdp2._torch import grad_of
from fsdp2._torch.optim import foreach_multiply, foreach_norm
from fsdp2.optim.flats import joined

RESULTS = Path(__file__).parent / "results"
MAX_NORM = 1.0
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (ignored under torchrun)")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each variant before")
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads")
    parser.add_argument("--params", type=int, default=300, help="half of them matrices, half vectors")
    parser.add_argument("--unit", type=int, default=12, help="parameters of a unit")
    parser.add_argument("--rows", type=int, default=64, help="of a matrix")
    parser.add_argument("--dim", type=int, default=64, help="columns of a matrix; a vector has four times as many")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--reverse", action="store_true", help="make the first calls in the other order")
    parser.add_argument("--assign", action="store_true", help="time the assignment of the gradients, too")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    return parser.parse_args()


class Block(nn.Module):
    """A unit: matrices and vectors in turn, each with a gradient of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        shapes = [(options.rows, options.dim) if index % 2 else (4 * options.dim,) for index in range(options.unit)]
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum((weight * weight).sum() for weight in self.weights)


class Shards:
    """Sharded parameters with gradients, where a backward of `shard`'s `fully_shard` leaves them."""

    def __init__(self, options: argparse.Namespace, shard: Callable[..., Any]) -> None:
        mesh = init_device_mesh(options.device, (dist.get_world_size(),))
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(options) for _ in range(options.params // options.unit)))
        for block in model:
            shard(block.to(options.device), mesh=mesh)
        shard(model, mesh=mesh)
        model(torch.zeros((), device=options.device)).backward()
        self.params = list(model.parameters())
        self.grads: list[torch.Tensor] = [param.grad for param in self.params if param.grad is not None]
        self.model = model

    def locals(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """Plain parameters and gradients on the same memory."""
        params = [nn.Parameter(param.to_local().detach()) for param in self.params if isinstance(param, DTensor)]
        return params, [grad.to_local() for grad in self.grads if isinstance(grad, DTensor)]


class KnownRuns:
    """What is left if a unit's shards and gradients were known to be one tensor each. Asked is only whether each
    parameter still has the gradient that its reduction gave it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.shards = Shards(options, fully_shard)
        stepper = optim.local_optimizer(torch.optim.AdamW, self.shards.params)
        set_grads(self.shards.params, self.shards.grads)
        stepper.step()
        self.runs = [nn.Parameter(flat.local.detach()) for flat in stepper.flats.flats]
        locals_ = [grad.to_local() for grad in self.shards.grads if isinstance(grad, DTensor)]
        self.grads = joined(locals_)[1]
        set_grads(self.shards.params, self.shards.grads)

    def clip(self) -> None:
        """As `fsdp2.clip_grad_norm_` on one mesh."""
        assert all(map(is_, map(grad_of, self.shards.params), self.shards.grads))
        with torch.no_grad():
            square = torch.stack(foreach_norm(self.grads, 2.0, None)).square().sum()
            dist.all_reduce(square)
            foreach_multiply(self.grads, (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0))


def set_grads(params: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def variants(options: argparse.Namespace) -> dict[str, tuple[Callable[[], None], Callable[[], Any]]]:
    """(before, what is timed) by name."""
    result: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {}

    def add(name: str, params: list[nn.Parameter], grads: list[torch.Tensor], *calls: Callable[[], Any]) -> None:
        result[name] = (lambda: set_grads(params, grads), lambda: [call() for call in calls])

    clips = (
        ("torch", torch_fully_shard, nn.utils.clip_grad_norm_),
        ("drop-in", fully_shard, nn.utils.clip_grad_norm_),  # torch's functions on our shards
        ("fsdp2", fully_shard, optim.clip_grad_norm_),
    )
    for name, shard, clip in clips:
        shards = Shards(options, shard)
        add(f"{name} clip", shards.params, shards.grads, lambda s=shards, c=clip: c(s.params, MAX_NORM))
    for kind, settings in IMPLEMENTATIONS.items():
        ours, floor = Shards(options, fully_shard), Shards(options, torch_fully_shard)
        for name, shard in (("torch", torch_fully_shard), ("drop-in", fully_shard)):
            shards = Shards(options, shard)
            stepper = torch.optim.AdamW(shards.params, **settings)
            add(f"{name} AdamW {kind}", shards.params, shards.grads, stepper.step)
        stepper = optim.local_optimizer(torch.optim.AdamW, ours.params, **settings)
        add(f"fsdp2 AdamW {kind}", ours.params, ours.grads, stepper.step)
        params, grads = floor.locals()
        stepper = torch.optim.AdamW(params, **settings)
        add(f"plain AdamW {kind}", params, grads, stepper.step)
    known = KnownRuns(options)
    add("known clip", known.runs, known.grads, known.clip)
    add("known AdamW fused", known.runs, known.grads, torch.optim.AdamW(known.runs, fused=True).step)
    values = [param.detach().flatten() for param in floor.locals()[0]]
    flat = nn.Parameter(torch.cat(values))
    add("flat AdamW fused", [flat], [torch.randn_like(flat)], torch.optim.AdamW([flat], fused=True).step)
    return result


def first_calls(chosen: dict[str, tuple[Callable[[], None], Callable[[], Any]]], is_reversed: bool) -> dict[str, float]:
    """Seconds of the first call of each: DTensor works out how each operation is sharded, once. Whoever makes the
    first call is faster later, too, presumably because a cache keeps its specs: so the order matters."""
    seconds = dict.fromkeys(chosen, 0.0)
    for name, (before, timed) in reversed(chosen.items()) if is_reversed else chosen.items():
        before()
        dist.barrier()
        start = time.process_time()
        timed()
        seconds[name] = time.process_time() - start
    return seconds


def both(before: Callable[[], None], timed: Callable[[], Any]) -> None:
    before()
    timed()


def baseline_of(name: str) -> str:
    """What a variant is compared with: torch, through DTensors, in the same implementation."""
    kind = name.split()[2:] or ["fused"]
    return "torch clip" if name.endswith("clip") else f"torch AdamW {kind[0]}"


def report(seconds: dict[str, list[float]], first: dict[str, float]) -> str:
    """The table of README.md."""
    rows = [
        [
            name,
            common.Spread.of(seconds[name]).format(2, 1000),
            common.ratios(seconds, name, baseline_of(name)).format(),
            f"{first[name] * 1000:.0f}",
        ]
        for name in seconds
    ]
    return common.table(["variant", "CPU, ms", "/ torch's", "first call, ms"], rows)


def together(seconds: dict[str, list[float]], kind: str, ours: str) -> common.Spread:
    """Clipping and the step, ours over torch's, within each round."""
    sums = {
        who: [clip + step for clip, step in zip(seconds[f"{who} clip"], seconds[f"{who} AdamW {kind}"], strict=True)]
        for who in ("torch", ours)
    }
    return common.ratios(sums, ours, "torch")


def main() -> None:
    options = parse()
    common.launch(__file__, options.ranks)
    common.join(options.device, options.threads)
    chosen = variants(options)
    first = first_calls(chosen, options.reverse)
    # The gradients stay from round to round: to assign them takes as long as a third of a clip.
    steps = {name: partial(both, *pair) if options.assign else pair[1] for name, pair in chosen.items()}
    timings = common.interleave(steps, options.rounds, options.warmup, options.device)
    if dist.get_rank() == 0:
        size = f"{options.params}x{options.rows}x{options.dim}"
        path = options.out or RESULTS / f"{options.device}_{dist.get_world_size()}ranks_{size}.json"
        whose = [(who, kind) for kind in IMPLEMENTATIONS for who in ("fsdp2", "drop-in")]
        sums = {f"{who} {kind}": together(timings.cpu, kind, who) for who, kind in [*whose, ("known", "fused")]}
        result = {
            "question": "clipping and optimizer step",
            "command": " ".join(["python", "benchmarks/optimizer_and_clip/main.py", *sys.argv[1:]]),
            **common.provenance(options.device),
            "workload": {key: getattr(options, key) for key in ("params", "rows", "dim")},
            "rounds": options.rounds,
            "warmup": options.warmup,
            "together": {kind: asdict(spread) for kind, spread in sums.items()},
            "first_call_seconds": first,
            "seconds": timings.wall,
            "cpu_seconds": timings.cpu,
        }
        common.write_json(path, result)
        print(f"Processor time of a rank:\n\n{report(timings.cpu, first)}\n")
        for name, spread in sums.items():
            print(f"clip and AdamW together, {name} / torch: {spread.format()}")
        print(f"\nraw data: {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
