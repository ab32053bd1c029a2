"""The command ``python -m fsdp2.checkpoint``. Layer: checkpoint.

Exit codes: 0 success; 1 damaged; 2 invalid arguments, or there is no checkpoint; 130 interrupted.
With ``--json`` standard output is one JSON value. What people read is in `screen.py`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fsdp2.checkpoint.opening import checkpoints_in, is_checkpoint
from fsdp2.checkpoint.run.retention import checkpoints, prune, superseded
from fsdp2.checkpoint.storage.base import storage_of
from fsdp2.checkpoint.tools import screen
from fsdp2.checkpoint.tools.converting import LAYOUTS, convert
from fsdp2.checkpoint.tools.describing import Description, describe
from fsdp2.checkpoint.tools.inspection import Report, find_damage, verify
from fsdp2.errors import CorruptError, FSDPError

__all__ = ["main"]

OK, DAMAGED, USAGE, INTERRUPTED = 0, 1, 2, 130

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
# The flags, by the names that the functions behind the command use in their messages.
FLAGS = {
    "overwrite=True": "--overwrite",
    "model_only=True": "--model-only",
    "verify=False": "--no-verify",
    "fsdp2.checkpoint.latest(folder)": "the newest",
}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; None for those of the process.

    Returns:
        the exit code. (With invalid arguments the process exits with 2, as `argparse` does.)
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except CorruptError as error:
        return _failed(args, error, DAMAGED)
    except (FSDPError, OSError) as error:
        return _failed(args, error, USAGE)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing is left half done\n")
        return INTERRUPTED


def _failed(args: argparse.Namespace, error: Exception, code: int) -> int:
    message = str(error)
    for name, flag in FLAGS.items():
        message = message.replace(name, flag)
    if args.json:
        _write_json({"error": message})
    sys.stderr.write("\n".join(screen.clean(line) for line in f"error: {message}".split("\n")) + "\n")
    return code


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _write(lines: Iterable[str]) -> None:
    sys.stdout.writelines(screen.clean(line) + "\n" for line in lines)


# --- what it takes ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2.checkpoint",
        description="Look at, check, convert and thin out checkpoints. A FOLDER may be a URL (s3://...).",
        epilog="Exit codes: 0 all is well, 1 damaged, 2 wrong call or no checkpoint, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"fsdp2 {_version()}, torch {torch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = partial(_command, commands)
    one = add("describe", _describe, "what is in a checkpoint, or which checkpoints are in the folder of a run")
    one.add_argument("folder", metavar="FOLDER")
    one.add_argument("--tensors", metavar="PATTERN", nargs="?", const="*", help='list tensors ("layers.0.*")')

    one = add("verify", _verify, "read everything and list all damage")
    one.add_argument("folders", metavar="FOLDER", nargs="+", help="a checkpoint, or the folder of a run for all of its")
    one.add_argument(
        "--strict", action="store_true", help="files that do not belong there, and what is not read, count as damage"
    )

    one = add("convert", _convert, "rewrite a checkpoint for another number of ranks, layout or format")
    one.add_argument("source", metavar="SOURCE", help="any checkpoint that load() takes")
    one.add_argument("target", metavar="TARGET", help="a folder that is not there yet")
    one.add_argument("--to", choices=LAYOUTS, default="ranks", help="layout (default: ranks)")
    one.add_argument("--world", type=int, default=1, metavar="N", help="for how many ranks (default: 1)")
    one.add_argument("--dtype", choices=DTYPES, help="convert the model's floating point tensors")
    one.add_argument("--max-file-size", type=_size, default=5_000_000_000, metavar="SIZE", help="default: 5GB")
    one.add_argument("--model-only", action="store_true", help="without optimizer and extra state")
    one.add_argument("--overwrite", action="store_true", help="replace a checkpoint, once the new one is complete")
    one.add_argument("--no-verify", action="store_true", help="do not check the checksums of SOURCE")

    one = add("prune", _prune, "delete old checkpoints of a run")
    one.add_argument("folder", metavar="RUN")
    one.add_argument("--keep", type=int, metavar="N", required=True, help="how many of the newest stay")
    one.add_argument("--every", type=int, metavar="STEPS", help="multiples of this stay besides")
    one.add_argument("--verify", action="store_true", help="only those that were read to the end count as sound")
    one.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    return parser


def _version() -> str:
    try:
        return version("fsdp2")
    except PackageNotFoundError:  # a source tree on the path
        return "(not installed)"


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--json", action="store_true", help="JSON on standard output, no progress")
    command.set_defaults(run=run)
    return command


def _size(text: str) -> int:
    """Bytes of "5GB", "512MiB", "1000"."""
    number = text.rstrip("B").rstrip("KMGTi")
    try:
        return int(float(number) * UNITS[text.rstrip("B")[len(number) :]])
    except (KeyError, ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 512MiB or 1000") from error


# --- what it does -----------------------------------------------------------------------------------------------------


def _members(folder: str) -> list[str]:
    """The checkpoints of a run, also of other libraries. Empty if the folder is a checkpoint itself, or has none."""
    storage, path = storage_of(folder)
    if is_checkpoint(storage, path):
        return []
    return checkpoints(folder) or checkpoints_in(storage, path)


def _describe(args: argparse.Namespace) -> int:
    runs = _members(args.folder)
    if not runs:
        description = describe(args.folder)
        if args.json:
            _write_json(_as_json(description))
        else:
            _write(screen.described(description, args.tensors))
        return OK
    found, damaged = list[Description](), dict[str, str]()
    for folder in runs:
        try:
            found.append(describe(folder))
        except FSDPError as error:
            damaged[folder] = str(error)
    if args.json:
        _write_json({"checkpoints": [_as_json(one) for one in found], "damaged": damaged})
    else:
        _write(screen.listed(found, damaged.values()))
    return DAMAGED if damaged else OK


def _verify(args: argparse.Namespace) -> int:
    reports: list[Report] = []
    for folder in args.folders:
        for one in _members(folder) or [folder]:
            reports.append(find_damage(one, progress=None if args.json else screen.progress(f"verify {one}")))
            if not args.json:
                _write(screen.reported(reports[-1]))
    good = all(report.ok and not (args.strict and (report.strays or report.left_out)) for report in reports)
    if args.json:
        _write_json({"ok": good, "reports": [{"ok": report.ok, **asdict(report)} for report in reports]})
    return OK if good else DAMAGED


def _convert(args: argparse.Namespace) -> int:
    folder = convert(
        args.source,
        args.target,
        to=args.to,
        world=args.world,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        progress=None if args.json else screen.progress(f"convert {args.source}"),
        model_only=args.model_only,
        max_file_bytes=args.max_file_size,
        overwrite=args.overwrite,
        verify=not args.no_verify,
    )
    if args.json:
        _write_json({"folder": folder})
    else:
        _write([folder])
    return OK


def _prune(args: argparse.Namespace) -> int:
    work = superseded if args.dry_run else prune
    old = work(args.folder, args.keep, args.every, verify if args.verify else None)
    if args.json:
        _write_json({"deleted": not args.dry_run, "checkpoints": old})
    else:
        verb = "would delete" if args.dry_run else "deleted"
        _write([f"{verb} {folder}" for folder in old] or ["nothing to delete"])
    return OK


def _as_json(description: Description) -> dict[str, Any]:
    return {**asdict(description), "nbytes": description.nbytes}
