"""A process that has imported torch and nothing of ours, and runs pytest in forks of itself, one after the other.

Run as a script, with a tree's root on `PYTHONPATH`. A line of JSON comes in for each run, the file for its output, its
environment and its arguments; two lines go out: the process, which leads a session, and its status. The server of which
pools of ranks are forked is started here too, so that a run costs neither of the two imports of torch, of seconds each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing import forkserver

import pytest
import torch  # noqa: F401

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"]


def main() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    server = forkserver._forkserver
    print(json.dumps({"server": server._forkserver_pid}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            server.ensure_running = lambda: None  # it asks whether its child lives; here that is a sibling
            run(job)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def run(job: dict) -> None:
    status = 3
    try:
        os.setsid()
        output = os.open(job["output"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environment"])
        status = int(pytest.main(job["arguments"]))
        sys.stdout.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    main()
