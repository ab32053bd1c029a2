"""The command line of `train_lm.py`: every option, its default, and the checks that need nothing but the numbers.

Imported by `train_lm.py`; `python examples/train_lm/train_lm.py --help` prints what is defined here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from config_file import as_arguments, parallel_config, read_tables
from model import LMConfig
from runtime import UsageError

from fsdp2.parallel import ParallelConfig

Reshard = bool | int | str


@dataclass(frozen=True)
class Options:
    """The parsed command line; the fields are named as the options are."""

    data: list[Path]
    out: Path
    resume: Path | None
    auto_resume: bool
    steps: int
    batch_size: int
    global_batch_size: int | None
    seq_len: int
    grad_accum: int
    optimizer: str
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool
    parallel: ParallelConfig
    device: str
    log_every: int
    eval_every: int
    eval_batches: int
    save_every: int
    keep: int
    sample_bytes: int
    plan: bool

    def model(self) -> LMConfig:
        return LMConfig(
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            tied=self.tied,
        )


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake becomes a UsageError: one message for the job instead of one per rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def parse_options(arguments: Sequence[str], world_size: int) -> Options:
    """Parse and check; raises UsageError."""
    parser = _build_parser()
    path = parser.parse_args(arguments).config
    of_parallel, of_train = read_tables(path) if path is not None else ({}, {})
    flags = {field.name: field.type == "bool" for field in fields(Options) if field.name != "parallel"}
    values = parser.parse_args([*as_arguments(of_train, flags, arguments, path), *arguments])
    if values.hsdp is not None and world_size % values.hsdp:
        raise UsageError(f"--hsdp {values.hsdp} replicas do not divide the {world_size} rank(s) of this job")
    if values.resume is True:
        values.resume = values.out
    parallel = parallel_config(values, of_parallel, world_size)
    options = Options(**{**{name: getattr(values, name) for name in flags}, "parallel": parallel})
    try:
        options.model()
    except ValueError as error:
        raise UsageError(str(error)) from error
    _check_reshard(parallel)
    if parallel.offload != "none" and options.optimizer != "adamw":
        raise UsageError(f"--offload {parallel.offload} is for --optimizer adamw, not {options.optimizer}")
    return _with_batch_size(options)


def _check_reshard(parallel: ParallelConfig) -> None:
    shards, reshard = int(parallel.shard) * parallel.context, parallel.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool) and shards % reshard:
        raise UsageError(f"--reshard-after-forward {reshard} does not divide the {shards} rank(s) of a shard group")


def _with_batch_size(options: Options) -> Options:
    """`--global-batch-size` says what a step is whatever the number of ranks; `batch_size` follows from it."""
    if options.global_batch_size is None:
        return options
    parts = options.parallel.data_ranks * options.grad_accum
    if options.global_batch_size % parts:
        raise UsageError(
            f"--global-batch-size {options.global_batch_size} does not divide into {options.parallel.data_ranks} "
            f"rank(s) with data of their own x {options.grad_accum} microbatch(es): it must be a multiple of {parts}"
        )
    return replace(options, batch_size=options.global_batch_size // parts)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def _reshard(text: str) -> Reshard:
    named: dict[str, Reshard] = {"true": True, "false": False, "auto": "auto"}
    return named[text] if text in named else _count(text)


# argparse names the type in its message for text that is no number.
_count.__name__ = _count_or_zero.__name__ = "whole number"
_positive.__name__ = "number"
_reshard.__name__ = "choice: true, false, auto or a whole number"


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm.py",
        description="Train a byte-level language model, sharded over the ranks of a torchrun job.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("run")
    add = group.add_argument
    add(
        "--config", type=Path, metavar="FILE", help="TOML with tables [parallel] and [train]: examples/train_lm/configs"
    )
    add("--data", type=Path, nargs="+", default=[], help="files or folders of text; none: Python's standard library")
    add("--out", type=Path, default=Path("runs/train_lm"), help="folder for metrics, plot and checkpoints")
    again = group.add_mutually_exclusive_group().add_argument
    again("--resume", type=Path, nargs="?", const=True, help="go on from PATH's newest checkpoint; no PATH: from --out")
    again("--auto-resume", action="store_true", help="go on from --out's newest checkpoint if it has one, else start")
    add("--seed", type=int, default=0, help="decides the first weights and the batches")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one")

    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--steps", type=_count, default=400, help="optimizer steps in all, those before a resume included")
    batch = group.add_mutually_exclusive_group().add_argument
    batch("--batch-size", type=_count, default=16, help="sequences per rank and microbatch")
    batch("--global-batch-size", type=_count, help="sequences per step over all ranks, however many there are")
    add("--seq-len", type=_count, default=128, help="bytes per sequence")
    add("--grad-accum", type=_count, default=1, help="microbatches per step")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: for the matrices of the blocks")
    add("--lr", type=_positive, default=3e-3, help="peak learning rate; cosine decay to a tenth of it")
    add("--warmup", type=_count_or_zero, default=30, help="steps of linear warm-up")
    add("--weight-decay", type=float, default=0.1, help="on matrices; gains have none")
    add("--clip", type=_positive, default=1.0, help="largest norm of the gradient")

    add = parser.add_argument_group("model").add_argument
    add("--dim", type=_count, default=LMConfig.dim, help="width")
    add("--layers", type=_count, default=LMConfig.layers, help="transformer blocks")
    add("--heads", type=_count, default=LMConfig.heads, help="query heads")
    add("--kv-heads", type=_count, default=LMConfig.kv_heads, help="key/value heads; must divide --heads")
    add("--hidden", type=_count, default=LMConfig.hidden, help="width inside the feed-forward layers")
    add("--tied", action="store_true", help="use the embedding as the output head too")

    add = parser.add_argument_group("sharding").add_argument
    add("--parallel", nargs="+", default=[], metavar="KEY=VALUE", help="keys of fsdp2.parallel.ParallelConfig")
    add("--hsdp", type=_count, metavar="R", help="R replicas, each sharded over the other ranks: replicate=R")
    add(
        "--reshard-after-forward",
        type=_reshard,
        default="auto",
        metavar="{true,false,auto,INT}",
        help="free the gathered weights after forward; auto: all but the root's; INT: keep them sharded over INT ranks",
    )
    add("--bf16", action="store_true", help="compute in bfloat16: mixed_precision=bf16")
    choices = ("none", "states", "gradients", "all", "files")
    add("--offload", choices=choices, help="what rests in host memory, with a step behind compute (docs/offload.md)")
    add("--offload-tier", metavar="FOLDER", help="a fast disk for the states (and, with files, the parameters)")
    add("--activation-checkpointing", action="store_true", help="recompute blocks in backward: =full")

    add = parser.add_argument_group("reports and checkpoints").add_argument
    add("--log-every", type=_count, default=10, help="steps between metrics")
    add("--eval-every", type=_count_or_zero, default=100, help="steps between validations; 0: at the end alone")
    add("--eval-batches", type=_count, default=8, help="batches per rank in a validation")
    add("--save-every", type=_count_or_zero, default=200, help="steps between checkpoints; 0: at the end alone")
    add("--keep", type=_count_or_zero, default=0, help="how many of the newest checkpoints stay; 0: all")
    add("--sample-bytes", type=_count_or_zero, default=200, help="length of the text generated at the end")
    add("--plan", action="store_true", help="say at the start how much memory the run will take, and what would help")
    return parser
