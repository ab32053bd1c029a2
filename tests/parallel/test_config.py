"""`ParallelConfig`: values, files, and the arithmetic of ranks. Pure."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2.errors import ArgumentError, OrderError
from fsdp2.parallel import ParallelConfig
from tests.helpers.models import error_of


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- values -----------------------------------------------------------------------------------------------------------


NUMBER = "expected a number of ranks, 1 or more"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor": 0}, f"tensor: {NUMBER}; got 0"),
        ({"replicate": True}, f"replicate: {NUMBER}; got True"),
        ({"shard": "all"}, f"shard: {NUMBER}, or \"auto\"; got 'all'"),
        ({"activation_checkpointing": -1}, "activation_checkpointing: expected"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward: expected true, false or a number of ranks; got 'no'"),
        ({"mixed_precision": "fp8"}, 'mixed_precision: expected one of "no", "bf16", "fp16"; got \'fp8\''),
        ({"cpu_offload": 1}, "cpu_offload: expected true or false; got 1"),
        ({"offload": "some"}, "offload: expected one of 'none', 'states', 'gradients', 'all', 'files'; got 'some'"),
        ({"offload": "all", "cpu_offload": True}, 'offload: got "all", and cpu_offload'),
        ({"offload_tier": "/disk"}, 'offload_tier: got "/disk", but offload is "none"; set offload too'),
        ({"blocks": ("",)}, "blocks: expected names of classes or modules; got ('',)"),
    ],
)
def test_unfit_values_are_named(values: dict[str, Any], message: str) -> None:
    assert error_of(ArgumentError, lambda: ParallelConfig(**values)).startswith(message)


def test_minus_one_is_auto() -> None:
    assert ParallelConfig(shard=-1) == ParallelConfig() and ParallelConfig(shard=-1).shard == "auto"


@pytest.mark.parametrize(
    ("value", "every"), [("none", 0), ("full", 1), ("selective", 2), (0, 0), (3, 3), (False, 0), (True, 1)]
)
def test_checkpoint_every(value: Any, every: int) -> None:
    assert ParallelConfig(activation_checkpointing=value).checkpoint_every == every


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        ({"shard": 1}, 2, "2 ranks, but 1 (shard). Change a degree, or start 1 rank."),
        (
            {"replicate": 2, "shard": 2, "tensor": 3},
            8,
            "8 ranks, but 2 (replicate) x 2 (shard) x 3 (tensor) = 12. Change a degree, or start 12 ranks.",
        ),
        ({"replicate": 2, "tensor": 3}, 8, "8 ranks, but 2 (replicate) x 3 (tensor) = 6, so nothing whole is left for"),
    ],
)
def test_the_error_does_the_arithmetic(degrees: dict[str, int], world_size: int, message: str) -> None:
    assert error_of(ArgumentError, lambda: ParallelConfig(**degrees).resolve(world_size)).startswith(message)


def test_what_needs_a_number_for_shard() -> None:
    assert "call resolve(world_size) first" in error_of(OrderError, lambda: ParallelConfig().data_ranks)
    degrees = {"pipeline": 1, "replicate": 1, "shard": 3, "context": 1, "tensor": 2}
    assert ParallelConfig(tensor=2).resolve(6).degrees == degrees


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_section_or_the_whole_file(tmp_path: Path) -> None:
    expected = ParallelConfig(replicate=2, shard=4)
    for name, text in (
        ("ours.toml", "[parallel]\nreplicate = 2\nshard = 4\n\n[train]\nsteps = 10\n"),
        ("flat.toml", "replicate = 2\nshard = 4\n"),
        ("ours.yml", "parallel: {replicate: 2, shard: 4}\ntrain: {steps: 10}\n"),
    ):
        assert ParallelConfig.load(written(tmp_path, name, text)) == expected
    path = written(tmp_path, "a.toml", "[small]\ntensor = 2\n[large]\ntensor = 4\n")
    assert ParallelConfig.load(path, section="large").tensor == 4
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path, section="huge"))
    assert error == f"{path}: has no section 'huge'; it has small, large"


def test_all_keys(tmp_path: Path) -> None:
    expected = ParallelConfig(
        pipeline=2,
        activation_checkpointing=2,
        compile="aot_eager",
        reshard_after_forward=False,
        mixed_precision="bf16",
        cpu_offload=True,
        blocks=("Block", "layers.*"),
    )
    toml = (
        'shard = -1\npipeline = 2\nactivation_checkpointing = "selective"\ncompile = "aot_eager"\n'
        'reshard_after_forward = false\nmixed_precision = "bf16"\ncpu_offload = true\nblocks = ["Block", "layers.*"]\n'
    )
    loaded = ParallelConfig.load(written(tmp_path, "a.toml", toml))
    assert loaded == ParallelConfig(**{**vars(expected), "activation_checkpointing": "selective"})
    yaml = (
        "shard: auto\npipeline: 2\nactivation_checkpointing: 2\ncompile: aot_eager\nreshard_after_forward: false\n"
        "mixed_precision: bf16\ncpu_offload: true\nblocks: [Block, layers.*]\n"
    )
    assert ParallelConfig.load(written(tmp_path, "a.yaml", yaml)) == expected


def test_what_only_a_file_says(tmp_path: Path) -> None:
    yaml = "mixed_precision: no\nreshard_after_forward: auto\nblocks: Block\ntensor:\n"
    assert ParallelConfig.load(written(tmp_path, "a.yaml", yaml)) == ParallelConfig(blocks=("Block",))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "tensr = 2\nsteps = 1\n", ": unknown keys: tensr, steps. The keys are replicate, shard, tensor,"),
        ("a.yaml", "parallel: {tp_size: 2}", " [parallel]: unknown keys: tp_size. The keys are"),
        ("a.toml", "tensor = 2\ntensor = 4\n", "is not TOML: "),
        ("a.yaml", "tensor: [2\n", "is not YAML: "),
        ("a.yaml", "- 2\n", "expected keys and values, got list"),
        ("a.yaml", "", "expected keys and values, got NoneType"),
        ("a.toml", "[parallel]\ntensor = 0\n", " [parallel]: tensor: expected a number of ranks, 1 or more; got 0"),
        ("a.toml", 'shard = "some"\n', ": shard: expected a number of ranks, 1 or more, or \"auto\"; got 'some'"),
        ("a.json", "{}", "expected a file that ends in .toml, .yaml or .yml"),
    ],
)
def test_bad_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path))
    assert error.startswith(str(path)) and message in error, error


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.yaml", "tensor: 2\n")
    monkeypatch.setitem(sys.modules, "yaml", None)  # what an import finds where there is no such package
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path))
    assert error.startswith(f'{path}: reading YAML needs PyYAML: pip install "fsdp2[yaml]"')
