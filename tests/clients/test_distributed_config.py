"""transformers' own sharding, `from_pretrained(distributed_config=DistributedConfig(...))`: FSDP, HSDP, with tensor and
with expert parallelism, under the Trainer and under a plain loop. 20 steps of two micro-batches each, clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from tests.clients.clients import Both, Run, library_of, run_both, run_script

VOCAB, LENGTH, STEPS, HALF, ACCUMULATE, MAX_NORM = 64, 8, 20, 10, 2, 0.5
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))


def experts() -> PreTrainedModel:
    torch.manual_seed(5)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **sizes, norm_topk_prob=True))


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All values, made whole. Collective."""
    values = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    return {name: value.detach().clone() for name, value in values.items()}


def assert_trained(source: PreTrainedModel, both: Both) -> None:
    """No parameter of the model has the values that it was loaded with, on either library."""
    start = source.state_dict()
    for run in (both.torch[0], both.ours[0]):
        assert [name for name, value in run.values["parameters"].items() if torch.equal(value, start[name])] == []


# Degrees, and the batch that each rank reads in the plain loop (ranks of one tensor-parallel group read the same).
DEGREES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "fsdp": ({"fsdp_size": 2}, [0, 1]),
    "bf16": ({"fsdp_size": 2, "fsdp_mixed_precision": True}, [0, 1]),
    "hsdp": ({"fsdp_size": 2, "dp_replicate_size": 2}, [0, 1, 2, 3]),
    "fsdp-tp": ({"fsdp_size": 2, "tp_size": 2}, [0, 0, 1, 1]),
    "ep": ({"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}, [0, 1]),
    "hsdp-ep": (
        {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
        [0, 1, 2, 3],
    ),
}


def source_of(name: str, tied: bool = False) -> PreTrainedModel:
    return experts() if "ep" in name else llama(tied)


# --- the Trainer ------------------------------------------------------------------------------------------------------


def arguments(folder: str, **options: Any) -> TrainingArguments:
    every = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_grad_norm": MAX_NORM,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    return TrainingArguments(folder, **(every | quiet | options))


def under_the_trainer(source: str, folder: str, degrees: dict[str, Any], **options: Any) -> Run:
    dist.init_process_group("gloo")
    if "tp_size" in degrees and not torch.cuda.is_available():
        # Accelerate refuses tensor parallelism on CPUs, unless its one field says that they are accelerators.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options |= {"accelerator_config": {"use_configured_state": True}}
    config = DistributedConfig(**degrees)
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=config)
    ids = torch.randint(VOCAB, (256, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = Trainer(model=model, args=arguments(folder, **options), train_dataset=dataset)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    values = {"norms": [entry["grad_norm"] for entry in logs], "parameters": whole(model)}
    return Run([entry["loss"] for entry in logs], library_of(model), values=values)


@pytest.mark.parametrize("name", DEGREES)
def test_the_trainer(tmp_path: Path, name: str) -> None:
    """The Trainer postpones reductions itself for a model that transformers sharded. With HSDP it calls
    `set_requires_all_reduce(False)` before the first micro-batch and `set_requires_gradient_sync(True)` after it."""
    source_of(name).save_pretrained(tmp_path / "source")
    degrees, data_ranks = DEGREES[name]
    paths = {"source": str(tmp_path / "source"), "folder": str(tmp_path / "out")}
    both = run_both(under_the_trainer, len(data_ranks), **paths, degrees=degrees)
    compare(both)
    assert_trained(source_of(name), both)


def test_what_the_trainer_saves(tmp_path: Path) -> None:
    """Weights only: the Trainer refuses to resume a model that was sharded while it was loaded. Training on from its
    files, with a new optimizer, is the same with either library."""
    llama().save_pretrained(tmp_path / "source")
    paths = {"source": str(tmp_path / "source"), "folder": str(tmp_path / "first")}
    options = {"save_strategy": "steps", "save_steps": HALF, "save_only_model": True, "max_steps": HALF}
    first = run_both(under_the_trainer, 2, **paths, degrees={"fsdp_size": 2}, **options)
    first.assert_equal()
    checkpoint = tmp_path / "first" / f"checkpoint-{HALF}"
    saved = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(value, saved[key]) for key, value in first.ours[0].values["parameters"].items())
    again = {"source": str(checkpoint), "folder": str(tmp_path / "again"), "max_steps": HALF}
    run_both(under_the_trainer, 2, **again, degrees={"fsdp_size": 2}).assert_equal()


def compare(both: Both) -> None:
    for run in both.torch + both.ours:
        assert len(run.values["norms"]) == STEPS
        assert min(run.values["norms"]) > 0.0
    both.assert_equal()


# --- a plain loop -----------------------------------------------------------------------------------------------------


def loop(
    model: nn.Module, optim: torch.optim.Optimizer, data_rank: int, steps: range
) -> tuple[list[float], list[float]]:
    """Postpones reductions as the Trainer does."""
    replicated = model.config.distributed_config.dp_replicate_size > 1
    losses, norms = [], []
    for step in steps:
        for micro in range(ACCUMULATE):
            if micro < ACCUMULATE - 1:
                (model.set_requires_all_reduce if replicated else model.set_requires_gradient_sync)(False)
            seed = 1000 * data_rank + ACCUMULATE * step + micro
            ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
            loss = model(input_ids=ids, labels=ids).loss / ACCUMULATE
            loss.backward()
            losses.append(loss.item())
            model.set_requires_gradient_sync(True)
        norms.append(clip(model))
        optim.step()
        optim.zero_grad()
    return losses, norms


def clip(model: nn.Module) -> float:
    """As the Trainer clips parameters of several meshes: one norm for each mesh."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        meshes.setdefault(param.device_mesh, []).append(param)
    norms = [nn.utils.get_total_norm([p.grad for p in params]).full_tensor() for params in meshes.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for params in meshes.values():
        nn.utils.clip_grads_with_norm_(params, MAX_NORM, norm)
    return norm.item()


def plain(source: str, target: str, degrees: dict[str, Any], data_ranks: list[int], begin: int = 0) -> Run:
    """The steps from `begin`; model and optimizer are saved by transformers, halfway and at the end."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**degrees))
    several = len({param.device_mesh for param in model.parameters()}) > 1
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=not several)
    rank = data_ranks[dist.get_rank()]
    losses: list[float] = []
    norms: list[float] = []
    if begin:
        load_optimizer_distributed(model, optim, f"{source}/optimizer")
    else:
        losses, norms = loop(model, optim, rank, range(HALF))
        model.save_pretrained(f"{target}/native", distributed_checkpoint=True)
        save_optimizer_distributed(model, optim, f"{target}/native/optimizer")
    more = loop(model, optim, rank, range(HALF, STEPS))
    model.save_pretrained(f"{target}/whole")
    values = {"norms": norms + more[1], "parameters": whole(model)}
    return Run(losses + more[0], library_of(model), values=values)


@pytest.mark.parametrize("name", DEGREES)
def test_a_plain_loop(tmp_path: Path, name: str) -> None:
    """Stopped halfway, each library goes on from what the other saved as if nothing had happened."""
    source = source_of(name)
    source.save_pretrained(tmp_path / "source")
    degrees, data_ranks = DEGREES[name]
    options = {"degrees": degrees, "data_ranks": data_ranks}
    runs = {}
    for library in ("torch", "fsdp2"):
        paths = {"source": str(tmp_path / "source"), "target": str(tmp_path / library)}
        runs[library] = run_script(plain, len(data_ranks), library, **paths, **options)
    both = Both(runs["torch"], runs["fsdp2"])
    compare(both)
    assert_trained(source, both)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp2" / "whole").state_dict()
    assert all(torch.equal(value, saved[key]) for key, value in both.ours[0].values["parameters"].items())
    for reader, writer in (("fsdp2", "torch"), ("torch", "fsdp2")):
        paths = {"source": str(tmp_path / writer / "native"), "target": str(tmp_path / "rest")}
        resumed = run_script(plain, len(data_ranks), reader, **paths, **options, begin=HALF)
        for after, before in zip(resumed, runs[writer], strict=True):
            assert after.losses == before.losses[HALF * ACCUMULATE :]
            expected = before.values | {"norms": before.values["norms"][HALF:]}
            torch.testing.assert_close(after.values, expected, rtol=0, atol=0)
