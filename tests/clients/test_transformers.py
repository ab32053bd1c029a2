"""Hugging Face transformers 5, unmodified, on torch's FSDP2 and on ours: its Trainer, models from `from_pretrained`
that a program shards, and models that transformers itself shards while it loads them, in all its combinations.
20 steps of two micro-batches each, clipped."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from tests.clients.clients import Run, library_of, run_both, run_in_folders, run_script
from tests.clients.training import LENGTH, SIZES, VOCAB, adamw, llama, take_cpus_for_accelerators, train, whole_state

STEPS, HALF = 20, 10


def experts() -> PreTrainedModel:
    torch.manual_seed(5)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, norm_topk_prob=True))


def has_weights(folder: Path, run: Run) -> bool:
    """A folder that transformers saved has what was trained, by its names."""
    stored = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(value, stored[name]) for name, value in run.values["parameters"].items())


# --- the Trainer ------------------------------------------------------------------------------------------------------


def under_the_trainer(model: nn.Module, folder: str, resume: str | None = None, **options: Any) -> Run:
    every = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "seed": 1,
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no"}
    ids = torch.randint(VOCAB, (256, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(folder, **(every | quiet | options)),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
    )
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    values = {"norms": [entry["grad_norm"] for entry in logs], "parameters": whole_state(trainer.model)}
    return Run([entry["loss"] for entry in logs], library_of(trainer.model), values=values)


def by_the_plugin(folder: str, kind: str, tied: bool = False, **options: Any) -> Run:
    """The Trainer shards, by Accelerate's plugin."""
    options |= take_cpus_for_accelerators()
    fsdp = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": kind, "cpu_ram_efficient_loading": False}
    saves = {"save_strategy": "steps", "save_steps": HALF, "fsdp": True, "fsdp_config": fsdp}
    return under_the_trainer(llama(tie_word_embeddings=tied), folder, **(saves | options))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_the_trainer(tmp_path: Path, kind: str) -> None:
    """A checkpoint halfway; a second process resumes from it, ours from torch's too."""
    both = run_in_folders(by_the_plugin, 2, tmp_path, kind=kind)
    both.assert_equal()
    if kind == "FULL_STATE_DICT":
        assert has_weights(tmp_path / "fsdp2" / f"checkpoint-{STEPS}", both.ours[0])
    for library in ("torch", "fsdp2"):
        resume = str(tmp_path / library / f"checkpoint-{HALF}")
        resumed = run_script(by_the_plugin, 2, "fsdp2", folder=str(tmp_path / "rest"), kind=kind, resume=resume)
        assert resumed[0].library == both.ours[0].library
        assert resumed[0].losses[-HALF:] == both.ours[0].losses[HALF:]
        assert resumed[0].values["norms"][-HALF:] == both.ours[0].values["norms"][HALF:]


# --- from_pretrained, then fully_shard --------------------------------------------------------------------------------


