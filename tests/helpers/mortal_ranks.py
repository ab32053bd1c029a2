"""Ranks that a test may kill: forked for one case, real gloo processes, gone afterwards.

    case = Case(body, world_size=2, args=(folder,), kill=Kill(rank=1, after_s=0.01))
    outcomes = run_cases([case, ...])[0]          # one `Outcome` a rank

Unlike the pools of `ranks.py`, nothing of a case survives it: neither processes, nor their group, nor what a body has
patched. A process that has imported everything and started nothing (the nursery) forks the ranks, so a case costs tens
of milliseconds; several run at the same time. `body` is a function of a test module, called as ``body(rank, *args)``.
"""

import atexit
import importlib
import itertools
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.ranks_pool import _context

__all__ = ["Case", "Kill", "Outcome", "begin", "run_cases"]

# Cases at the same time: most of a case is waiting (for a timeout, for a disk).
WORKERS = 8


@dataclass(frozen=True)
class Kill:
    """A signal from outside, some time after the body of `rank` has called `begin()`."""

    rank: int
    after_s: float
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Case:
    """What to run, and what happens to it.

    Attributes:
        store: "agent": the ranks' store is in another process, as under torchrun; "rank 0": it dies with rank 0.
        device: a module that gives each rank an accelerator; see `ranks_pool.Pool`.
    """

    body: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...] = ()
    kill: Kill | None = None
    store: str = "agent"
    limit_s: float = 30.0
    device: str = ""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        how: "returned", "raised" (`value`: type, and types it derives from; `text`: the message), "died" (`value`: the
            signal or exit code), "hung".
    """

    how: str
    value: Any = None
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether the body returned."""
        return self.how == "returned"

    def raised(self, name: str) -> bool:
        """Whether it raised an error of that type."""
        return self.how == "raised" and name in self.value


def run_cases(cases: Sequence[Case]) -> list[list[Outcome]]:
    """Run all cases, some at the same time."""
    return _nursery().run(cases)


# --- in the pytest process --------------------------------------------------------------------------------------------


class Nursery:
    """The process that forks the ranks, and the store that is not theirs."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connection, theirs = _context.Pipe()
        self._numbers = itertools.count()
        self.process: BaseProcess = _context.Process(target=_tend, args=(theirs, self._store.port), daemon=False)
        self.process.start()
        theirs.close()
        atexit.register(self.close)

    def run(self, cases: Sequence[Case]) -> list[list[Outcome]]:
        self._connection.send([(next(self._numbers), case) for case in cases])
        limit = sum(case.limit_s for case in cases) + 60
        if not self._connection.poll(limit):
            raise TimeoutError(f"no answer from the nursery within {limit} s")
        results: list[list[Outcome]] = self._connection.recv()
        return results

    def close(self) -> None:
        self._connection.close()
        self.process.join(5)


_nurseries: list[Nursery] = []


def _nursery() -> Nursery:
    if not _nurseries or not _nurseries[-1].process.is_alive():
        _nurseries.append(Nursery())
    return _nurseries[-1]


# --- in the nursery ---------------------------------------------------------------------------------------------------


def _tend(connection: Connection, port: int) -> None:
    """Process entry: for each lot of cases, fork workers that share it."""
    torch.set_num_threads(1)
    importlib.import_module("fsdp2.checkpoint.run.committing")
    importlib.import_module("fsdp2")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    while True:
        try:
            cases = connection.recv()
        except (EOFError, OSError):
            return
        workers = []
        for index in range(min(WORKERS, len(cases))):
            share = cases[index::WORKERS]
            workers.append(_forked(lambda share=share: [_run(number, case, port) for number, case in share]))
        answers = [_answer(pipe, pid, None) for pipe, pid in workers]
        results: list[Any] = [None] * len(cases)
        for index, answer in enumerate(answers):
            assert answer.ok, answer
            results[index::WORKERS] = answer.value
        connection.send(results)


def _forked(body: Callable[[], Any]) -> tuple[int, int]:
    """Call `body` in a child process: (a pipe with its pickled outcome, its pid)."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sending)
        return receiving, pid
    os.close(receiving)
    try:
        outcome = Outcome("returned", body())
    except BaseException as error:
        outcome = Outcome("raised", tuple(kind.__name__ for kind in type(error).__mro__), str(error))
    try:
        with os.fdopen(sending, "wb") as pipe:
            pickle.dump(outcome, pipe)
    finally:
        os._exit(0)


def _answer(pipe: int, pid: int, limit_s: float | None) -> Outcome:
    """The outcome of a child; kills one that takes longer than `limit_s`."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    parts = []
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)
            return Outcome("hung")
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        parts.append(part)
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    if not parts:
        code = os.waitstatus_to_exitcode(status)
        return Outcome("died", signal.Signals(-code).name if code < 0 else code)
    outcome: Outcome = pickle.loads(b"".join(parts))
    return outcome


# --- in a worker of the nursery, and in the ranks ---------------------------------------------------------------------

_begun: list[int] = []


def begin() -> None:
    """Called by a body when what is to be disturbed begins."""
    os.write(_begun[0], b"b")


def _run(number: int, case: Case, port: int) -> list[Outcome]:
    """Fork the ranks of a case and wait for them."""
    if case.store == "rank 0":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    watching, telling = os.pipe()
    children = []
    for rank in range(case.world_size):
        tell = telling if case.kill is not None and case.kill.rank == rank else os.open(os.devnull, os.O_WRONLY)
        children.append(_forked(lambda rank=rank, tell=tell: _rank(number, case, port, rank, tell)))
        if tell != telling:
            os.close(tell)
    os.close(telling)
    if case.kill is not None and select.select([watching], [], [], case.limit_s)[0]:
        time.sleep(case.kill.after_s)
        os.kill(children[case.kill.rank][1], case.kill.signal)
    os.close(watching)
    deadline = time.monotonic() + case.limit_s
    return [_answer(pipe, pid, max(0.1, deadline - time.monotonic())) for pipe, pid in children]


def _rank(number: int, case: Case, port: int, rank: int, tell: int) -> Any:
    _begun[:] = [tell]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch reports every lost connection there, with a stack
    if case.store == "rank 0":
        server = rank == 0
        store: dist.Store = dist.TCPStore("127.0.0.1", port, is_master=server, wait_for_workers=False)
    else:
        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port, is_master=False))
    limit = timedelta(seconds=case.limit_s)
    backends = "gloo"
    if case.device:
        module = importlib.import_module(case.device)
        module.register()
        backends = module.BACKENDS
    dist.init_process_group(backends, store=store, rank=rank, world_size=case.world_size, timeout=limit)
    dist.barrier()  # a rank that is killed at once would fail the others here, where nothing is tested
    return case.body(rank, *case.args)
