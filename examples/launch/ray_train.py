"""Train the example model on a Ray cluster: Ray places the ranks on the machines and starts them again after a failure.

    pip install 'ray[train]'
    python examples/launch/ray_train.py --workers 16 -- --out /shared/runs/lm --bf16 --global-batch-size 512

What comes after `--` are options of train_lm.py. The folder `--out` must be one that all machines see: when a worker
or a machine is lost, Ray starts all ranks anew, and they go on from the newest checkpoint in it (`--auto-resume`).
Ray's own checkpoints are not used: `ray.train.report` copies folders, where these ranks write their shards in place.

What the parts are for is in train_lm.py. Two things differ from a torchrun job: Ray has made the process group before
`train` is called, and it runs `train` in a thread, where a program cannot receive signals.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

PROGRAM = Path(__file__).resolve().parents[1] / "train_lm"


class NeverStop:
    """In the place of `runtime.StopRequest`: a Ray job is stopped by `ray job stop`, which signals no worker."""

    def agreed(self) -> bool:
        return False


def train(config: dict[str, list[str]]) -> None:
    """One rank, in a process of Ray's. Collective."""
    sys.path.insert(0, str(PROGRAM))
    from dataclasses import asdict

    import torch
    from data import load_corpus
    from options import parse_options
    from run_folder import find_checkpoint, prepare_folder
    from runtime import World, on_every_rank, on_rank_zero
    from train_lm import Job

    context = ray.train.get_context()
    world = World(context.get_world_rank(), context.get_local_rank(), context.get_world_size())
    options = on_every_rank(lambda: parse_options(config["arguments"], world.size))
    corpus = on_every_rank(lambda: load_corpus(options.data, options.seq_len))
    saved = on_every_rank(lambda: find_checkpoint(options, asdict(options.model())))
    on_rank_zero(lambda: prepare_folder(options.out, saved))
    device = ray.train.torch.get_device()
    if device.type == "cpu" and world.size > 1:
        torch.set_num_threads(1)
    Job(options, world, device, corpus, saved).run(NeverStop())
    ray.train.report({"steps": options.steps})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2, help="ranks, over all machines")
    parser.add_argument("--cpu", action="store_true", help="ranks without a GPU")
    parser.add_argument("--max-failures", type=int, default=3, help="how often to start again; -1: always")
    parser.add_argument("arguments", nargs="*", metavar="-- OPTIONS", help="options of train_lm.py")
    options = parser.parse_args()
    sys.path.insert(0, str(PROGRAM))
    from options import parse_options
    from runtime import UsageError

    arguments = ["--auto-resume", *options.arguments]
    try:
        parse_options(arguments, options.workers)  # before Ray starts anything
    except UsageError as error:
        sys.exit(f"error: {error}")
    trainer = TorchTrainer(
        train,
        train_loop_config={"arguments": arguments},
        torch_config=TorchConfig(backend="gloo" if options.cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=options.max_failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    main()