def fine_tune(source: str, target: str) -> Run:
    """What a fine-tuning script without a trainer does."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    run = train(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(target, state_dict=state)
    dist.barrier()
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return Run(run.losses, run.library, values=run.values | {"parameters": whole_state(model), "tied": tied})


def test_a_tied_pretrained_model_is_sharded_trained_and_saved(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "source")
    both = run_both(fine_tune, 2, source=str(tmp_path / "source"), target=str(tmp_path / "target"))
    both.assert_equal()
    assert both.ours[0].values["tied"]
    assert has_weights(tmp_path / "target", both.ours[0])


# --- transformers shards while it loads -------------------------------------------------------------------------------

# Degrees, and the batch that each rank reads in the plain loop (ranks of one tensor-parallel group read the same).
EXPERTS = {"ep_size": 2, "ep_implementation": "all_to_all"}
DEGREES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "fsdp": ({"fsdp_size": 2}, [0, 1]),
    "tied": ({"fsdp_size": 2}, [0, 1]),
    "bf16": ({"fsdp_size": 2, "fsdp_mixed_precision": True}, [0, 1]),
    "hsdp": ({"fsdp_size": 2, "dp_replicate_size": 2}, [0, 1, 2, 3]),
    "fsdp-tp": ({"fsdp_size": 2, "tp_size": 2}, [0, 0, 1, 1]),
    "ep": ({"fsdp_size": 2, **EXPERTS}, [0, 1]),
    "hsdp-ep": ({"fsdp_size": 2, "dp_replicate_size": 2, **EXPERTS}, [0, 1, 2, 3]),
}


def save_source(name: str, folder: Path) -> str:
    model = experts() if "ep" in name else llama(tie_word_embeddings=name == "tied")
    model.save_pretrained(folder)
    return str(folder)


def loaded(source: str, degrees: dict[str, Any]) -> Any:
    """The meta model is sharded, and each rank reads its part of the file."""
    dist.init_process_group("gloo")
    return AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**degrees))


def load_and_train(source: str, folder: str, degrees: dict[str, Any], **options: Any) -> Run:
    options |= take_cpus_for_accelerators() if "tp_size" in degrees else {"use_cpu": True}
    return under_the_trainer(loaded(source, degrees), folder, **options)


@pytest.mark.parametrize("name", DEGREES)
def test_the_trainer_on_a_model_that_was_sharded_while_loading(tmp_path: Path, name: str) -> None:
    degrees, data_ranks = DEGREES[name]
    source = save_source(name, tmp_path / "source")
    run_in_folders(load_and_train, len(data_ranks), tmp_path, source=source, degrees=degrees).assert_equal()


def clip(params: Any, max_norm: float) -> torch.Tensor:
    """As the Trainer clips parameters of several meshes: one norm for each mesh."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        meshes.setdefault(param.device_mesh, []).append(param)
    norms = [nn.utils.get_total_norm([p.grad for p in each]).full_tensor() for each in meshes.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for each in meshes.values():
        nn.utils.clip_grads_with_norm_(each, max_norm, norm)
    return norm


def plain(source: str, folder: str, degrees: dict[str, Any], data_ranks: list[int], begin: int = 0) -> Run:
    """The steps from `begin`; model and optimizer are saved by transformers, halfway and at the end."""
    model = loaded(source, degrees)
    several = len({param.device_mesh for param in model.parameters()}) > 1
    optim = adamw(model, foreach=not several)
    replicated = model.config.distributed_config.dp_replicate_size > 1

    def before(step: int, is_last: bool) -> None:
        """Postpones reductions as the Trainer does."""
        model.set_requires_gradient_sync(True)
        if not is_last:
            (model.set_requires_all_reduce if replicated else model.set_requires_gradient_sync)(False)

    options: dict[str, Any] = {"before": before, "clip": clip, "optimizer": optim}
    options["data_rank"] = data_ranks[dist.get_rank()]
    losses, norms = [], []
    if begin:
        load_optimizer_distributed(model, optim, f"{source}/optimizer")
    else:
        first = train(model, steps=range(HALF), **options)
        losses, norms = first.losses, first.values["norms"]
        model.save_pretrained(f"{folder}/native", distributed_checkpoint=True)
        save_optimizer_distributed(model, optim, f"{folder}/native/optimizer")
    run = train(model, steps=range(HALF, STEPS), **options)
    model.save_pretrained(f"{folder}/whole")
    values = {"norms": norms + run.values["norms"], "parameters": whole_state(model)}
    return Run(losses + run.losses, run.library, values=values)


@pytest.mark.parametrize("name", DEGREES)
def test_a_plain_loop(tmp_path: Path, name: str) -> None:
    """Stopped halfway, each library goes on from what the other saved as if nothing had happened."""
    degrees, data_ranks = DEGREES[name]
    options = {"degrees": degrees, "data_ranks": data_ranks}
    both = run_in_folders(plain, len(data_ranks), tmp_path, source=save_source(name, tmp_path / "source"), **options)
    both.assert_equal()
    assert has_weights(tmp_path / "fsdp2" / "whole", both.ours[0])
    for reader, writer, runs in (("fsdp2", "torch", both.torch), ("torch", "fsdp2", both.ours)):
        paths = {"source": str(tmp_path / writer / "native"), "folder": str(tmp_path / "rest")}
        resumed = run_script(plain, len(data_ranks), reader, **paths, **options, begin=HALF)
        for after, before in zip(resumed, runs, strict=True):
            assert after.losses == before.losses[-2 * HALF :]
            expected = before.values | {"norms": before.values["norms"][HALF:]}
            torch.testing.assert_close(after.values, expected, rtol=0, atol=0)
