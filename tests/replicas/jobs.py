"""Replicas that a test may kill: forked, real gloo processes, each replica with a store and process groups of its own.

    with Jobs(folder, Config()) as jobs:
        first = jobs.start()            # a replica: its number
        jobs.wait(lambda: ...)          # looks at `jobs.lines(first)`
        jobs.kill(first, rank=1)

A process that has imported everything and started nothing forks the ranks. Each appends to ``NUMBER.RANK.jsonl`` what
became of each of its steps. When the file ``stop`` is there, all replicas end after the same step, and save what they
have.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from tests.helpers.ranks_pool import forking

MOST = 512  # replicas of a test
RANKS = 2


@dataclass(frozen=True)
class Config:
    """How replicas train.

    Attributes:
        meets_at: the address of the store, or of torchft's lighthouse.
        saves_every: steps between two checkpoints.
        variant: what else a step has.
    """

    meets_at: str = ""
    uses_torchft: bool = False
    patience_s: float = 0.6
    timeout_s: float = 3.0
    saves_every: int = 0
    variant: str = ""


def net(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(number: int, count: int, rank: int) -> torch.Tensor:
    """What a rank computes in the step that its replica begins at this count."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed((number * 10_007 + count) * RANKS + rank))


class Counter:
    """Something beside the model that goes on with each step."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


# --- in the test ------------------------------------------------------------------------------------------------------


class Jobs:
    """The launcher of all replicas."""

    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder, config
        self._stores: list[Any] = []
        self._ranks: list[list[int]] = []  # no pids, which others may get afterwards
        self._read: dict[tuple[int, int], tuple[int, list[Any]]] = {}
        self._connection, theirs = forking().Pipe()
        self._nursery = forking().Process(target=_tend, args=(theirs,), daemon=False)
        self._nursery.start()
        theirs.close()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for number, ranks in enumerate(self._ranks):
            self.kill(number)
            for descriptor in ranks:
                os.close(descriptor)
        self._connection.send(None)
        self._nursery.join(10)
        self._connection.close()

    def start(self) -> int:
        """Start a replica. Returns its number."""
        number = len(self._ranks)
        self._stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        for rank in range(RANKS):
            self._connection.send((self.folder, self.config, number, rank, self._stores[-1].port))
        self._ranks.append([os.pidfd_open(self._connection.recv()) for _ in range(RANKS)])
        return number

    def signal(self, number: int, rank: int, which: int) -> None:
        """Send a signal to one rank."""
        signal.pidfd_send_signal(self._ranks[number][rank], which)

    def kill(self, number: int) -> None:
        """As a launcher does with all ranks when one has died."""
        for rank in range(RANKS):
            with suppress(ProcessLookupError):
                self.signal(number, rank, signal.SIGKILL)

    def lines(self, number: int, rank: int = 0) -> list[Any]:
        """What a rank has said so far, one line a step."""
        path, (start, found) = self.folder / f"{number}.{rank}.jsonl", self._read.get((number, rank), (0, []))
        if path.exists():
            with path.open("rb") as file:
                file.seek(start)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            found = [*found, *map(json.loads, whole.splitlines())]
            self._read[number, rank] = start + len(whole), found
        return found

    def committed(self, number: int, rank: int = 0) -> list[Any]:
        return [line for line in self.lines(number, rank) if line["committed"]]

    def wait(self, condition: Callable[[], Any], limit_s: float = 30.0) -> Any:
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.005)
        return found

    def together(self, *numbers: int, steps: int = 2) -> None:
        """Wait until these replicas, and no others, have made so many more steps together."""
        starts = {number: len(self.lines(number)) for number in numbers}

        def all_have() -> bool:
            return all(
                sum(
                    [*map(int, line["who"])] == sorted(numbers) for line in self.committed(n) if line["at"] >= starts[n]
                )
                >= steps
                for n in numbers
            )

        self.wait(all_have)

    def stop(self, *numbers: int) -> list[list[Any]]:
        """End these replicas. Returns what each of their ranks has, by replica."""
        (self.folder / "stop").touch()
        files = [[self.folder / f"{number}.{rank}.pt" for rank in range(RANKS)] for number in numbers]
        self.wait(lambda: all(file.exists() for each in files for file in each))
        return [[torch.load(file) for file in each] for each in files]

    def report(self) -> str:
        parts = []
        for path in sorted(self.folder.glob("*.err")):
            lines = (self.folder / f"{path.stem}.jsonl").read_text().splitlines()[-3:]
            parts.append(f"{path.stem}: {' '.join(lines)}\n{path.read_text()[-1500:]}")
        return "\n".join(parts[-6:])


def check_equal(jobs: Jobs, first: int, second: int) -> list[Any]:
    """End these replicas: they are bit-equal. Returns what each rank of the first one has."""
    ends = jobs.stop(first, second)
    for one, other in zip(*ends, strict=True):
        assert one["step"] == other["step"]
        assert one["shards"].keys() == other["shards"].keys()
        assert all(torch.equal(value, other["shards"][name]) for name, value in one["shards"].items())
        for mine, theirs in zip(one["state"], other["state"], strict=True):
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    return ends[0]


def whole(ends: list[Any]) -> dict[str, torch.Tensor]:
    """Parameters from the shards of all ranks; with HSDP each rank has the whole."""
    return {
        name: param
        if (param := ends[0]["shards"][name]).shape == like.shape
        else torch.cat([each["shards"][name] for each in ends])
        for name, like in net(0).named_parameters()
    }


def replay(jobs: Jobs, number: int) -> list[dict[str, torch.Tensor]]:
    """The parameters after each step that this replica has, by its own and the others' words, in one process."""
    is_rich = jobs.config.variant in ("rich", "join")
    model: nn.Module = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    by_step: dict[int, Any] = {}
    for path in sorted(jobs.folder.glob("*.0.jsonl")):
        for line in jobs.committed(int(path.name.split(".")[0])):
            by_step.setdefault(line["step"], []).append(line)
    last = jobs.committed(number)[-1]["step"]
    assert sorted(step for step in by_step if step <= last) == [*range(1, last + 1)], "every step was made"
    found = [{name: param.detach().clone() for name, param in model.named_parameters()}]
    for step in range(1, last + 1):
        lines = by_step[step]
        assert all(line["who"] == lines[0]["who"] for line in lines), "two replicas made the same step differently"
        grads = []
        for who, count in lines[0]["who"].items():
            of_ranks = []
            for rank in range(RANKS):
                model.zero_grad()
                model(batch_of(int(who), count, rank)).square().mean().backward()
                of_ranks.append([param.grad for param in model.parameters()])
            grads.append([(a + b) / RANKS for a, b in zip(*of_ranks, strict=True)])
        for param, *own in zip(model.parameters(), *grads, strict=True):
            weights = [1 + int(who) % 2 if is_rich else 1 for who in lines[0]["who"]]
            param.grad = sum(grad * (weight / sum(weights)) for grad, weight in zip(own, weights, strict=True))
        if is_rich:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return found


