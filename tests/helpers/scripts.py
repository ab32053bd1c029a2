"""Run a Python script as a user starts it, alone or on several ranks, without the seconds that importing torch costs.

The processes are forked from the server of `ranks_pool.py`, which has imported torch and nothing of ours, and run the
script as `__main__`, with its arguments, environment, folder and output. Several ranks find what torchrun gives them.
What is about torchrun itself, about what is imported when, or about processes that are killed needs real processes.
"""

import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks_pool import GRACE_S, forking

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Finished:
    """A job that has ended, and what its ranks printed. status: of the rank that failed first, or 0."""

    status: int
    output: str
    errors: str


def run_script(
    script: str | Path,
    *arguments: str | Path,
    ranks: int | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Finished:
    """Run a file, or with `script="-m"` the module named by the first argument. With `ranks=None` it runs by itself,
    as `python script` does; otherwise as under `torchrun --nproc_per_node=ranks`: when one fails, the others are ended.

    A job that does not end fails the test.
    """
    words = [str(script), *map(str, arguments)]
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory(prefix="script") as folder:
        files = Path(folder) / "output", Path(folder) / "errors"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
        processes = []
        for rank in range(ranks or 1):
            own = variables if store is None else {**variables, **_as_torchrun(rank, ranks or 1, store.port)}
            job = (words, own, str(cwd or Path.cwd()), *map(str, files))
            process = forking().Process(target=_become, args=job)
            process.start()
            processes.append(process)
        status = _wait(processes, timeout_s)
        output, errors = (file.read_text(errors="replace") if file.exists() else "" for file in files)
    if status is None:
        pytest.fail(f"{' '.join(words)} hung for {timeout_s} s\n{output}\n{errors}", pytrace=False)
    return Finished(status, output, errors)


def _as_torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, as it is with torchrun's agent
        "TORCHELASTIC_RUN_ID": "none",
    }


def _wait(processes: list[Any], timeout_s: float) -> int | None:
    """The status of the first that failed; None if they did not end in time. All are gone afterwards."""
    deadline = time.monotonic() + timeout_s
    status, running = 0, list(processes)
    while running:
        ready = wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for process in [process for process in running if process.sentinel in ready]:
            process.join()
            running.remove(process)
            if process.exitcode != 0 and status == 0:
                status = process.exitcode
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for process in running:
        process.kill()
        process.join()
    return None if running and status == 0 else status


def _become(words: list[str], environment: dict[str, str], cwd: str, output: str, errors: str) -> None:
    """In the forked process: what Python does for a script on its command line."""
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    torch.set_num_threads(1)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[:0] = [cwd, *paths]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[:0] = [str(Path(words[0]).resolve().parent), *paths]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
