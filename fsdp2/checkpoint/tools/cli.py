"""The command ``python -m fsdp2.checkpoint``. Layer: checkpoint.

Exit codes: 0 success; 1 damaged; 2 invalid arguments, or no checkpoint was found.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from fsdp2.checkpoint.run.retention import checkpoints, prune
from fsdp2.checkpoint.tools.converting import convert
from fsdp2.checkpoint.tools.describing import describe
from fsdp2.checkpoint.tools.inspection import verify
from fsdp2.errors import CorruptError, FSDPError

__all__ = ["main"]

OK, DAMAGED, USAGE = 0, 1, 2

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; None for those of the process.

    Returns:
        The exit code. (With invalid arguments the process exits with 2, as `argparse` does.)
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (FSDPError, OSError) as error:
        message = f"error: {error}".replace("overwrite=True", "--overwrite")
        sys.stderr.writelines(_clean(message.split("\n")))
        return DAMAGED if isinstance(error, CorruptError) else USAGE


def _clean(lines: Iterable[str]) -> Iterable[str]:
    """The lines without control characters: a name in a file may contain terminal escape codes."""
    for line in lines:
        yield "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line) + "\n"


def _write(*lines: str) -> None:
    sys.stdout.writelines(_clean(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2.checkpoint",
        description="Describe, verify, convert and prune checkpoints. A FOLDER may be a URL (s3://...).",
        epilog="Exit codes: 0 success, 1 damaged, 2 invalid arguments or no checkpoint.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    one = add("describe", _describe, "what is in a checkpoint, or which checkpoints are in the folder of a run")
    one.add_argument("folder", metavar="FOLDER")
    one.add_argument("--tensors", metavar="PATTERN", nargs="?", const="*", help='list tensors ("layers.0.*")')

    one = add("verify", _verify, "read everything and report damage")
    one.add_argument("folder", metavar="FOLDER", help="a checkpoint, or the folder of a run for all of its")

    one = add("convert", _convert, "rewrite the model as whole tensors, with Hugging Face's index")
    one.add_argument("source", metavar="SOURCE", help="any checkpoint that load() takes")
    one.add_argument("target", metavar="TARGET", help="a folder that does not exist yet")
    one.add_argument("--dtype", choices=DTYPES, help="convert the floating point tensors")
    one.add_argument("--overwrite", action="store_true", help="replace a checkpoint, once the new one is complete")

    one = add("prune", _prune, "delete old checkpoints of a run")
    one.add_argument("folder", metavar="RUN")
    one.add_argument("--keep", type=int, metavar="N", required=True, help="how many of the newest to keep")
    one.add_argument("--every", type=int, metavar="STEPS", help="also keep multiples of this")
    one.add_argument("--verify", action="store_true", help="count only those that verify as sound")
    return parser


def _each(folder: str, work: Callable[[str], Iterable[str]]) -> int:
    """Print the lines of `work` for a checkpoint, or for each checkpoint of a run."""
    code = OK
    for one in checkpoints(folder) or [folder]:
        try:
            _write(*work(one))
        except CorruptError as error:
            code = DAMAGED
            _write(*str(error).split("\n"))
    return code


def _describe(args: argparse.Namespace) -> int:
    def lines(folder: str) -> Iterable[str]:
        one = describe(folder)
        facts = {"format": f"{one.kind} {one.layout}", "step": one.step, "ranks": one.world or None, "id": one.id}
        facts |= {"optimizer": one.optimizer, "extra": ", ".join(one.extra)}
        yield f"{one.folder}: " + ", ".join(f"{name} {value}" for name, value in facts.items() if value)
        for section in dict.fromkeys(tensor.section for tensor in one.tensors):
            own = [tensor for tensor in one.tensors if tensor.section == section]
            dtypes = ", ".join(sorted({tensor.dtype for tensor in own}))
            yield f"  {section}: {len(own)} tensors, {_size(sum(tensor.nbytes for tensor in own))}, {dtypes}"
        for tensor in one.tensors:
            if args.tensors is not None and fnmatchcase(tensor.name, args.tensors):
                shown = " = ".join([tensor.name, *tensor.aliases])
                yield f"  {tensor.section} {shown}: {tensor.dtype} {[*tensor.shape]}, {_size(tensor.nbytes)}"
        yield from (f"  not read: {name}: {why}" for name, why in one.left_out.items())

    return _each(args.folder, lines)


def _verify(args: argparse.Namespace) -> int:
    def lines(folder: str) -> Iterable[str]:
        one = verify(folder)
        checked = f", {_size(one.checked_bytes)} checked" if one.checked_bytes else ""
        unchecked = f", {_size(one.unchecked_bytes)} read that have no checksums" if one.unchecked_bytes else ""
        state = "readable" if unchecked else "whole"
        yield f"{state} {one.folder}: {one.num_tensors} tensors{checked}{unchecked}"
        yield from (f"  not read: {name}: {why}" for name, why in one.left_out.items())

    return _each(args.folder, lines)


def _convert(args: argparse.Namespace) -> int:
    dtype = DTYPES[args.dtype] if args.dtype else None
    _write(convert(args.source, args.target, dtype=dtype, overwrite=args.overwrite))
    return OK


def _prune(args: argparse.Namespace) -> int:
    old = prune(args.folder, args.keep, args.every, verify if args.verify else None)
    _write(*([f"deleted {folder}" for folder in old] or ["nothing to delete"]))
    return OK


def _size(nbytes: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes, _ = nbytes / 1000, units.pop()
    return f"{nbytes:.3g} {units[-1]}"
