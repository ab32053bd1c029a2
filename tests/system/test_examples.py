"""The examples as a user starts them: jobs of two ranks on tiny settings, judged by what they leave.

Three runs carry most of the tests: `whole` trains to the end, `stopped` is the same command interrupted by SIGINT, and
`resumed` goes on from there. Jobs that are interrupted or killed, and one of each other kind, are started by torchrun;
the others by `scripts.run_script`, which spares the import of torch.
"""

import json
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.run import parse_args

from tests.helpers.examples import (
    EXAMPLES,
    TEXT,
    TIMEOUT_SECONDS,
    command,
    finish,
    metrics,
    run,
    shards,
    start,
    torchrun,
)
from tests.helpers.scripts import Finished

STEPS, SAVE_EVERY = 120, 20
TINY = (
    f"--device cpu --dim 32 --layers 2 --heads 2 --kv-heads 1 --hidden 64 --seq-len 32 --batch-size 4 --lr 1e-2 "
    f"--warmup 5 --steps {STEPS} --save-every {SAVE_EVERY} --eval-every 40 --eval-batches 2 --sample-bytes 8"
).split()


def ranks_of(tensors: dict[str, bytes]) -> set[str]:
    """The ranks that have weights among the tensors of a checkpoint."""
    return {name.split("-")[2] for name in tensors if name.startswith("model-rank-")}


def first_losses(folder: Path) -> list[float]:
    return list(metrics(folder, "loss").values())[:5]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run to the end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, torchrun("train_lm/train_lm.py", *TINY, *TEXT, "--out", folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The same command, with SIGINT sent to torchrun (as Ctrl-C in a terminal does) after the first checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start(command("train_lm/train_lm.py", *TINY, *TEXT, "--out", folder))
    assert process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_SECONDS, process.terminate)
    watchdog.start()
    seen = ""
    for line in process.stdout:
        seen += line
        if "saving" in line:
            process.send_signal(signal.SIGINT)
            break
    watchdog.cancel()
    rest = finish(process)
    return folder, Finished(rest.status, seen + rest.output, rest.errors)


@pytest.fixture(scope="module")
def resumed(stopped: tuple[Path, Finished]) -> tuple[Path, Finished]:
    """The stopped run, gone on from its newest checkpoint, with the remains of an interrupted save beside that."""
    folder, _ = stopped
    partial = folder / "checkpoints" / f".tmp-step-{STEPS:08d}-0123456789ab"
    partial.mkdir()
    (partial / "model-rank-00000-of-00002.safetensors").write_bytes(b"cut off")
    (folder / "checkpoints" / "step-00000119").mkdir()  # nor is a folder complete because of its name
    return folder, run("train_lm/train_lm.py", *TINY, *TEXT, "--out", folder, "--resume")


def test_training_succeeds_and_lowers_the_loss(whole: tuple[Path, Finished]) -> None:
    folder, job = whole
    assert job.status == 0, job.errors
    assert "34,976 parameters, 17,488 of them on this rank" in job.output and "sample:\ndef " in job.output
    assert "256 bytes = 2 ranks x 1 microbatches x 4 sequences x 32" in job.output
    losses = metrics(folder, "valid_loss")
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)  # it starts by guessing evenly among 256 bytes
    assert losses[STEPS] < losses[40] < 4.0
    assert losses[STEPS] < 3.2


def test_metrics_plot_and_checkpoints_are_written(whole: tuple[Path, Finished]) -> None:
    folder, _ = whole
    assert list(metrics(folder, "loss")) == list(range(10, STEPS + 1, 10))
    for key in ("grad_norm", "lr", "tokens_per_second", "peak_memory_bytes"):
        assert all(value > 0 for value in metrics(folder, key).values())
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    assert ranks_of(shards(folder, STEPS)) == {"00000", "00001"}


def test_torchrun_leaves_the_options_of_examples_alone() -> None:
    """It reads beginnings of its own options behind the script too: with ``--monitor`` no job began."""
    options = {each for path in EXAMPLES.rglob("*.py") for each in re.findall(r'"(--[a-z][a-z-]+)"', path.read_text())}
    assert {"--keep", "--plan", "--steps"} <= options
    for option in sorted(options):
        assert parse_args(["script.py", option, "value"]).training_script_args == [option, "value"]


