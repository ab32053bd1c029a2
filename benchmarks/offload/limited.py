"""Does a model train whose optimizer state is several times the memory that its process may have? See README.md.

python benchmarks/offload/limited.py --tier /a/fast/disk      # prints a table, writes results/ and a picture
python benchmarks/offload/limited.py --dry-run

The model has bfloat16 weights; their float32 copies and the moments of AdamW, 12 bytes an element, are the state. It is
trained four times, each in a process of its own, forked from one that has imported torch: with all memory; with
`RLIMIT_DATA` at a third of the state's bytes and the state in memory, which must fail; with the same limit and the
state on disk; and with weights on disk too. `RLIMIT_DATA` does not count memory that is a file's, as the weights are
then, and resident memory does.

A control group counts everything, pages that the system keeps of files too. To train in one (as root; version 1)::

    mkdir /sys/fs/cgroup/memory/small && echo 600M > /sys/fs/cgroup/memory/small/memory.limit_in_bytes
    echo $$ > /sys/fs/cgroup/memory/small/cgroup.procs
    python benchmarks/offload/limited.py --tier /a/fast/disk --runs "limited, all on disk" --out build/limited.json
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
from benchmarks import common
from fsdp2 import Offload, fully_shard, local_optimizer, offload_optimizer, step_in_backward
from fsdp2.init import materialize

RESULTS = Path(__file__).parent / "results"
RUNS = ("all memory", "limited", "limited, states on disk", "limited, all on disk")
SAMPLE_S = 0.05
FORK = multiprocessing.get_context("fork")
MIB = 2**20
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", type=Path, help="folder on a fast disk (default: a temporary one)")
    parser.add_argument("--dim", type=int, default=768, help="width of the model; a block has 4 dim^2 elements")
    parser.add_argument("--blocks", type=int, default=112)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of a batch")
    parser.add_argument(
        "--times", type=float, default=3.0, help="the state's bytes over those that the process may have"
    )
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=RUNS, help="which to do (default: all)")
    parser.add_argument("--out", type=Path, help="where to write (default: below results/)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, and no limit")
    options = parser.parse_args()
    if options.dry_run:
        options.dim, options.blocks, options.steps, options.tokens = 64, 3, 3, 16
    return options


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for parameters of 16 bits: float32 weights in its state are stepped, and copied to the parameters."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    weight = param.float()
                    moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                    state.update(weight=weight, step=torch.zeros(()), **moments)
                lists = [[state[key]] for key in ("exp_avg", "exp_avg_sq")]
                options = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "lr": group["lr"]}
                more = {"amsgrad": False, "maximize": False, "fused": True}
                adamw([state["weight"]], [param.grad.float()], *lists, [], [state["step"]], **options, **more)
                param.copy_(state["weight"])


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:]))))
        return out


def build(options: argparse.Namespace, policy: Offload | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that predicts the next byte from the last, and its optimizer."""
    torch.manual_seed(0)
    with torch.device("meta"):
        blocks = [Block(options.dim) for _ in range(options.blocks)]
        model = nn.Sequential(nn.Embedding(256, options.dim), *blocks, nn.Linear(options.dim, 256)).bfloat16()
    for layer in model:
        fully_shard(layer, **({} if policy is None else {"offload_policy": policy}))
    materialize(fully_shard(model))
    make = local_optimizer if policy is None else offload_optimizer
    optimizer = make(MasterAdamW, model.parameters(), elementwise=True, lr=1e-4)
    step_in_backward(optimizer)  # the gradients of two units exist, not those of the model
    return model, optimizer


def train(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One of the runs, in this process."""
    # Freed blocks from 1 MiB on go back to the system at once; glibc would keep those of up to 32 MiB.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    limit = None
    if name != RUNS[0] and not options.dry_run:
        limit = int(state_bytes(options) / options.times)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    losses, samples, ends = [], [], threading.Event()
    begin = time.perf_counter()

    def sample() -> None:
        while not ends.wait(SAMPLE_S):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            samples.append((round(time.perf_counter() - begin, 2), resident))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        all_on_disk = Offload(grads=True, params="files", tier=options.tier)
        policies = {RUNS[2]: Offload(tier=options.tier), RUNS[3]: all_on_disk}
        model, optimizer = build(options, policies.get(name))
        for step in range(options.steps):
            first = torch.randint(len(text) - 1, (options.tokens,), generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(model(text[first]).float(), text[first + 1])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if isinstance(optimizer, fsdp2.OffloadedOptimizer):
            optimizer.wait()
    finally:
        ends.set()
        sampler.join()
    seconds = time.perf_counter() - begin
    return {"losses": losses, "limit": limit, "resident": samples, "seconds": seconds}


def state_bytes(options: argparse.Namespace) -> int:
    """12 for each element of the model."""
    return 12 * (options.blocks * 4 * options.dim**2 + 2 * 256 * options.dim + 256)


def run(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train in another process. `losses` is missing if that failed; `error` says how then."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_train_and_send, args=(options, name, sender))
    process.start()
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        return {"error": f"status {process.exitcode}"}
    process.join()
    return result


def _train_and_send(options: argparse.Namespace, name: str, sender: Any) -> None:
    try:
        result = train(options, name)
    except (MemoryError, RuntimeError) as error:
        result = {"error": str(error).strip().splitlines()[0]}
    sender.send(result)


def report(runs: dict[str, dict[str, Any]]) -> str:
    """The table of README.md."""
    rows = []
    for name, each in runs.items():
        if "losses" not in each:
            rows.append([name, "", "", "", f"fails: {each['error'][:90]}"])
            continue
        peak = max((resident for _, resident in each["resident"]), default=0)
        limit = "none" if each["limit"] is None else f"{each['limit'] / MIB:.0f}"
        losses = ", ".join(f"{loss:.6f}" for loss in each["losses"])
        rows.append([name, limit, f"{peak / MIB:.0f}", f"{each['seconds']:.1f}", losses])
    return common.table(["run", "limit, MiB", "peak resident, MiB", "seconds", "losses"], rows)


def draw(runs: dict[str, dict[str, Any]], state: int, path: Path) -> None:
    """The picture of memory over time; left out without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for name, each in runs.items():
        if "losses" in each:
            axes.plot(*zip(*((at, size / MIB) for at, size in each["resident"]), strict=True), label=name)
            if name == RUNS[2] and each["limit"] is not None:
                axes.axhline(each["limit"] / MIB, color="grey", linestyle="--", label="limit")
    axes.axhline(state / MIB, color="black", linestyle=":", label="the optimizer's state")
    axes.set(xlabel="seconds", ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        options.tier = options.tier or Path(folder)
        runs = {name: run(options, name) for name in options.runs}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # what `provenance` asks
    path = options.out or RESULTS / "limited.json"
    common.write_json(
        path,
        {
            "question": "training with less memory than the optimizer's state",
            "command": " ".join(["python", "benchmarks/offload/limited.py", *sys.argv[1:]]),
            **common.provenance("cpu"),
            "workload": {key: getattr(options, key) for key in ("dim", "blocks", "steps", "tokens", "times")},
            "state_bytes": state_bytes(options),
            "runs": runs,
        },
    )
    draw(runs, state_bytes(options), path.with_suffix(".png"))
    print(f"The state has {state_bytes(options) / MIB:.0f} MiB.\n\n{report(runs)}\n\nraw data: {path}")
    results = [each.get("losses", each) for name, each in runs.items() if name != RUNS[1]]
    if isinstance(results[0], dict) or any(each != results[0] for each in results):
        raise SystemExit(f"the losses differ: {results}")


if __name__ == "__main__":
    main()
