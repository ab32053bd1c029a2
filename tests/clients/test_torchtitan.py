"""torchtitan 0.3: its own trainer and `apply_fsdp_to_decoder` on its debug models, bitwise as on torch's FSDP2."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.clients.clients import Run, library_of, run_both, run_in_folders, run_script
from tests.clients.titan import FullAC, small, train


def run(config: Any) -> Run:
    """Losses, norms of gradients before clipping, and the parameters in the end."""
    trainer = train(config)
    parameters = {
        f"{part}.{name}": parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for part, model in enumerate(trainer.model_parts)
        for name, parameter in model.state_dict().items()
    }
    values = {"norms": trainer.metrics_processor.norms, "parameters": parameters}
    return Run(trainer.metrics_processor.losses, library_of(*trainer.model_parts), values)


def llama3(folder: str, steps: int = 3, tied: bool = False, recompute_all: bool = False, **settings: Any) -> Run:
    """Train the llama3 debug model."""
    config = small("llama3", folder, steps=steps, **settings)
    config.model_spec.model.enable_weight_tying = tied
    if recompute_all:
        config.activation_checkpoint = FullAC.Config()
    return run(config)


def deepseek_v3(folder: str, steps: int = 3, **settings: Any) -> Run:
    """Train the DeepSeek V3 debug model, a mixture of experts."""
    return run(small("deepseek_v3", folder, steps=steps, **settings))


def resumed(folder: str, load_step: int) -> Run:
    """Four steps, or the last two of them from torchtitan's checkpoint (DCP) of step 2."""
    config = small("llama3", folder, steps=4, spmd_backend="partial_dtensor")
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    config.checkpoint.load_step = load_step
    return run(config)


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_llama3(backend: str, tmp_path: Path) -> None:
    """1-D FSDP: the chunked loss runs the head, a unit of its own, outside of the root's forward."""
    run_both(llama3, 2, folder=str(tmp_path), spmd_backend=backend).assert_equal()


SETTINGS: dict[str, dict[str, Any]] = {
    "never_resharded": {"fsdp_reshard_after_forward": "never"},
    "recomputed": {"recompute_all": True, "fsdp_reshard_after_forward": "always"},
    "tied": {"tied": True},
    "accumulated": {"global_batch_size": 8, "steps": 20},  # two micro-batches; torchtitan clips to 1.0 by itself
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    both = run_both(llama3, 2, folder=str(tmp_path), spmd_backend="partial_dtensor", **settings)
    both.assert_equal()
    assert len(both.ours[0].losses) == settings.get("steps", 3)


def test_bf16(tmp_path: Path) -> None:
    """Compute in bf16, reduction in fp32: the same forward to the bit. Then close: gradients that autograd computes in
    fp32 (of the gains of norms) are rounded to bf16 before torch reduces them, and not before we do."""
    options = {"spmd_backend": "partial_dtensor", "mixed_precision_param": "bfloat16"}
    both = run_both(llama3, 2, folder=str(tmp_path), **options)
    for theirs, ours in zip(both.torch, both.ours, strict=True):
        assert ours.losses[0] == theirs.losses[0]
        del theirs.values["parameters"], ours.values["parameters"]
    both.assert_equal(rtol=2e-4)


def test_checkpoints_of_one_are_read_by_the_other(tmp_path: Path) -> None:
    """torchtitan saves with either library, and resumes with the other, as if nothing had happened."""
    both = run_in_folders(resumed, 2, tmp_path, load_step=-1)
    both.assert_equal()
    expected = both.torch[0]
    assert len(expected.losses) == 4
    for reader, writer in (("fsdp2", "torch"), ("torch", "fsdp2")):
        run = run_script(resumed, 2, reader, folder=str(tmp_path / writer), load_step=2)[0]
        assert run.losses == expected.losses[2:], f"written with {writer}, read with {reader}"
        assert run.library[reader] > 0


DEGREES = {
    "hsdp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    "tensor": {"tensor_parallel_degree": 2},
}


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
@pytest.mark.parametrize("degrees", DEGREES)
def test_llama3_on_four(backend: str, degrees: str, tmp_path: Path) -> None:
    run_both(llama3, 4, folder=str(tmp_path), spmd_backend=backend, **DEGREES[degrees]).assert_equal()


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_expert_parallel(backend: str, tmp_path: Path) -> None:
    """A mesh for each parameter, from torch's private classes: experts over one, the rest over another."""
    run_both(deepseek_v3, 2, folder=str(tmp_path), spmd_backend=backend, expert_parallel_degree=2).assert_equal()


def test_expert_parallel_hsdp(tmp_path: Path) -> None:
    """Two replicas of two ranks that share the experts."""
    degrees = {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}
    run_both(deepseek_v3, 4, folder=str(tmp_path), spmd_backend="partial_dtensor", **degrees).assert_equal()
