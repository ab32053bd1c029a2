"""A process that has a library and a client in place, and forks the ranks of scripts: see `clients.py`.

python -m tests.clients.server torch|fsdp2 MODULE
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def main(library: str, module: str) -> None:
    """Answer each job on stdin with the failures of its ranks, by rank, on stdout."""
    if library == "fsdp2":
        import fsdp2.compat

        fsdp2.compat.install()
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what clients print is not for the pipe
    scripts = importlib.import_module(module)
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(_run(scripts, job), answers)
        answers.flush()


def _run(scripts: Any, job: dict[str, Any]) -> dict[int, str]:
    from tests.clients.clients import make_store, wait_for

    store = make_store(job["world_size"])
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(scripts, job, rank, store.port)) for rank in range(job["world_size"])
    ]
    for process in processes:
        process.start()
    killed = wait_for(processes)
    failures = {}
    for rank, process in enumerate(processes):
        if process.exitcode != 0:
            path = Path(job["folder"], f"{rank}.failure")
            ended = (
                "was killed: it hung, or another rank failed" if rank in killed else f"ended with {process.exitcode}"
            )
            failures[rank] = path.read_text() if path.exists() and path.stat().st_size else f"it {ended}"
    return failures


def _rank(scripts: Any, job: dict[str, Any], rank: int, port: int) -> None:
    size = str(job["world_size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    # The server holds the store, as torchrun's agent does: no port is chosen before it is bound.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(TORCHELASTIC_RUN_ID="clients", GROUP_WORLD_SIZE="1", ROLE_RANK=str(rank), ROLE_WORLD_SIZE=size)
    from fsdp2 import events
    from tests.clients.clients import TIMEOUT_S, Run

    failure = Path(job["folder"], f"{rank}.failure")
    with failure.open("w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(TIMEOUT_S * 2 / 3, file=file)
        try:
            function: Any = scripts
            for name in job["name"].split("."):
                function = getattr(function, name)
            start = _watch_optimizers()
            with events.record() as log:
                result = function(**job["params"])
            if isinstance(result, Run):
                result.events = Counter(event.kind for event in log)
                result.stepped = len(start)
                result.still = sum(torch.equal(_local(param), before) for param, before in start.values())
            Path(job["folder"], f"{rank}.result").write_bytes(pickle.dumps(result))
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            os._exit(1)
    os._exit(0)  # without destructors: a group of a rank that ended first may be gone


def _watch_optimizers() -> dict[int, tuple[Any, Any]]:
    """Fills in, by id, each tensor that an optimizer trains, and this rank's values of it before the first step."""
    start: dict[int, tuple[Any, Any]] = {}

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.requires_grad and id(param) not in start and _local(param).numel() > 0:
                start[id(param)] = param, _local(param).clone()

    register_optimizer_step_pre_hook(before_step)
    return start


def _local(param: Any) -> Any:
    """This rank's values; quantised tensors of torchao's, which know no comparison, as plain numbers."""
    param = param.detach()
    local = param.to_local() if isinstance(param, DTensor) else param
    return local if type(local) is torch.Tensor or not hasattr(local, "dequantize") else local.dequantize()


if __name__ == "__main__":
    main(*sys.argv[1:])
