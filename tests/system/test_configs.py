"""`train_lm.py --config`: the sample files train the same model on the same batches, whatever ranks share."""

import json
from pathlib import Path

import pytest

from tests.helpers.examples import EXAMPLES, TEXT, environment, metrics, run
from tests.helpers.scripts import run_script

CONFIGS = EXAMPLES / "train_lm/configs"
RANKS = {"fsdp": 2, "hsdp": 4, "fsdp_tp": 4, "fsdp_cp": 4}
STEPS = 4
OPTIONS = (
    "--device cpu --dim 32 --layers 2 --heads 4 --kv-heads 2 --hidden 64 --seq-len 32 --lr 1e-2 --warmup 2 "
    f"--steps {STEPS} --log-every 1 --eval-batches 2 --sample-bytes 4 --global-batch-size 8"
)
SHORT = [*TEXT, *OPTIONS.split()]
# Sums over ranks are made in other orders: float32 rounding, which some steps of training enlarge.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, no file."""
    folder = tmp_path_factory.mktemp("alone")
    job = run("train_lm/train_lm.py", *SHORT, "--out", folder, ranks=None)
    assert job.status == 0, job.errors
    return folder


def test_each_sample_file_has_a_test() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == RANKS.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RANKS)
def test_sample_files_train_the_same(name: str, alone: Path, tmp_path: Path) -> None:
    """The file says how many steps and how large a batch; the command line wins."""
    path = CONFIGS / f"{name}.toml"
    job = run("train_lm/train_lm.py", "--config", path, *SHORT, "--out", tmp_path, ranks=RANKS[name])
    assert job.status == 0, job.errors
    for key in ("loss", "valid_loss", "grad_norm"):
        mine, expected = metrics(tmp_path, key), metrics(alone, key)
        assert mine.keys() == expected.keys() and len(mine) >= 2
        assert list(mine.values()) == pytest.approx(list(expected.values()), rel=TOLERANCE)
    assert ("sample:" in job.output) == (name != "fsdp_cp")


PARSER = """
import json, sys
from dataclasses import asdict
from options import parse_options
from runtime import UsageError
try:
    print(json.dumps(asdict(parse_options(sys.argv[2:], int(sys.argv[1]))), default=str))
except UsageError as error:
    sys.exit(str(error))
"""


def parse(folder: Path, *arguments: str | Path, world_size: int = 4) -> tuple[int, str]:
    """The real parser, as a rank of a job calls it: exit status, and the options or the message."""
    script = folder / "parse.py"
    script.write_text(PARSER)
    there = {**environment(), "PYTHONPATH": f"{EXAMPLES}/train_lm:{environment()['PYTHONPATH']}"}
    job = run_script(script, str(world_size), *arguments, environment=there)
    return job.status, job.output if job.status == 0 else job.errors.strip()


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[parallel]\ntensor = 2\nmixed_precision = "bf16"\n\n'
        '[train]\nsteps = 7\nbatch-size = 3\ntied = true\ndata = ["a", "b"]\n'
    )
    status, output = parse(
        tmp_path, "--config", file, "--global-batch-size", "8", "--parallel", "tensor=1", "context=2"
    )
    assert status == 0, output
    options = json.loads(output)
    assert (options["steps"], options["batch_size"], options["tied"], options["data"]) == (7, 4, True, ["a", "b"])
    parallel = options["parallel"]
    assert (parallel["tensor"], parallel["context"], parallel["shard"]) == (1, 2, 2)
    assert parallel["mixed_precision"] == "bf16"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[parallel]\ntensr = 2\n", "[parallel]: unknown keys: tensr. The keys are"),
        ("[train]\nstep = 2\n", "[train]: unknown key 'step'; the keys are auto_resume, batch_size"),
        ("[trian]\nsteps = 2\n", "unknown trian; it has the tables [parallel] and [train]"),
        ("[train]\ntied = 1\n", "[train]: tied wants true or false, got 1"),
        ("[train]\nsteps = -1\n", "argument --steps: must be at least 1, got -1"),
        ("[parallel]\npipeline = 2\n", "train_lm.py has no pipeline stages"),
        ("[train]\nglobal-batch-size = 6\n", "--global-batch-size 6 does not divide into 4 rank(s)"),
    ],
)
def test_mistakes_in_the_file_are_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    status, output = parse(tmp_path, "--config", file)
    assert status != 0 and message in output, output
    assert "Traceback" not in output