@pytest.mark.exhaustive
def test_all_sharding_options_together(tmp_path: Path) -> None:
    options = "--hsdp 2 --bf16 --grad-accum 2 --activation-checkpointing --reshard-after-forward true --tied --steps 20"
    options += " --save-every 5 --keep 2"
    job = run("train_lm/train_lm.py", *TINY, *TEXT, "--out", tmp_path, *options.split())
    assert job.status == 0, job.errors
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000015", "step-00000020"]
    assert metrics(tmp_path, "valid_loss")[20] < 4.0


@pytest.mark.exhaustive
def test_offload_trains_the_same_model(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    """The step of a unit as one tensor rounds other elements in its way than that of each parameter: the last bit."""
    folder, _ = whole
    job = run("train_lm/train_lm.py", *TINY, *TEXT, "--out", tmp_path, "--offload", "all", "--sample-bytes", "0")
    assert job.status == 0, job.errors
    assert "offload=all" in job.output
    assert first_losses(tmp_path) == pytest.approx(first_losses(folder), rel=1e-3)
    refused = run("train_lm/train_lm.py", *TINY, *TEXT, "--out", tmp_path, "--offload", "all", "--optimizer", "muon")
    assert refused.status != 0 and "--offload all is for --optimizer adamw" in refused.errors


@pytest.mark.exhaustive
def test_sigint_ends_all_ranks_with_a_checkpoint(stopped: tuple[Path, Finished]) -> None:
    folder, job = stopped
    assert "sample:" not in job.output
    assert str(EXAMPLES) not in job.errors  # torchrun reports its own interruption; no rank shows a traceback
    assert "exitcode" not in job.errors and "SIGKILL" not in job.errors
    found = re.search(r"stopped after step (\d+)\nto go on, .* --resume (.+)\n", job.output)
    assert found is not None, job.output
    step, newest = int(found[1]), Path(found[2])
    assert SAVE_EVERY <= step < STEPS
    assert newest == folder / "checkpoints" / f"step-{step:08d}"
    assert (newest / "checkpoint.json").is_file()


@pytest.mark.exhaustive
def test_resuming_ends_in_the_parameters_of_an_uninterrupted_run(
    whole: tuple[Path, Finished], resumed: tuple[Path, Finished]
) -> None:
    folder, job = resumed
    assert job.status == 0, job.errors
    assert "going on from" in job.output and "note:" not in job.output
    assert ranks_of(shards(folder, STEPS)) == {"00000", "00001"}
    assert shards(folder, STEPS) == shards(whole[0], STEPS)
    assert not list((folder / "checkpoints").glob(".tmp-*"))  # a later save of that step swept the dead one
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert metrics(folder, "valid_loss") == metrics(whole[0], "valid_loss")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/no/such/text"], "cannot read --data /no/such/text: No such file or directory"),
        ([*TEXT, "--seq-len", "4000"], "too little data: the validation side has"),
        ([*TEXT, "--hsdp", "3"], "--hsdp 3 replicas do not divide the 2 rank(s) of this job"),
    ],
    ids=["missing data", "too little data", "hsdp"],
)
def test_bad_input_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    job = run("train_lm/train_lm.py", *TINY, *arguments, "--out", tmp_path / "out")
    assert_one_message(job, message)
    assert job.status == 2
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_another_model_is_one_message(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    job = run("train_lm/train_lm.py", *TINY, *TEXT, "--out", tmp_path, "--resume", whole[0], "--layers", "3", "--tied")
    assert job.status == 2
    assert_one_message(job, "is a checkpoint of another model: layers is 2 there and 3 here; tied is False there")


def assert_one_message(job: Finished, message: str) -> None:
    assert job.status != 0
    assert job.output == ""
    assert [line for line in job.errors.splitlines() if line.startswith("error: ") and message in line], job.errors
    assert job.errors.count("error: ") == 1
    assert str(EXAMPLES / "train_lm/train_lm.py") + '"' not in job.errors  # no traceback into the example


@pytest.mark.parametrize("ranks", [2, None])
def test_minimal_learns(ranks: int | None) -> None:
    job = run("minimal.py", ranks=ranks)
    assert job.status == 0, job.errors
    losses = [float(line.split()[-1]) for line in job.output.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


def test_minimal_is_short() -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 60
