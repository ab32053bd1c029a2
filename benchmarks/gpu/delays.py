"""Does the result depend on which stream is late? It must not, bit for bit. See README.md.

python benchmarks/gpu/delays.py                      # one process, a simulated group of 8: the host runs far ahead
python benchmarks/gpu/delays.py --ranks-on-gpu 2     # two processes on one GPU, over NCCL

A kernel that only waits is put on each stream in turn, at every use of it: compute, all-gather, reduce-scatter,
all-reduce, and the process group's own. If somebody reads too early, or memory is given away too early, losses or
parameters change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsdp2
import fsdp2.comm
from benchmarks import common
from benchmarks.gpu import groups
from benchmarks.gpu.model import SHAPES, Llama, Shape, loss_of
from benchmarks.gpu.variants import Flat, direct
from fsdp2.runtime.streams import Streams, streams_for

RESULTS = Path(__file__).parent / "results"
STREAMS = ("compute", "gather", "reduce", "all_reduce", "wire")


@dataclass(frozen=True)
class Setting:
    """How the model is sharded.

    Attributes:
        direct: large parameters are operands themselves; otherwise all are packed.
        replicas: of the sharded model (HSDP).
        microbatches: in each step; with replicas, all but the last leave out the all-reduce.
        lists: explicit prefetch, and two reductions in flight.
    """

    direct: bool = True
    reshard: bool = True
    replicas: int = 1
    microbatches: int = 1
    offload: bool = False
    keeps_storage: bool = False
    lists: bool = False


SETTINGS = {
    "direct": Setting(),
    "packed": Setting(direct=False),
    "no reshard": Setting(reshard=False),
    "replicas": Setting(replicas=2),
    "microbatches": Setting(replicas=2, microbatches=3),
    "offload": Setting(offload=True),
    "kept storage": Setting(keeps_storage=True),
    "lists": Setting(lists=True),
}


@contextmanager
def late(where: str | None, seconds: float, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, the stream of that name is late by `seconds` each time that something is given to it."""
    streams = streams_for(device)
    with ExitStack() as stack:
        if where == "compute":
            for block in model.blocks:
                handle = block.mlp_norm.register_forward_pre_hook(lambda *_: groups.occupy(seconds))
                stack.callback(handle.remove)
        elif where == "wire":
            before = groups._wire
            groups.use_wire(replace(before, delay_s=seconds))
            stack.callback(groups.use_wire, before)
        elif where is not None:
            name = {"gather": "gathering", "reduce": "reducing", "all_reduce": "all_reducing"}[where]
            setattr(streams, name, _delayed(streams, name, seconds))
            stack.callback(delattr, streams, name)
        yield


def _delayed(streams: Streams, name: str, seconds: float) -> Any:
    enter = getattr(streams, name)

    @contextmanager
    def entered() -> Iterator[None]:
        with enter():
            groups.occupy(seconds)
            yield

    return entered


def sharded(setting: Setting, shape: Shape, device: torch.device) -> Llama:
    """A new model, the same each time."""
    lanes = direct(0) if setting.direct else Flat()
    fsdp2.comm.COMMS[groups.BACKEND] = fsdp2.comm.COMMS["nccl"] = lanes
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    size = dist.get_world_size()
    replicas = setting.replicas if size % setting.replicas == 0 else 1
    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (size,))
    if replicas > 1:
        mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=names)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if setting.offload:
        options["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in model.blocks:
        fsdp2.fully_shard(block, reshard_after_forward=setting.reshard, **options)
    fsdp2.fully_shard(model, **options)
    if setting.keeps_storage:
        model.set_keep_unsharded_storage(True)
    if setting.lists:
        blocks = list(model.blocks)
        for block, after in pairwise(blocks):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
        model.set_reduce_scatter_max_input_buffers(2)
    return model


def train(setting: Setting, where: str | None, options: argparse.Namespace, device: torch.device) -> list[str]:
    """The bits of each loss, and a digest of the parameters at the end."""
    shape = SHAPES[options.size]
    model = sharded(setting, shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    with late(where, options.delay_ms / 1e3, model, device), deterministic():
        for _ in range(options.steps):
            for microbatch in range(setting.microbatches):
                is_last = microbatch == setting.microbatches - 1
                model.set_is_last_backward(is_last)
                if setting.replicas > 1:
                    model.set_requires_all_reduce(is_last)
                tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), generator=generator)
                tokens = tokens.to(device, non_blocking=True)
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256()
    for param in model.parameters():
        assert isinstance(param, DTensor)
        digest.update(param.detach().to_local().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return [*(loss.item().hex() for loss in losses), digest.hexdigest()]


@contextmanager
def deterministic() -> Iterator[None]:
    """Within, the same operations give the same bits (and memory that nobody has written holds NaN)."""
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_all(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every setting, with every stream late in turn; which of them changed something."""
    report: dict[str, Any] = {}
    for name in options.settings.split(","):
        expected = train(SETTINGS[name], None, options, device)
        found = {where: train(SETTINGS[name], where, options, device) for where in STREAMS}
        report[name] = {
            "expected": expected,
            "changed_by": [where for where, got in found.items() if got != expected],
            "repeats": train(SETTINGS[name], None, options, device) == expected,
        }
        if dist.get_rank() == 0:
            print(f"{name}: changed by {report[name]['changed_by'] or 'nothing'}", flush=True)
    return report


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=3.0)
    parser.add_argument("--ranks-on-gpu", type=int, default=1, help="processes on one GPU, over NCCL")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the script")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def run_simulated(options: argparse.Namespace) -> dict[str, Any]:
    """This process alone."""
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    groups.init_simulated(8, groups.Wire())
    try:
        return {"about": common.provenance(device.type), "settings": check_all(options, device)}
    finally:
        dist.destroy_process_group()


def _rank(rank: int, options: argparse.Namespace, out: Path, meeting: str) -> None:
    """One of several processes on one GPU, which meet at a file."""
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    groups.take_gpu()
    groups.share_gpu()
    torch.set_num_threads(1)
    world = options.ranks_on_gpu
    backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backends, init_method=f"file://{meeting}", rank=rank, world_size=world)
    report = check_all(options, device)
    if rank == 0:
        common.write_json(out, {"about": common.provenance(device.type), "settings": report})
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, write, and fail if anything changed."""
    options = parse(arguments)
    name = "delays.json" if options.ranks_on_gpu == 1 else f"delays-{options.ranks_on_gpu}-ranks.json"
    out = options.out or RESULTS / name
    if options.ranks_on_gpu > 1:
        with tempfile.TemporaryDirectory() as folder:
            arguments_of_rank = (options, out, f"{folder}/meeting")
            torch.multiprocessing.start_processes(
                _rank, arguments_of_rank, nprocs=options.ranks_on_gpu, start_method="forkserver"
            )
    else:
        common.write_json(out, run_simulated(options))
    report = json.loads(out.read_text())
    bad = [each for each, of in report["settings"].items() if of["changed_by"] or not of["repeats"]]
    if bad:
        raise SystemExit(f"results depend on which stream is late, or do not repeat: {bad}")


if __name__ == "__main__":
    main()
