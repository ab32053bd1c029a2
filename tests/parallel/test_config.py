"""`ParallelConfig`: values, files in the dialects of several tools, and the arithmetic of ranks. Pure."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2.errors import ArgumentError, OrderError, UnsupportedError
from fsdp2.parallel import ParallelConfig
from tests.helpers.models import error_of


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor": 0}, "tensor: expected a number of ranks, 1 or more; got 0"),
        ({"replicate": True}, "replicate: expected a number of ranks, 1 or more; got True"),
        ({"context": "2"}, "context: expected a number of ranks, 1 or more; got '2'"),
        ({"shard": "all"}, "shard: expected a number of ranks, 1 or more, or \"auto\"; got 'all'"),
        ({"shard": -2}, 'shard: expected a number of ranks, 1 or more, or "auto"; got -2'),
        ({"activation_checkpointing": "some"}, "activation_checkpointing: expected"),
        ({"activation_checkpointing": -1}, "activation_checkpointing: expected"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward: expected true, false or a number of ranks; got 'no'"),
        ({"mixed_precision": "fp8"}, 'mixed_precision: expected one of "no", "bf16", "fp16"; got \'fp8\''),
        ({"compile": ""}, "compile: expected true, false or the name of a backend; got ''"),
        ({"cpu_offload": 1}, "cpu_offload: expected true or false; got 1"),
        ({"offload": "some"}, "offload: expected one of 'none', 'states', 'gradients', 'all', 'files'; got 'some'"),
        ({"offload": "all", "cpu_offload": True}, 'offload: got "all", and cpu_offload'),
        ({"offload_tier": 1, "offload": "all"}, 'offload_tier: expected "cpu", a folder or a list of folders; got 1'),
        (
            {"offload_tier": ["/disk", 2], "offload": "all"},
            "offload_tier: expected \"cpu\", a folder or a list of folders; got ['/disk', 2]",
        ),
        ({"offload": "files"}, 'offload: got "files" without a folder for them; set offload_tier = "/a/fast/disk"'),
        ({"offload_tier": "/disk"}, 'offload_tier: got "/disk", but offload is "none"; set offload too'),
        ({"blocks": ("",)}, "blocks: expected names of classes or modules; got ('',)"),
        ({"blocks": {"a": 1}}, "blocks: expected names of classes or modules; got {'a': 1}"),
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
        (
            {"replicate": 2, "shard": 2, "tensor": 3},
            8,
            "8 ranks, but 2 (replicate) x 2 (shard) x 3 (tensor) = 12. Change a degree, or start 12 ranks.",
        ),
        ({"shard": 1}, 2, "2 ranks, but 1 (shard). Change a degree, or start 1 rank."),
        ({"shard": 1, "tensor": 2}, 1, "1 rank, but 2 (tensor). Change a degree, or start 2 ranks."),
        (
            {"replicate": 2, "tensor": 3},
            8,
            '8 ranks, but 2 (replicate) x 3 (tensor) = 6, so nothing whole is left for shard = "auto". Change a '
            "degree, or start 6 ranks, or a multiple of that.",
        ),
    ],
)
def test_the_error_does_the_arithmetic(degrees: dict[str, int], world_size: int, message: str) -> None:
    assert error_of(ArgumentError, lambda: ParallelConfig(**degrees).resolve(world_size)) == message


def test_coordinates_count_all_ranks_once() -> None:
    config = ParallelConfig(replicate=2, shard=3, tensor=2, context=2, pipeline=2).resolve(48)
    places = [tuple(config.coordinates(rank).values()) for rank in range(48)]
    assert places == list(itertools.product(range(2), range(2), range(3), range(2), range(2)))
    assert error_of(ArgumentError, lambda: config.coordinates(48)) == "rank: expected 0 to 47, got 48"


def test_ranks_that_share_data() -> None:
    config = ParallelConfig(replicate=2, shard=2, tensor=2, context=2, pipeline=2).resolve(32)
    assert config.data_ranks == 4
    for rank in range(32):
        place = config.coordinates(rank)
        assert config.data_rank(rank) == 2 * place["replicate"] + place["shard"]


def test_what_needs_a_number_for_shard() -> None:
    assert "call resolve(world_size) first" in error_of(OrderError, lambda: ParallelConfig().data_ranks)
    assert ParallelConfig(tensor=2).resolve(6).degrees == {
        "pipeline": 1,
        "replicate": 1,
        "shard": 3,
        "context": 1,
        "tensor": 2,
    }


# --- files ------------------------------------------------------------------------------------------------------------

EXPECTED = ParallelConfig(replicate=2, shard=4, tensor=2, context=2)

DIALECTS = {
    "ours.toml": "[parallel]\nreplicate = 2\nshard = 4\ntensor = 2\ncontext = 2\n\n[train]\nsteps = 10\n",
    "flat.toml": "replicate = 2\nshard = 4\ntensor = 2\ncontext = 2\n",
    "ours.yaml": "parallel: {replicate: 2, shard: 4, tensor: 2, context: 2}\n",
    "accelerate.yaml": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 32
parallelism_config:
  parallelism_config_cp_size: 2
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
""",
    "axolotl.yml": "dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 2\n"
    "expert_parallel_size: 1\nsequence_parallel_degree:\n",
    "torchtitan.toml": """
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
context_parallel_degree = 2
pipeline_parallel_degree = 1
""",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects(name: str, tmp_path: Path) -> None:
    assert ParallelConfig.load(written(tmp_path, name, DIALECTS[name])) == EXPECTED


