"""Hugging Face transformers 5, unmodified, on torch's FSDP2 and on ours: its Trainer, models from `from_pretrained`
that a program shards, and models that transformers itself shards while it loads them (`DistributedConfig`)."""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

from tests.clients.clients import Both, Run, library_of, run_both, run_script

VOCAB, DIM, LAYERS, LENGTH = 64, 32, 3, 8
SIZES = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(tied: bool) -> PreTrainedModel:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))


def make_experts() -> PreTrainedModel:
    torch.manual_seed(5)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **experts, norm_topk_prob=True))


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All values, made whole. Collective."""
    values = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    return {name: value.detach().clone() for name, value in values.items()}


def tokens(num: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (num, LENGTH), generator=torch.Generator().manual_seed(seed))


# --- the Trainer ------------------------------------------------------------------------------------------------------


class Losses(TrainerCallback):
    """Every number that the Trainer logs for a step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])


def arguments(folder: str, **options: Any) -> TrainingArguments:
    """On a CPU-only machine Accelerate must be told to take the CPU for an accelerator, or it ignores FSDP plugins."""
    if not torch.cuda.is_available():
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options |= {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
    every = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    return TrainingArguments(folder, **(every | quiet | options))


def train(folder: str, kind: str, tied: bool = False, steps: int = 4, resume: bool = False, **options: Any) -> Run:
    fsdp = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": kind, "cpu_ram_efficient_loading": False}
    args = arguments(folder, fsdp=True, fsdp_config=fsdp, max_steps=4, save_steps=2, seed=1, **options)
    ids = tokens(64, 7).tolist()
    losses = Losses()
    trainer = Trainer(
        model=make_model(tied),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")) if resume else None)
    trainer.save_model(str(Path(folder, "final")))
    values = {"norms": losses.norms, "parameters": whole(trainer.model)}
    return Run(losses.losses, library_of(trainer.model), values=values)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_the_trainer(tmp_path: Path, kind: str) -> None:
    """Four steps, a checkpoint after two; a second process resumes from it, each library from the other's too."""
    folder = str(tmp_path / "torch")
    theirs = run_script(train, 2, "torch", folder=folder, kind=kind)
    ours = run_script(train, 2, "fsdp2", folder=str(tmp_path / "ours"), kind=kind)
    Both(theirs, ours).assert_equal()
    for saved in ("torch", "ours"):
        resumed = run_script(train, 2, "fsdp2", folder=str(tmp_path / saved), kind=kind, resume=True)
        assert resumed[0].library["fsdp2"] == ours[0].library["fsdp2"]
        assert resumed[0].losses == ours[0].losses[2:]
        assert resumed[0].values["norms"] == ours[0].values["norms"][2:]
    if kind == "FULL_STATE_DICT":
        final = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "final")
        assert all(torch.equal(value, ours[0].values["parameters"][name]) for name, value in final.state_dict().items())


def test_the_trainer_accumulates_and_checkpoints_activations(tmp_path: Path) -> None:
    options = {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "tied": True,
        "kind": "FULL_STATE_DICT",
    }
    run_both(train, 2, folder=str(tmp_path), **options).assert_equal()


# --- from_pretrained, then fully_shard --------------------------------------------------------------------------------


def fine_tune(source: str, target: str) -> Run:
    """What a fine-tuning script without a trainer does."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    losses = loop(model, data_rank=dist.get_rank())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(target, state_dict=state)
    dist.barrier()
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return Run(losses, library_of(model), values={"parameters": whole(model), "tied": tied})


def loop(model: nn.Module, data_rank: int, steps: int = 4) -> list[float]:
    # Neither foreach nor torch's clipping takes parameters of several meshes at once.
    several = len({param.device_mesh for param in model.parameters()}) > 1
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=not several)
    ids = tokens(2, data_rank)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not several:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_tied_pretrained_model_is_sharded_trained_and_saved(tmp_path: Path) -> None:
    make_model(tied=True).save_pretrained(tmp_path / "source")
    both = run_both(fine_tune, 2, source=str(tmp_path / "source"), target=str(tmp_path / "target"))
    both.assert_equal()
    assert both.ours[0].values["tied"]
    assert both.ours[0].losses[-1] < both.ours[0].losses[0]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in both.ours[0].values["parameters"].items())


# --- transformers shards while it loads -------------------------------------------------------------------------------


def load_sharded(source: str, target: str, degrees: dict[str, int], data_ranks: list[int], **options: Any) -> Run:
    """`from_pretrained(distributed_config=...)`: the meta model is sharded and each rank reads its part of the file."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**degrees), **options)
    losses = loop(model, data_rank=data_ranks[dist.get_rank()])
    model.save_pretrained(target)
    return Run(losses, library_of(model), values={"parameters": whole(model)})


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_while_loading(tmp_path: Path, tied: bool) -> None:
    make_model(tied).save_pretrained(tmp_path / "source")
    paths = {"source": str(tmp_path / "source"), "target": str(tmp_path / "target")}
    both = run_both(load_sharded, 2, **paths, degrees={"fsdp_size": 2}, data_ranks=[0, 1])
    both.assert_equal()
    assert both.ours[0].losses[-1] < both.ours[0].losses[0]
    saved = AutoModelForCausalLM.from_pretrained(paths["target"]).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in both.ours[0].values["parameters"].items())


DEGREES = {
    "fsdp-tp": ({"fsdp_size": 2, "tp_size": 2}, [0, 0, 1, 1]),
    "hsdp": ({"dp_replicate_size": 2, "fsdp_size": 2}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", DEGREES)
def test_sharded_while_loading_in_two_axes(tmp_path: Path, name: str) -> None:
    make_model(tied=False).save_pretrained(tmp_path / "source")
    degrees, data_ranks = DEGREES[name]
    paths = {"source": str(tmp_path / "source"), "target": str(tmp_path / "target")}
    both = run_both(load_sharded, 4, **paths, degrees=degrees, data_ranks=data_ranks)
    both.assert_equal()


def test_experts_on_their_own_mesh(tmp_path: Path) -> None:
    """Expert parallelism over 2 of 4 ranks: experts on the mesh that is left, everything else on all, with a gradient
    divide factor and forced sums."""
    make_experts().save_pretrained(tmp_path / "source")
    paths = {"source": str(tmp_path / "source"), "target": str(tmp_path / "target")}
    degrees = {"fsdp_size": 4, "ep_size": 2, "ep_implementation": "all_to_all"}
    both = run_both(load_sharded, 4, **paths, degrees=degrees, data_ranks=[0, 1, 2, 3])
    # Four ranks: gloo's ring and our rank order add in different orders, and Adam's division makes the most of it.
    both.assert_equal(rtol=1e-5, atol=1e-5)


def load_and_train(source: str, folder: str) -> Run:
    """The Trainer on a model that transformers sharded: neither Accelerate's plugin nor DDP, no accelerator needed."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(fsdp_size=2))
    ids = tokens(64, 7).tolist()
    losses = Losses()
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no"}
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=3, gradient_accumulation_steps=2, logging_steps=1, learning_rate=1e-2, **quiet
    )
    dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
    Trainer(model=model, args=args, train_dataset=dataset, callbacks=[losses]).train()
    return Run(losses.losses, library_of(model), values={"norms": losses.norms, "parameters": whole(model)})


def test_the_trainer_on_a_model_that_was_sharded_while_loading(tmp_path: Path) -> None:
    make_model(tied=True).save_pretrained(tmp_path / "source")
    both = run_both(load_and_train, 2, source=str(tmp_path / "source"), folder=str(tmp_path / "out"))
    both.assert_equal()
