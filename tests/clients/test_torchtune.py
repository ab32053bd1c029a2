"""torchtune's recipe for full fine-tuning, with its config, as the wheel has them, on a tiny Llama 2. 20 steps,
accumulated and clipped where the recipe can. torchtune reduces the gradients of each micro-batch, adds them up on the
shards, and scales them by the number of tokens before it clips. Its LoRA and DPO recipes ask for NCCL on any device.

torchtune 0.6.1 cannot be imported with the torchao that test_torchao.py uses. `make test-clients` puts the newest that
it works with into a folder of its own, which only the ranks of these tests see.
"""

import json
import random
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sentencepiece
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.clients.clients import Run, library_of, run_in_folders, run_script

OLD_TORCHAO = Path(sys.prefix, "torchao-for-torchtune")
VOCAB, STEPS = 100, 20
SIZES = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64}


class Keep:
    """A metric logger, which torchtune takes from the config: what rank 0 would have written to a file."""

    steps: ClassVar[list[dict[str, float]]] = []

    def __init__(self, log_dir: str) -> None:
        pass

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        Keep.steps.append({key: float(value) for key, value in payload.items() if "tokens_per" not in key})

    def close(self) -> None:
        pass


def recipe(folder: str, options: dict[str, Any]) -> Run:
    """`tune run full_finetune_distributed --config llama2/7B_full key=value ...`, which torchrun would start."""
    sys.path.insert(0, str(OLD_TORCHAO))
    import datasets
    from torchtune import training

    if not torch.cuda.is_available():  # the recipes call these on CPUs too, where they fail
        training.get_memory_stats = lambda device: {}
        training.log_memory_stats = lambda stats: None
        training.cleanup_before_training = lambda: None
    datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
    spec = find_spec("recipes")
    assert spec is not None and spec.submodule_search_locations is not None
    recipes = Path(spec.submodule_search_locations[0])
    path = str(recipes / "full_finetune_distributed.py")
    sys.argv = [path, "--config", str(recipes / "configs/llama2/7B_full.yaml"), f"output_dir={folder}"]
    sys.argv += [f"{key}={value}" for key, value in options.items()]
    models: dict[int, nn.Module] = {}  # the recipe ends without handing its model over

    def before_forward(module: nn.Module, args: Any) -> None:
        models[id(module)] = module

    register_module_forward_pre_hook(before_forward)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code is None
    losses = [step["loss"] for step in Keep.steps] or [0.0]  # only rank 0 logs
    return Run(losses, library_of(*models.values()), values={"steps": Keep.steps})


def files_for(folder: Path) -> None:
    """A tokenizer, a model and data, where the config looks for what one has downloaded."""
    folder.mkdir()
    random.seed(7)
    words = ["".join(random.choices("abcdefghij", k=random.randint(2, 5))) for _ in range(40)]
    sentences = [" ".join(random.choices(words, k=6)) for _ in range(96)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_prefix=str(folder / "tokenizer"), vocab_size=VOCAB,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    names = ("instruction", "input", "output", "question", "response_j", "response_k")
    rows = [dict(zip(names, random.sample(sentences, len(names)), strict=True)) for _ in range(192)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(path: str) -> Run:
    """torchtune's model, whole, saved as torchtune saves it."""
    sys.path.insert(0, str(OLD_TORCHAO))
    from torchtune.models.llama2 import llama2

    torch.manual_seed(5)
    model = llama2(**SIZES)
    torch.save(model.state_dict(), path)
    return Run([], library_of(model))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (2, {"clip_grad_norm": 0.5}),
    "full-tp": (
        4,
        {
            "tensor_parallel_dim": 2,
            "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
            "optimizer.fused": False,
        },
    ),
    "optimizer-in-backward": (2, {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_recipes(tmp_path: Path, case: str) -> None:
    ranks, options = CASES[case]
    base = tmp_path / "base"
    files_for(base)
    run_script(make_model, 1, "torch", path=str(base / "model.pt"))
    every = {
        "device": "cpu",
        "dtype": "fp32",
        "seed": 3,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps_per_epoch": STEPS,
        "optimizer.lr": 1e-2,
        "model._component_": "torchtune.models.llama2.llama2",
        "tokenizer.path": base / "tokenizer.model",
        "tokenizer.max_seq_len": 48,
        "dataset.source": "json",
        "dataset.data_files": base / "data.jsonl",
        "dataset.split": "train",
        "checkpointer._component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpointer.checkpoint_dir": base,
        "checkpointer.checkpoint_files": "[model.pt]",
        "metric_logger._component_": f"{__name__}.Keep",
        "log_peak_memory_stats": False,
    }
    every |= {f"model.{key}": value for key, value in SIZES.items()}
    words = {key: str(value) for key, value in (every | options).items()}
    both = run_in_folders(recipe, ranks, tmp_path, options=words)
    both.assert_equal()
    assert len(both.ours[0].losses) == STEPS
    if "clip_grad_norm" in options:
        assert min(step["grad_norm"] for step in both.ours[0].values["steps"]) > 0.0
    theirs, ours = (weights(tmp_path / library) for library in ("torch", "fsdp2"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model that the recipe saved at its end."""
    (path,) = folder.glob("epoch_0/*.bin")
    loaded: dict[str, torch.Tensor] = torch.load(path)
    return loaded
