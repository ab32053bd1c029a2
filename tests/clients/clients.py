"""Run the same client code on torch's FSDP2 and on ours, and compare.

    def script(steps: int) -> Run:                       # module level, like a program that torchrun starts
        dist.init_process_group("gloo")
        model = ...                                      # the client's own code
        return Run(losses, library=library_of(model))

    def test_x() -> None:
        both = run_both(script, 2, steps=3)
        both.assert_equal()

For each library and test module there is one server process, which has put the library in place (`fsdp2.compat`)
before it imported the test module and so the client. For each script it forks one process a rank. A rank finds what
torchrun would have set (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), and makes its own process group.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch import distributed as dist

__all__ = ["Both", "Run", "close_servers", "library_of", "run_both", "run_in_folders", "run_script"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = float(os.environ.get("CLIENTS_TIMEOUT_S", "150"))  # seconds a script; less than pytest's limit
_servers: dict[tuple[str, str], subprocess.Popen[bytes]] = {}


@dataclass
class Run:
    """What one rank of a script reports; what it holds is pickled.

    Attributes:
        losses: one number or tensor for each step, in order.
        library: `library_of` the model that was trained.
        values: anything else that must be the same with both libraries: parameters, gradient norms, logits.
        notes: anything picklable that need not be.
        events: how often our runtime did what; filled in by the harness, empty when torch's ran.
        stepped: how many tensors this rank's optimizers were given to train; filled in by the harness.
        still: how many of those have the values that they had before the first step; filled in by the harness.
    """

    losses: list[Any]
    library: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    stepped: int = 0
    still: int = 0


@dataclass
class Both:
    """The runs of a script, in rank order."""

    torch: list[Run]
    ours: list[Run]

    def assert_equal(self, *, rtol: float = 0.0, atol: float = 0.0, trains: bool = True) -> None:
        """Losses and values are the same on every rank (bitwise unless told), and each library did its own run.

        Every tensor that an optimizer was given has changed, and `values["norms"]`, of gradients, are not 0.
        `trains=False` is for scripts without an optimizer.
        """
        for rank, (theirs, ours) in enumerate(zip(self.torch, self.ours, strict=True)):
            assert theirs.library["fsdp2"] == 0 and theirs.library["torch"] > 0, f"rank {rank}: {theirs.library}"
            assert ours.library == {"fsdp2": theirs.library["torch"], "torch": 0}, f"rank {rank}: {ours.library}"
            assert not theirs.events and ours.events["unshard"] > 0, f"rank {rank}: {ours.events}"
            assert len(theirs.losses) > 0
            for run in (theirs, ours):
                assert (run.stepped > 0) == trains, f"rank {rank}: optimizers were given {run.stepped} tensors"
                assert run.still == 0, f"rank {rank}: {run.still} of {run.stepped} tensors were not trained"
                assert all(norm > 0.0 for norm in run.values.get("norms", ())), f"rank {rank}: {run.values['norms']}"
            _assert_close(f"rank {rank}: losses", ours.losses, theirs.losses, rtol, atol)
            assert ours.values.keys() == theirs.values.keys()
            for name, value in ours.values.items():
                _assert_close(f"rank {rank}: {name}", value, theirs.values[name], rtol, atol)


def library_of(*models: nn.Module) -> dict[str, int]:
    """How many modules (units) of the models are sharded by which library."""
    import fsdp2

    counts = {"torch": 0, "fsdp2": 0}
    for module in {id(module): module for model in models for module in model.modules()}.values():
        if isinstance(module, fsdp2.FSDPModule):
            counts["fsdp2"] += 1
        # By name: with `fsdp2.compat` in place torch's own class is not to be had under its name.
        elif any(base.__module__.startswith("torch.distributed.") and base.__name__ == "FSDPModule"
                 for base in type(module).__mro__):  # fmt: skip
            counts["torch"] += 1
    return counts


def run_both(script: Callable[..., Run], world_size: int, /, **params: Any) -> Both:
    """Run `script(**params)` on `world_size` ranks with torch's FSDP2, then with ours. Fails if a rank does."""
    __tracebackhide__ = True
    return Both(*(run_script(script, world_size, library, **params) for library in ("torch", "fsdp2")))


def run_in_folders(script: Callable[..., Run], world_size: int, folder: Path, /, **params: Any) -> Both:
    """As `run_both`, with `folder / "torch"` and `folder / "fsdp2"` for the script's parameter `folder`."""
    __tracebackhide__ = True
    return Both(
        *(
            run_script(script, world_size, library, folder=str(folder / library), **params)
            for library in ("torch", "fsdp2")
        )
    )


def run_script(script: Callable[..., Any], world_size: int, library: str, /, **params: Any) -> list[Any]:
    """Run `script(**params)` on `world_size` ranks with one library, ``"torch"`` or ``"fsdp2"``: results in rank order.

    `params` and results are pickled.
    """
    __tracebackhide__ = True
    server = _server_of(library, script.__module__)
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        job = {"name": script.__qualname__, "world_size": world_size, "params": params, "folder": folder}
        try:
            pickle.dump(job, server.stdin)
            server.stdin.flush()
            failures: dict[int, str] = pickle.load(server.stdout)
        except (BrokenPipeError, EOFError):
            failures = {-1: "the server process died: see the captured stderr (is fsdp2.compat in order?)"}
        except BaseException:  # a time limit, or Ctrl-C: the answer would be taken for that of the next job
            close_servers()
            raise
        if failures:
            close_servers()
            texts = "\n".join(f"--- rank {rank}\n{text}" for rank, text in failures.items())
            pytest.fail(f"{script.__qualname__} on {library}, {world_size} ranks:\n{texts}", pytrace=False)
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(world_size)]


def close_servers() -> None:
    """End all server processes; the next script starts a new one."""
    while _servers:
        _, server = _servers.popitem()
        server.kill()
        server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                pipe.close()


def _server_of(library: str, module: str) -> subprocess.Popen[bytes]:
    """The process that forks the ranks of this module's scripts with this library."""
    if (library, module) not in _servers:
        command = [sys.executable, "-m", "tests.clients.server", library, module]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
        environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "default"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _servers[library, module] = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    return _servers[library, module]


def make_store(world_size: int) -> dist.TCPStore:
    """The store that torchrun's agent would offer, on a port of its own choosing."""
    return dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timedelta(seconds=TIMEOUT_S),
                         wait_for_workers=False)  # fmt: skip


def wait_for(processes: list[Any], grace_s: float = 2.0) -> list[int]:
    """Wait for the ranks; once one has failed the others have `grace_s` more. The ranks that had to be killed."""
    end = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + grace_s)
        time.sleep(0.01)
    killed = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    return killed


def _assert_close(what: str, actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Nested lists, tuples and dicts of tensors, numbers and anything comparable."""
    import torch

    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for key in expected:
            _assert_close(f"{what}[{key!r}]", actual[key], expected[key], rtol, atol)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), what
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            _assert_close(f"{what}[{index}]", *pair, rtol, atol)
    elif isinstance(expected, Tensor | float):
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, equal_nan=False, msg=lambda m: f"{what}: {m}"
        )
    else:
        assert actual == expected, f"{what}: {actual!r} is not {expected!r}"
