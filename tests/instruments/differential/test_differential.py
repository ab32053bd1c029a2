"""The differential fuzzer: fixed seeds in the protective tier, many in the exhaustive one."""

from pathlib import Path

import pytest

from tests.helpers.mutants import Mutant
from tests.helpers.parity_models import TORCH_VERSION
from tests.instruments.differential.generate import generate
from tests.instruments.differential.mutants import MISSED, find
from tests.instruments.differential.program import Program
from tests.instruments.differential.runner import run

FOUND = Path(__file__).parent / "found"
KINDS = ("", "between", "options")
FIRST = {"": 2_000_000, "between": 3_000_000, "options": 4_000_000}
NUM = {"": 100, "between": 60, "options": 80}  # on 2 ranks, and half as many on 4
SAMPLE = {2: range(12), 4: range(2)}  # ranks: seeds
MORE = {"between": (15, 32), "options": (13, 16, 20, 22)}  # stages and themes that the first seeds do not draw


needs_torchs = pytest.mark.skipif(
    TORCH_VERSION < (2, 13), reason="torch's own FSDP2 lacks setters and transforms that the programs use"
)


@needs_torchs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_fixed_seeds(num_ranks: int, kind: str) -> None:
    """torch's FSDP2, fsdp2 and one process agree after every action of these programs."""
    for seed in (*SAMPLE[num_ranks], *(MORE.get(kind, ()) if num_ranks == 2 else ())):
        _check(seed, num_ranks, kind)


def test_programs_are_data() -> None:
    """A program survives JSON, and a seed always gives the same one."""
    for seed in range(50):
        for kind in KINDS:
            program = generate(seed, 2, kind)
            assert Program.from_json(program.to_json()) == program == generate(seed, 2, kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_found_programs(path: Path) -> None:
    """Programs in which the fuzzer has found a fault of fsdp2."""
    result = run(Program.from_json(path.read_text()))
    assert result.kind == "same", result.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", MISSED, ids=lambda mutant: mutant.name)
def test_mutants_are_found(mutant: Mutant) -> None:
    """Faults put into the runtime on purpose, each with a program that differs on it and is the same without."""
    assert find(mutant)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_more_seeds(num_ranks: int, kind: str) -> None:
    """As `test_fixed_seeds`, more of them. `make fuzz-runtime` runs any number."""
    for seed in range(FIRST[kind], FIRST[kind] + NUM[kind] * 2 // num_ranks):
        _check(seed, num_ranks, kind)


def _check(seed: int, num_ranks: int, kind: str) -> None:
    result = run(generate(seed, num_ranks, kind))
    command = f"python -m tests.instruments.differential --seed {seed} --count 1 --ranks {num_ranks} --shrink 60"
    command += f" --kind {kind}" if kind else ""
    assert result.kind == "same", f"{command}: {result.text}"
