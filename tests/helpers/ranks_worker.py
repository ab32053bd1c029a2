"""One rank of a pool, a process: loads test modules, runs bodies, reports. See `ranks_pool.py`."""

import faulthandler
import gc
import importlib
import importlib.util
import marshal
import os
import queue
import signal
import sys
import threading
import traceback
import types
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.helpers.meshes import forget_meshes

# Warnings are errors in test bodies, except these, which torch itself causes.
IGNORED_WARNINGS = (
    r".*TF32.*",
    r".*torch\.jit.*deprecated.*",
    r".*pin_memory.*no accelerator.*",
    r".*_get_pg_default_device.*",
    r".*barrier\(\).*device.*",
    r".*TypedStorage is deprecated.*",
    r".*Profiler clears events.*",  # torch 2.12, for schedules that have one cycle
    r"DTensor random operators may not have complete support on cpu device mesh",
)

KEPT_GROUPS = 100

RACES = "TESTS_UNDER_RACES"  # in the environment: bodies run under the race detector


@dataclass(frozen=True)
class Job:
    """What to call, by names, so that it pickles whatever the test module holds.

    Attributes:
        code: of the module, marshalled; empty if the pool has it already.
    """

    module: str
    path: str
    code: bytes
    qualname: str
    params: bytes


@dataclass(frozen=True)
class Answer:
    """How a body ended. kind: "ok" (payload: pickled result), "failed" or "skipped" (text)."""

    kind: str
    payload: bytes = b""
    text: str = ""


@dataclass(frozen=True)
class WorkerConfig:
    rank: int
    world_size: int
    store_port: int
    stacks_path: str
    device: str


def serve(config: WorkerConfig, connection: Connection) -> None:
    """Process entry: join the group, then answer jobs until the pool goes away."""
    import pickle

    stacks = open(config.stacks_path, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(config.rank), WORLD_SIZE=str(config.world_size), LOCAL_RANK=str(config.rank))
    jobs = _read_jobs(connection)
    store = dist.TCPStore("127.0.0.1", config.store_port, is_master=False)
    timeout = timedelta(hours=1)  # the pool watches the clock
    backends = "gloo"
    if config.device:
        module = importlib.import_module(config.device)
        module.register()
        backends = module.BACKENDS
    _share_one_gloo_device()
    dist.init_process_group(backends, store=store, rank=config.rank, world_size=config.world_size, timeout=timeout)
    gc.freeze()
    connection.send_bytes(pickle.dumps(Answer("ok")))
    while True:
        answer = _run(jobs.get(), config)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(answer))
        if answer.kind != "failed":  # a failed rank takes part in nothing more; the pool will end
            connection.send_bytes(pickle.dumps(_settle()))


def _share_one_gloo_device() -> None:
    """All of a worker's groups listen in one thread. By default each has a device of its own, whose thread wakes a
    hundred times a second, and a session's pools with their groups come to hundreds of them."""

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
        ) -> None:
            assert not enable_reconfigure  # the argument is new in torch 2.14
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    device = dist.ProcessGroupGloo.create_default_device()
    dist.distributed_c10d.ProcessGroupGloo = OnOneDevice


def _read_jobs(connection: Connection) -> queue.SimpleQueue[Job]:
    """Read jobs in a thread, which also ends the process, stuck or not, when the pool closes its end."""
    import pickle

    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                jobs.put(pickle.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=read, daemon=True, name="read-jobs").start()
    return jobs


def _run(job: Job, config: WorkerConfig) -> Answer:
    import pickle

    from _pytest.monkeypatch import MonkeyPatch
    from _pytest.outcomes import Skipped

    try:
        body: Any = _load(job)
        for name in job.qualname.split("."):
            body = getattr(body, name)
        body = getattr(body, "rank_body", body)
        _reset_torch()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for pattern in IGNORED_WARNINGS:
                warnings.filterwarnings("ignore", message=pattern)
            params = pickle.loads(job.params)
            try:
                with _detecting():
                    result = pickle.dumps(body(config.rank, config.world_size, **params))
            finally:
                for value in params.values():
                    if isinstance(value, MonkeyPatch):  # pytest undoes its own copy, in which nothing was patched
                        value.undo()
    except Skipped as skip:
        return Answer("skipped", text=str(skip.msg))
    except BaseException as error:
        return Answer("failed", text=_format(error, job.path))
    return Answer("ok", payload=result)


def _detecting() -> AbstractContextManager[object]:
    """With `pytest --races`, the detector."""
    if RACES not in os.environ:
        return nullcontext()
    from tests.instruments.races.detector import detecting

    return detecting()


def _settle() -> Answer:
    """Between bodies: free what the last one left, and see that the ranks agree on the collectives so far."""
    try:
        _reset_torch()
        gc.collect()
        dist.barrier()
        _destroy_groups()
    except BaseException as error:
        text = f"The body passed but left the process group unusable:\n{_format(error, '')}"
        return Answer("failed", text=text)
    return Answer("ok")


def _destroy_groups() -> None:
    """If there are many groups, destroy all but the default one: each has threads and connections."""
    made = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if len(made) <= KEPT_GROUPS:
        return
    # Workers are forked before the package is imported.
    from fsdp2.extras import groups, smaller, zero
    from fsdp2.parallel import meshes

    known: list[Any] = [groups._separate, smaller._meshes, zero._meshes, meshes._known]
    for each in known:
        each.clear()
    forget_meshes()
    _clear_sharding_prop_cache()  # its meshes are used again for tensors on equal ones
    for group in made:
        dist.destroy_process_group(group)


def _reset_torch() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def _format(error: BaseException, path: str) -> str:
    """The traceback from the test module on; the harness' own frames say nothing."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__)).rstrip()


def _load(job: Job) -> types.ModuleType:
    """A module of tests, or of helpers that another one has imported. The first job that needs it brings its code."""
    loaded = sys.modules.get(job.module)
    if loaded is not None and getattr(loaded, "__file__", None) == job.path:
        return loaded
    spec = importlib.util.spec_from_file_location(job.module, job.path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    exec(marshal.loads(job.code), module.__dict__)
    gc.freeze()
    return module
