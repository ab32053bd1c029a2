"""The recipes of `examples/launch`, as far as one machine goes: two "machines" are two torchrun agents on loopback.

A rank that is killed, or a Slurm job that is requeued, goes on from its newest checkpoint, and ends in the parameters
and losses of an undisturbed run; with a machine less, in its losses, to rounding. Slurm's own commands are stood in for
by three short scripts, which do what Slurm does with processes; all that they start is real. The YAML files are parsed,
and all their command lines go through the real parsers of torchrun and of train_lm.py.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.helpers.examples import EXAMPLES, TEXT, metrics, shards
from tests.helpers.examples import environment as environment_of_examples
from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

LAUNCH = EXAMPLES / "launch"
TIMEOUT_S = 150
STEPS, SAVE_EVERY, GLOBAL_BATCH = 40, 5, 8
OPTIONS = (
    f"--device cpu --dim 32 --layers 2 --heads 2 --kv-heads 1 --hidden 64 --seq-len 32 --lr 1e-2 --warmup 5 "
    f"--global-batch-size {GLOBAL_BATCH} --steps {STEPS} --save-every {SAVE_EVERY} --eval-every 20 --eval-batches 2 "
    f"--log-every 1 --sample-bytes 0"
).split()
# A machine that has gone is missed after 2 s instead of 15; a round that could have more waits for them 5 s, not 30.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=5"


class Cluster:
    """Machines that are processes: each torchrun agent with its ranks is one, and all print into one pipe."""

    def __init__(self, **environment: str) -> None:
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        quick = {"RDZV_CONF": QUICK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
        self.environment = {**environment_of_examples(), "PATH": paths, **quick, **environment}
        self.output = ""
        self.machines: list[subprocess.Popen[bytes]] = []
        read, self._write = os.pipe()
        self._read = os.fdopen(read, errors="replace")
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._follow)
        self._reader.start()

    def _follow(self) -> None:
        with self._read:
            for line in self._read:
                with self._news:
                    self.output += line
                    self._news.notify_all()

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[bytes]:
        machine = subprocess.Popen(
            [str(word) for word in command],
            env={**self.environment, **environment},
            stdout=self._write,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.machines.append(machine)
        return machine

    def wait_for(self, pattern: str, behind: int = 0) -> re.Match[str]:
        """The first match in what the ranks print, behind so many characters of it."""
        found = re.compile(pattern)
        with self._news:
            came = self._news.wait_for(lambda: found.search(self.output, behind), TIMEOUT_S)
            assert came, f"no {pattern!r} in\n{self.output}"
            match = found.search(self.output, behind)
            assert match is not None
            return match

    def finish(self) -> list[int]:
        """The exit statuses of all machines, when all have ended."""
        statuses = [machine.wait(TIMEOUT_S) for machine in self.machines]
        self.end()
        return statuses

    def end(self) -> None:
        """Kill whatever still runs; all that was printed is in `output`."""
        for machine in self.machines:
            if machine.poll() is None:
                kill_machine(machine)
        if self._write != -1:
            os.close(self._write)
            self._write = -1
            self._reader.join(TIMEOUT_S)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The ranks of an agent, newest last."""
    return [
        int(child)
        for tasks in Path(f"/proc/{process.pid}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]


def kill_machine(machine: subprocess.Popen[bytes]) -> None:
    """As if its plug had been pulled: the agent first, or it would tell the others; its ranks after it."""
    ranks = workers_of(machine)
    machine.kill()
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    machine.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def recipe(nodes: str, port: int, out: Path, *more: str) -> list[str | Path]:
    return [LAUNCH / "multi_node.sh", nodes, f"127.0.0.1:{port}", *OPTIONS, *TEXT, "--out", out, *more]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(NPROC="1")
    yield made
    made.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to: two ranks on one machine."""
    folder = tmp_path_factory.mktemp("whole")
    cluster = Cluster(NPROC="2")
    cluster.start(*recipe("1", free_port(), folder))
    assert cluster.finish() == [0], cluster.output
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    """To the last bit: parameters and optimizer state of both ranks, and every loss on the way."""
    assert shards(folder, STEPS) == shards(whole, STEPS)
    for key in ("loss", "valid_loss", "grad_norm"):
        assert metrics(folder, key) == metrics(whole, key)
    assert list(metrics(folder, "loss")) == list(range(1, STEPS + 1))


# --- torchrun on several machines -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_killed_rank_is_started_again_and_goes_on(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    """SIGKILL to one rank: the other one fails in its next collective, both agents start theirs again."""
    command, out = recipe("2", free_port(), tmp_path / "out"), tmp_path / "out"
    machines = [cluster.start(*command) for _ in range(2)]
    cluster.wait_for(f"saving .*step-{2 * SAVE_EVERY:08d}")
    os.kill(workers_of(machines[1])[-1], signal.SIGKILL)
    assert cluster.finish() == [0, 0], cluster.output
    assert re.search(r"going on from .*/step-000000(05|10|15)\n", cluster.output), cluster.output
    assert_same_run(out, whole)


@pytest.mark.exhaustive
def test_with_a_machine_less(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    """Two machines of two ranks; one goes for good. Its shards are read by the two ranks that are left, and the batch
    stays what it was: losses are those of any other number of ranks, to rounding."""
    command, out = recipe("1:2", free_port(), tmp_path / "out"), tmp_path / "out"
    cluster.start(*command, NPROC="2", RDZV_CONF=f"{QUICK},is_host=1")
    goes = cluster.start(*command, NPROC="2", RDZV_CONF=f"{QUICK},is_host=0")
    cluster.wait_for("= 4 ranks x 1 microbatches x 2 sequences")
    cluster.wait_for(f"saving .*step-{2 * SAVE_EVERY:08d}")
    kill_machine(goes)
    fewer = cluster.wait_for("= 2 ranks x 1 microbatches x 4 sequences", behind=len(cluster.output))
    cluster.wait_for(r"going on from .*/step-000000(05|10|15)\n", behind=fewer.end())
    assert cluster.finish() == [0, -signal.SIGKILL], cluster.output
    assert len({name.split("-")[2] for name in shards(out, SAVE_EVERY) if name.startswith("model")}) == 4
    assert len({name.split("-")[2] for name in shards(out, STEPS) if name.startswith("model")}) == 2
    assert list(metrics(out, "loss").values()) == pytest.approx(list(metrics(whole, "loss").values()), rel=1e-3)


# --- Slurm ------------------------------------------------------------------------------------------------------------

# What the script asks of Slurm, by processes on this machine. `srun` starts the command once a node; `scancel` signals
# the steps and not the script; `scontrol requeue` notes that it was asked.
STAND_INS = {
    "srun": """
        for node in $(seq $SLURM_JOB_NUM_NODES); do
            SLURM_NODEID=$((node - 1)) SLURM_PROCID=$((node - 1)) "$@" & echo $! >> "$SLURM_STAND_IN/steps"
        done
        status=0
        for task in $(cat "$SLURM_STAND_IN/steps"); do wait $task || status=$?; done
        exit $status
    """,
    "scontrol": """
        if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' ${3//,/ }; exit; fi
        if [ "$1" = requeue ] && [ "$2" = "$SLURM_JOB_ID" ]; then echo "$2" >> "$SLURM_STAND_IN/requeued"; exit; fi
        exit 1
    """,
    "scancel": """
        [ "$1 $2" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM $(cat "$SLURM_STAND_IN/steps")
    """,
}


def slurm(folder: Path, restarts: int) -> dict[str, str]:
    """The environment that Slurm gives a batch script, with the stand-ins first on the PATH."""
    stand_ins = folder / f"slurm-{restarts}"
    stand_ins.mkdir()
    for name, script in STAND_INS.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{script}")
        (stand_ins / name).chmod(0o755)
    return {
        "PATH": os.pathsep.join([str(stand_ins), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_STAND_IN": str(stand_ins),
        "SLURM_JOB_ID": str(free_port() % 10000),  # the script makes a port of it
        "SLURM_JOB_NODELIST": "127.0.0.1,localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


@pytest.mark.exhaustive
def test_slurm_saves_and_queues_again_before_the_time_is_over(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    command, out = [LAUNCH / "slurm.sh", *OPTIONS, *TEXT, "--out", tmp_path / "out"], tmp_path / "out"
    script = cluster.start("bash", *command, **slurm(tmp_path, 0))
    cluster.wait_for(f"saving .*step-{SAVE_EVERY:08d}")
    script.send_signal(signal.SIGUSR1)
    stopped = cluster.wait_for(r"stopped after step (\d+)")
    script.wait(TIMEOUT_S)
    cluster.wait_for(r"asked to stop(.|\n)*queued again")
    assert (tmp_path / "slurm-0" / "requeued").is_file()

    cluster.start("bash", *command, **slurm(tmp_path, 1))
    assert cluster.finish()[-1] == 0, cluster.output
    assert f"going on from {out}/checkpoints/step-{int(stopped[1]):08d}\n" in cluster.output
    assert not (tmp_path / "slurm-1" / "requeued").exists()
    assert_same_run(out, whole)


# --- what is written in the files -------------------------------------------------------------------------------------

SCRIPTS = {"train_lm.py": 0, "multi_node.sh": 2, "slurm.sh": 0, "ray_train.py": 0}  # words that come before the options


def logical_lines(path: Path) -> Iterator[str]:
    """The command lines of a script, a document's code blocks, a docstring, or a YAML file's strings."""
    if path.suffix == ".yaml":
        yaml = pytest.importorskip("yaml")
        for document in yaml.safe_load_all(path.read_text()):
            yield from strings_of(document)
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    for line in text.splitlines():
        yield re.sub(r"^#?\s+", "", line)


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from value.splitlines()
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_of(item)


def commands_in(path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """(the words before, the words behind) each script that is started; comments and placeholders are left out."""
    for line in logical_lines(path):
        if not re.match(r"(exec |srun |sbatch |torchrun |python |examples/|[A-Z_]+=\S* )", line):
            continue
        words = shlex.split(
            line.replace("[options of train_lm.py]", "").replace("[more options of train_lm.py]", ""), True
        )
        words = [word for word in words if word not in ("$@", "&", "${meet[@]}")]
        for number, word in enumerate(words):
            name = Path(word).name
            if name in SCRIPTS:
                behind = words[number + 1 + SCRIPTS[name] :]
                yield words[:number], behind[behind.index("--") + 1 :] if "--" in behind else behind


FILES = [*sorted(path for path in LAUNCH.iterdir() if path.is_file()), ROOT / "docs" / "launching.md"]


def test_all_command_lines_are_valid(tmp_path: Path) -> None:
    """torchrun's and train_lm.py's own parsers take them; the world is one of 16 ranks."""
    found = {path.name: list(commands_in(path)) for path in FILES}
    assert all(found.values()), {name: len(commands) for name, commands in found.items()}
    for before in (before for commands in found.values() for before, _ in commands if "torchrun" in before):
        get_args_parser().parse_args([*before[before.index("torchrun") + 1 :], "train_lm.py"])
    behind = [words for commands in found.values() for _, words in commands]
    script = tmp_path / "parse.py"
    script.write_text(
        "import sys, json, options\nfor words in json.loads(sys.argv[1]): options.parse_options(words, 16)"
    )
    variables = {**environment_of_examples(), "PYTHONPATH": f"{EXAMPLES}/train_lm:{ROOT}"}
    job = run_script(script, json.dumps(behind), cwd=EXAMPLES / "train_lm", environment=variables)
    assert job.status == 0, f"{job.errors[-500:]}\n{behind}"


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_bash(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).stderr == b""
    assert os.access(path, os.X_OK)