def test_a_whole_file_of_another_tool(tmp_path: Path) -> None:
    """A warning names what was not read, so that nobody believes that it holds; a misspelt degree is an error."""
    text = DIALECTS["axolotl.yml"] + "base_model: some/model-8B\nfsdp_config:\n  offload_params: true\nbf16: true\n"
    with pytest.warns(UserWarning, match="no keys of ParallelConfig: base_model, fsdp_config, bf16$") as caught:
        assert ParallelConfig.load(written(tmp_path, "axolotl.yaml", text)) == EXPECTED
    assert [note.filename for note in caught] == [__file__]
    path = written(tmp_path, "axolotl.yaml", text.replace("dp_shard_size", "dp_shard_sise"))
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path))
    assert "unknown key 'dp_shard_sise' (did you mean 'dp_shard_size'?)" in error


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
        ("a.toml", "tensr = 2\n", "unknown key 'tensr' (did you mean 'tensor'?). The keys are replicate, shard,"),
        ("a.toml", "[parallel]\ntp_sise = 2\n", " [parallel]: unknown key 'tp_sise' (did you mean 'tp_size'?)"),
        (
            "a.yaml",
            "tp_size: 2\ntensor_parallel_size: 4\n",
            "tp_size = 2 and tensor_parallel_size = 4 both give 'tensor'",
        ),
        ("a.toml", "tensor = 2\ntensor = 4\n", "is not TOML: "),
        ("a.yaml", "tensor: [2\n", "is not YAML: "),
        ("a.yaml", "- 2\n", "expected keys and values, got a list"),
        ("a.yaml", "", "expected keys and values, got nothing"),
        ("a.toml", "[parallel]\n[parallelism]\n", "has the sections ['parallel', 'parallelism']; keep one"),
        ("a.toml", "[parallel]\ntensor = 0\n", " [parallel]: tensor: expected a number of ranks, 1 or more; got 0"),
        ("a.toml", 'shard = "some"\n', ": shard: expected a number of ranks, 1 or more, or \"auto\"; got 'some'"),
        ("a.json", "{}", "expected a file that ends in .toml, .yaml or .yml"),
    ],
)
def test_bad_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path))
    assert error.startswith(str(path)) and message in error, error


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert (
        error_of(ArgumentError, lambda: ParallelConfig.load(path))
        == f"{path}: cannot be read: No such file or directory"
    )
    path.write_bytes(b"\xff\xfe")
    assert error_of(ArgumentError, lambda: ParallelConfig.load(path)).startswith(f"{path}: is not TOML: ")


def test_sections(tmp_path: Path) -> None:
    path = written(tmp_path, "a.toml", "[small]\ntensor = 2\n[large]\ntensor = 4\n")
    assert ParallelConfig.load(path, section="large").tensor == 4
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path, section="huge"))
    assert error == f"{path}: has no section 'huge'; it has small, large"


def test_what_we_do_not_have_is_refused() -> None:
    error = error_of(
        UnsupportedError, lambda: ParallelConfig.from_mapping({"expert_parallel_size": 2}, source="run.yml")
    )
    assert error.startswith("run.yml: expert_parallel_size = 2 asks for what")


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.yaml", "tensor: 2\n")
    monkeypatch.setitem(sys.modules, "yaml", None)  # what an import finds where there is no such package
    error = error_of(ArgumentError, lambda: ParallelConfig.load(path))
    assert error.startswith(f'{path}: reading YAML needs PyYAML: pip install "fsdp2[yaml]"')