# --- in the nursery, and in the ranks ---------------------------------------------------------------------------------


def _tend(connection: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    while True:
        job = connection.recv()
        if job is None:
            return
        pid = os.fork()
        if pid:
            connection.send(pid)
            continue
        connection.close()
        status = 1
        try:
            _train(*job)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)


def _train(folder: Path, config: Config, number: int, rank: int, port: int) -> None:
    os.dup2(os.open(folder / f"{number}.{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    log = os.open(folder / f"{number}.{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model, is_rich = net(number if number > 1 else 0), config.variant in ("rich", "join")
    if config.variant == "wide":
        model[0], model[2] = nn.Linear(5, 16), nn.Linear(16, 3)
    options: dict[str, Any] = {}
    if config.variant == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    if config.variant == "bf16":
        model = model.to(torch.bfloat16)
        options["mp_policy"] = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for unit in (model[0], model[2], model):
        fsdp2.fully_shard(unit, **options)
    params = list(model.parameters())
    optimizer: Any = torch.optim.AdamW(params, lr=0.01) if is_rich else None
    optimizer = optimizer or fsdp2.local_optimizer(torch.optim.AdamW, params, lr=0.01)
    counter, manager = Counter(), _manager(config, number, rank, port)
    replicas = fsdp2.Replicas(model, optimizer, manager, extra={"counter": counter})
    count = 0
    while True:
        count += 1
        replicas.begin(weight=1 + number % 2 if is_rich else 1)
        batch = batch_of(number, count, rank).to(params[0].dtype)
        if config.variant == "join":
            with fsdp2.join(model, total=4.0 * RANKS) as work:
                for part in work.each(batch.split(2 if rank else 4)):
                    work.backward(model(part).square().mean(), len(part))
        for part in batch.split(2 if is_rich else 4) if config.variant != "join" else ():
            (model(part).square().mean() * len(part) / 4).backward()
        who = torch.zeros(MOST, dtype=torch.float64)
        who[number], who[-1] = count, float((folder / "stop").exists())
        manager.allreduce(who, reduce_op=dist.ReduceOp.SUM).wait()
        committed = replicas.commit()
        if committed:
            if is_rich:
                fsdp2.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            counter.value += 1
            assert counter.value == replicas.step
        optimizer.zero_grad()
        names = {str(index): int(who[index]) for index in who[:-1].nonzero().flatten().tolist()} if committed else {}
        line = {"at": count - 1, "committed": committed, "step": replicas.step, "who": names}
        if committed and config.saves_every and replicas.step % config.saves_every == 0 and replicas.saves:
            fsdp2.checkpoint.save(folder / "run", model=model, optimizer=optimizer, step=replicas.step)
            line["saved"] = replicas.step
        os.write(log, (json.dumps(line) + "\n").encode())
        if committed and who[-1]:
            break
        time.sleep(0.002)
    shards = {name: param.to_local().detach() for name, param in model.named_parameters()}
    state = [
        {k: v.to_local() if hasattr(v, "to_local") else v for k, v in each.items()} for each in optimizer.state.values()
    ]
    torch.save({"shards": shards, "state": state, "step": replicas.step}, folder / f"{number}.{rank}.tmp")
    os.rename(folder / f"{number}.{rank}.tmp", folder / f"{number}.{rank}.pt")
    manager.shutdown()


def _manager(config: Config, number: int, rank: int, port: int) -> Any:
    if not config.uses_torchft:
        return fsdp2.ReplicaManager(config.meets_at, patience=config.patience_s, timeout=config.timeout_s)
    import torchft

    limit = timedelta(seconds=config.timeout_s)
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=limit,
        rank=rank,
        world_size=RANKS,
        store_addr="127.0.0.1",
        store_port=port,
        lighthouse_addr=config.meets_at,
        replica_id=f"replica{number}",
        init_sync=False,  # see docs/unequal.md
        hostname="127.0.0.1",
    )


class MeetingPlace:
    """The store, as users start it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "fsdp2.replicas", "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = re.search(r"\d+", self._process.stdout.readline())
        assert found is not None
        self.address = f"127.0.0.1:{found[0]}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def kill_some(jobs: Jobs, rounds: int, seed: int) -> tuple[int, int]:
    """Kill a random rank at a random point, so many times; each time a new replica comes. If they save checkpoints, it
    is one of the replica that does. Returns the two that are left."""
    chance = random.Random(seed)
    pair = [jobs.start(), jobs.start()]
    for _ in range(rounds):
        jobs.together(*pair)
        chance.shuffle(pair)
        if jobs.config.saves_every:
            pair.sort(
                key=lambda number: -max((line["step"] for line in jobs.lines(number) if "saved" in line), default=0)
            )
        dies, lives = pair
        before = jobs.lines(lives)
        time.sleep(chance.random() * 0.05)
        jobs.signal(dies, chance.randrange(RANKS), signal.SIGKILL)
        time.sleep(chance.random() * 0.2)
        jobs.kill(dies)
        pair = [lives, jobs.start()]
        jobs.together(*pair)
        for rank in range(RANKS):
            lost = [line for line in jobs.lines(lives, rank)[len(before) :] if not line["committed"]]
            assert len(lost) <= 1, f"the survivor lost {len(lost)} steps\n{jobs.report()}"
    return pair[0], pair[1]
