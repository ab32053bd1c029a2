"""Pools of worker processes, one process per rank, kept for the whole pytest session. The tests use `ranks.py`.

Workers are forked from a fork server that has imported torch and nothing else, so a pool starts in tenths of a second
and a failing test can afford a new one. The parent holds one pipe per worker: jobs go down, answers come up, and
closing it ends the worker.
"""

from __future__ import annotations

import ast
import inspect
import marshal
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks_worker import Answer, Job, WorkerConfig, serve

DEFAULT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
# How long the other ranks may go on after one has failed: usually they wait for it in a collective.
GRACE_S = 1.0
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
_pools: dict[tuple[int, str], Pool] = {}


class RanksFailed(Exception):
    """Some ranks raised, died or hung; the message says which and shows tracebacks or stacks."""


def forking() -> multiprocessing.context.ForkServerContext:
    """Its processes are forked from the server that has imported torch."""
    return _context


def pool_of(world_size: int, device: str = "") -> Pool:
    """The running pool of this size and device; starts one if there is none."""
    pool = _pools.get((world_size, device))
    if pool is None or not pool.alive:
        pool = _pools[world_size, device] = Pool(world_size, device)
    return pool


def close_pools() -> None:
    """End all workers; the next test starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


class Pool:
    """`world_size` workers and the pipes to them.

    Args:
        device: name of a module whose `register()` gives a process an accelerator, and whose `BACKENDS` are those of
            the default process group. What torch knows of accelerators is then different for the life of a worker.
    """

    def __init__(self, world_size: int, device: str = "") -> None:
        self.world_size = world_size
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._sent: dict[str, str] = {}  # by the name of a module its path: its code has been sent
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            config = WorkerConfig(rank, world_size, self._store.port, self._stacks_path(rank), device)
            name = f"rank{rank}of{world_size}"
            process = _context.Process(target=serve, args=(config, theirs), daemon=True, name=name)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._collect(START_TIMEOUT_S, "starting the pool")

    def run(self, body: Callable[..., Any], params: dict[str, Any], timeout_s: float) -> list[Any]:
        """Run `body` on all ranks; closes the pool if that fails in any way."""
        path = inspect.getsourcefile(body)
        assert path is not None
        path = os.path.abspath(path)
        code = b"" if self._sent.get(body.__module__) == path else _compiled(path)
        self._sent[body.__module__] = path
        job = pickle.dumps(Job(body.__module__, path, code, body.__qualname__, pickle.dumps(params)))
        for connection in self._connections:
            connection.send_bytes(job)
        answers = self._collect(timeout_s, body.__qualname__)
        self._collect(timeout_s, f"the barrier after {body.__qualname__}")
        for answer in answers:
            if answer.kind == "skipped":
                pytest.skip(answer.text)
        return [pickle.loads(answer.payload) for answer in answers if answer.payload]

    def close(self) -> None:
        self.alive = False
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()

    def _stacks_path(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"stacks{rank}.txt")

    def _collect(self, timeout_s: float, what: str) -> list[Answer]:
        """One answer from each rank. A rank that fails shortens the wait for the others."""
        answers: dict[int, Answer] = {}
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        deadline = time.monotonic() + timeout_s
        failed = False
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = self._receive(connection, rank)
                if answers[rank].kind == "failed" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not waiting and not any(answer.kind == "failed" for answer in answers.values()):
            return [answers[rank] for rank in range(self.world_size)]
        report = self._report(answers, sorted(waiting.values()), what, timeout_s)
        self.close()
        raise RanksFailed(report)

    def _receive(self, connection: Connection, rank: int) -> Answer:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return Answer("failed", text=f"the process died: {how}")

    def _report(self, answers: dict[int, Answer], stuck: list[int], what: str, timeout_s: float) -> str:
        lines = []
        shown: dict[str, int] = {}
        for rank, answer in sorted(answers.items()):
            if answer.kind != "failed":
                continue
            same = shown.setdefault(answer.text, rank)
            like = f" like rank {same}" if same != rank else ":"
            lines.append(f"--- rank {rank} of {self.world_size} failed{like}")
            if same == rank:
                lines.append(answer.text)
        if stuck:
            ranks = ", ".join(map(str, stuck))
            after = f"{GRACE_S:g} s later" if lines else f"after {timeout_s:g} s"
            lines.append(f"--- {what} still runs on ranks {ranks} of {self.world_size} {after}; their stacks:")
            for rank, stacks in self._dump_stacks(stuck).items():
                lines.append(f"--- rank {rank} is stuck in:\n{stacks}")
        return "\n".join(lines)

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        return {rank: Path(self._stacks_path(rank)).read_text().rstrip() or "(no stack)" for rank in ranks}


@cache
def _compiled(path: str) -> bytes:
    """The code of a test module for all ranks, with pytest's assertion rewriting where this pytest allows it."""
    source = Path(path).read_bytes()
    tree = ast.parse(source, path)
    try:
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, path)
    except (ImportError, TypeError):  # private to pytest: without it asserts fail all the same, with less to read
        tree = ast.parse(source, path)
    return marshal.dumps(compile(tree, path, "exec", dont_inherit=True))


if sys.platform == "win32":
    raise ImportError("the rank pools need fork and POSIX signals")
