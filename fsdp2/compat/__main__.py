"""The command ``python -m fsdp2.compat``: see `USAGE`. Layer: compat."""

import os
import runpy
import sys
from pathlib import Path

from fsdp2.compat.installing import HOME, install

__all__ = ["BOOTSTRAP", "main"]

# With this folder on PYTHONPATH and FSDP2_COMPAT=1, its `sitecustomize` installs compat in every Python child process:
# the workers of torchrun or `accelerate launch`, and those that `torch.multiprocessing.spawn` starts.
BOOTSTRAP = Path(__file__).parent / "bootstrap"

USAGE = """\
usage: python -m fsdp2.compat script.py args...
       python -m fsdp2.compat -m module args...
       python -m fsdp2.compat --path

Run a program with the FSDP2 names of torch.distributed.fsdp resolving to fsdp2, in this process and in the Python
processes that it starts. --path prints a folder: with it on PYTHONPATH and FSDP2_COMPAT=1, every Python process does
the same."""


def main(arguments: list[str]) -> None:
    """Install compat, print a line about it once, then run the program as `python` itself would."""
    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n")
    elif arguments == ["--path"]:
        sys.stdout.write(f"{BOOTSTRAP}\n")
    elif len(arguments) > 1 and arguments[0] == "-m":
        _prepare(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        script = Path(arguments[0])
        if not script.exists():
            raise SystemExit(f"python -m fsdp2.compat: there is no file {script}")
        _prepare(arguments)
        if not sys.flags.safe_path:
            sys.path[0] = str(script.resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        raise SystemExit(USAGE)


def _prepare(argv: list[str]) -> None:
    install()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(BOOTSTRAP) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *paths])
    os.environ["FSDP2_COMPAT"] = "1"
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"fsdp2.compat: {HOME}.fully_shard is that of {Path(__file__).parents[1]}\n")
    sys.argv = argv


if __name__ == "__main__":
    main(sys.argv[1:])
