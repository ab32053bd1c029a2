"""What the benchmarks share: the model, the peers, interleaved timing, statistics and what a result must state.

A *peer* turns a plain model into one that trains its own way (`Peer.wrap`); everything else is the same for all. Peers
are timed round-robin in one process group, one step of each a round, so that whatever else the machine does hits all of
them alike, and compared by their ratio within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parent.parent

# --- workload ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block with twelve parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only language model with learned positions."""

    def __init__(self, vocab: int, length: int, dim: int, heads: int, num_blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Workload:
    """The model, its data and its dtypes: the same for every peer of a run.

    `dtype` is ``float32``, ``bfloat16`` (everything) or ``mixed`` (fp32 parameters and reductions, bf16 compute).
    """

    blocks: int = 8
    dim: int = 512
    heads: int = 8
    vocab: int = 256
    batch: int = 2
    length: int = 128
    dtype: str = "float32"
    device: str = "cpu"

    def model(self) -> GPT:
        """The same values on every rank and for every peer."""
        torch.manual_seed(0)
        model = GPT(self.vocab, self.length, self.dim, self.heads, self.blocks).to(self.device)
        return model.to(torch.bfloat16) if self.dtype == "bfloat16" else model

    def data(self, num_batches: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, targets), different on each rank."""
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (num_batches, self.batch, self.length + 1)
        tokens = torch.randint(self.vocab, shape, generator=generator).to(self.device)
        return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


# --- peers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """One way to train.

    Attributes:
        name: as on the command line and in results.
        wrap: makes a plain model train this way.
        autocasts: computes in bf16 by autocast under ``mixed``, having no mixed precision of its own.
        averages: gradients are averaged over ranks, so that all such peers must agree on losses.
    """

    name: str
    wrap: Callable[[GPT, Workload], nn.Module]
    autocasts: bool = False
    averages: bool = True


def _ddp(model: GPT, workload: Workload) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def _fsdp1(model: GPT, workload: Workload) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(workload.device),
        mixed_precision=mixed if workload.dtype == "mixed" else None,
        use_orig_params=True,
    )


def _fully_sharded(library: Any, model: GPT, workload: Workload, reshard_after_forward: bool) -> nn.Module:
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if workload.dtype == "mixed":
        options["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        library.fully_shard(block, **options)
    library.fully_shard(model, **options)
    return model


def _torch_fsdp2(reshard_after_forward: bool) -> Callable[[GPT, Workload], nn.Module]:
    def wrap(model: GPT, workload: Workload) -> nn.Module:
        import torch.distributed.fsdp as library

        return _fully_sharded(library, model, workload, reshard_after_forward)

    return wrap


def _ours(reshard_after_forward: bool) -> Callable[[GPT, Workload], nn.Module]:
    def wrap(model: GPT, workload: Workload) -> nn.Module:
        import fsdp2 as library

        return _fully_sharded(library, model, workload, reshard_after_forward)

    return wrap


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("none", lambda model, workload: model, autocasts=True, averages=False),
        Peer("ddp", _ddp, autocasts=True),
        Peer("fsdp1", _fsdp1),
        Peer("torch-fsdp2-true", _torch_fsdp2(True)),
        Peer("torch-fsdp2-false", _torch_fsdp2(False)),
        Peer("fsdp2-true", _ours(True)),
        Peer("fsdp2-false", _ours(False)),
    )
}


class Trainer:
    """A peer with its model and optimizer; `step` is one training step, `losses` what each step gave on this rank."""

    def __init__(self, peer: Peer, workload: Workload) -> None:
        self.peer = peer
        self.model = peer.wrap(workload.model(), workload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.losses: list[torch.Tensor] = []
        self._data = workload.data()
        self._autocast = workload.dtype == "mixed" and peer.autocasts
        self._device = workload.device

    def step(self) -> None:
        """Forward, backward, optimizer, gradients dropped; on the next batch."""
        tokens, targets = self._data[len(self.losses) % len(self._data)]
        with self._precision():
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, torch.bfloat16) if self._autocast else nullcontext()


# --- timing -----------------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    """Wait for the device's work, so that a host clock measures it."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


@dataclass(frozen=True)
class Timings:
    """What each step took in each round, in seconds.

    Attributes:
        wall: of the slowest rank, by the clock on the wall: what a user waits for.
        cpu: processor time of all threads of a rank, mean over ranks. Waiting costs none, so that it says little about
            overlap, but it hardly changes when others use the machine.
    """

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def interleave(steps: dict[str, Callable[[], None]], rounds: int, warmup: int, device: str) -> Timings:
    """Time every step once a round, in an order that changes from round to round.

    All ranks start a step together, behind a barrier. The order is drawn anew each round, the same on all ranks, so
    that no step always inherits the caches of the same predecessor.
    """
    timings = Timings({name: [] for name in steps}, {name: [] for name in steps})
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for round_ in range(warmup + rounds):
        shuffle(order)
        for name in order:
            synchronize(device)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            synchronize(device)
            passed = [time.perf_counter() - wall, time.process_time() - cpu]
            slowest = torch.tensor(passed, dtype=torch.float64, device=device)
            total = slowest.clone()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if round_ >= warmup:
                timings.wall[name].append(slowest[0].item())
                timings.cpu[name].append(total[1].item() / dist.get_world_size())
    return timings


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def format(self, digits: int = 2, scale: float = 1.0) -> str:
        """``median (low-high)``."""
        return f"{self.median * scale:.{digits}f} ({self.low * scale:.{digits}f}-{self.high * scale:.{digits}f})"


def ratios(seconds: Mapping[str, Sequence[float]], name: str, baseline: str) -> Spread:
    """Of `name` to `baseline`, within each round."""
    return Spread.of([own / other for own, other in zip(seconds[name], seconds[baseline], strict=True)])


def overheads(seconds: Mapping[str, Sequence[float]], name: str, baseline: str, floor: str) -> Spread:
    """What `name` costs over `floor`, as a part of what `baseline` costs over it, within each round."""
    rounds = zip(seconds[name], seconds[baseline], seconds[floor], strict=True)
    return Spread.of([(own - least) / (other - least) for own, other, least in rounds])


# --- processes and results --------------------------------------------------------------------------------------------


def launch(script: str, ranks: int) -> None:
    """Unless this process is a rank already, become the launcher of `ranks` processes that run `script`."""
    if "RANK" in os.environ:
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    os.execve(sys.executable, [*launcher, script, *sys.argv[1:]], environment)


def join(device: str, threads: int = 1) -> None:
    """Make this process a rank: threads, device, process group."""
    torch.set_num_threads(threads)
    if device != "cpu":
        torch.get_device_module(device).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()


def provenance(device: str) -> dict[str, Any]:
    """Hardware and versions: without them a figure means nothing."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory_bytes / 2**30),
            "device": torch.get_device_module(device).get_device_name() if device != "cpu" else "cpu",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": _commit(),
        },
        "backend": dict(part.split(":") for part in dist.get_backend_config().split(","))[device],
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# What runs write themselves: the second program of a series does not run on a changed tree because of the first one.
WRITTEN = (":(exclude)benchmarks/*/results/*", ":(exclude)docs/figures/*")


def _commit(root: Path = ROOT) -> str | None:
    """The checked-out commit, with a plus when tracked files differ from it, apart from results."""
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return None
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *WRITTEN]).returncode != 0
    return f"{head.stdout.strip()}{'+' * changed}"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """The raw data of a run: five digits of each number, a list of numbers on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(
        r"\[[^][{}]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), json.dumps(five_digits(result), indent=1)
    )
    path.write_text(text + "\n", encoding="utf-8")


def five_digits(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: five_digits(each) for key, each in value.items()}
    return [five_digits(each) for each in value] if isinstance(value, list | tuple) else value


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """`--out`, and how much is run: `--short` for a first look within a minute, `--dry-run` to see that it runs."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="fewer sizes and rounds: about a minute")
    size.add_argument("--dry-run", action="store_true", help="as little as possible, for tests; figures mean nothing")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/; --short: below runs/)")


def apply_size_options(
    parser: argparse.ArgumentParser, short: Mapping[str, Any], dry_run: Mapping[str, Any]
) -> argparse.Namespace:
    """The command line, where `--short` and `--dry-run` stand for other defaults; what is given besides still holds."""
    options = parser.parse_args()
    parser.set_defaults(**(dry_run if options.dry_run else short if options.short else {}))
    return parser.parse_args()


def out_path(options: argparse.Namespace, results: Path, name: str) -> Path:
    """Where to write: `--out`, or `name` below `results`, which only a full run may overwrite."""
    if options.short or options.dry_run:
        results = ROOT / "runs" / "benchmarks" / results.parent.name
    return options.out or results / name


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column to the left, the others to the right."""
    lines = [header, ["--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
